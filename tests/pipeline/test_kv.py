"""The pipeline and its KV store: cached prefixes and answers, leases, and jobs whose blocks are gone."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.config.settings import KVSettings
from penstock.kvstore.block import ReadRequest, hash_blocks
from penstock.kvstore.store import KVStore
from penstock.messages import Request, Result, Sampling
from sim.line import InProcessPipeline, core_of, run_until_idle, run_until_running, serving_engine
from sim.waiting import PATIENCE_S
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests

BLOCK = ENGINE_SETTINGS.block_size
GREEDY = Sampling(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture
def line(make_line: Callable[..., InProcessPipeline], tmp_path: Path) -> InProcessPipeline:
    """Workers of one host: shared memory, and the disk behind it."""
    return make_line(
        kv=KVSettings(shared_mb=64, shared_dir=str(tmp_path), disk_mb=64, disk_dir=str(tmp_path / "disk"), redis_mb=0)
    )


def prompt_of(length: int, line: InProcessPipeline) -> Request:
    work = make_requests(40, line.pipeline.name)
    (longest,) = work[-1:]
    assert longest.token_ids is not None
    return longest.model_copy(update={"token_ids": longest.token_ids[:length], "sampling": GREEDY})


def ask(line: InProcessPipeline, request: Request, request_id: str) -> Result:
    line.send_requests(request.model_copy(update={"id": request_id}))
    results = line.run_until_results(len(line.read_results()) + 1)
    (mine,) = [result for result in results if result.id == request_id]
    return mine


def tokens_alone(request: Request) -> list[int]:
    return compute_answers([request])[request.id].token_ids


def empty_pools(line: InProcessPipeline) -> None:
    """Evict all blocks of both workers, as if they had just been started."""
    for worker in (line.prefill, line.decode):
        pool = core_of(worker).pool
        pool.free_blocks(pool.allocate_blocks(pool.num_free_blocks))


@pytest.mark.proof
def test_a_prompt_asked_again_is_found(line: InProcessPipeline) -> None:
    """In the pool, and in the tiers. Each length is another tenant's, as tenants share nothing."""
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7]
    work = [prompt_of(one, line).model_copy(update={"id": str(one), "tenant": f"t{one}"}) for one in lengths]
    expected = compute_answers(work)
    for where in ("nowhere", "pool", "tiers"):
        if where == "tiers":
            empty_pools(line)
        line.send_requests(*(one.model_copy(update={"id": f"{one.id}-{where}"}) for one in work))
        results = {one.id: one for one in line.run_until_results(len(line.read_results()) + len(work))}
        for length in lengths:
            result = results[f"{length}-{where}"]
            assert result.token_ids == expected[str(length)].token_ids
            assert result.usage.cached_tokens == (0 if where == "nowhere" else (length - 1) // BLOCK * BLOCK)
    assert serving_engine(line.decode).store.stats.recomputed_jobs == 0


def test_many_at_once_in_a_small_pool_each_get_what_is_stored(
    make_line: Callable[..., InProcessPipeline], tmp_path: Path
) -> None:
    """Blocks that were fetched for one request are not evicted by those for the next."""
    kv = KVSettings(shared_mb=64, shared_dir=str(tmp_path), redis_mb=0)
    line = make_line(kv=kv, engine=ENGINE_SETTINGS.model_copy(update={"pool_mb": 3}))
    longest = prompt_of(10**6, line).token_ids or []
    prompts = [longest[n : n + 12 * BLOCK] for n in range(8)]
    for turn in ("first", "again"):
        empty_pools(line)
        for n, prompt in enumerate(prompts):
            request = Request(id=f"{turn}-{n}", token_ids=prompt, sampling=Sampling(temperature=0, max_tokens=2))
            line.send_requests(request)
        found = line.run_until_results(len(prompts) * (1 if turn == "first" else 2))
    again = [result for result in found if result.id.startswith("again")]
    assert [result.usage.cached_tokens for result in again] == [11 * BLOCK] * len(prompts)
    assert serving_engine(line.decode).store.stats.recomputed_jobs == 0


@pytest.mark.proof
def test_the_next_turn_finds_the_answers_kv(line: InProcessPipeline) -> None:
    """Also when another worker wrote the answer, and its pool is gone."""
    first = prompt_of(3 * BLOCK + 5, line)
    answer = ask(line, first, "turn-1")
    assert first.token_ids is not None
    conversation = first.token_ids + answer.token_ids
    second = first.model_copy(update={"token_ids": [*conversation, *first.token_ids[:9]]})
    expected = tokens_alone(second)
    empty_pools(line)
    result = ask(line, second, "turn-2")
    assert result.token_ids == expected
    # the KV of the answer's last token was never computed
    assert result.usage.cached_tokens == (len(conversation) - 1) // BLOCK * BLOCK > len(first.token_ids)


def test_the_end_of_leases_hashes_no_prompt_again(line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a worker that is closed frees the connection of its appends."""
    request = prompt_of(30 * BLOCK + 2, line)
    line.send_requests(request)
    line.run_prefill(1)
    run_until_running(line.decode)
    num_hashed = 0

    def counted(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        nonlocal num_hashed
        num_hashed += len(token_ids)
        return hash_blocks(parent, token_ids, block_size)

    monkeypatch.setattr("penstock.kvstore.block.hash_blocks", counted)
    line.run_until_results(1)
    assert num_hashed <= GREEDY.max_tokens + 2 * BLOCK
    assert line.decode.record._appends._connection is not None
    line.decode.close()
    assert line.decode.record._appends._connection is None
    line.renew_decode()


def test_a_job_whose_blocks_are_gone_is_computed_again_and_counted(line: InProcessPipeline) -> None:
    request = prompt_of(4 * BLOCK + 2, line)
    expected = tokens_alone(request)
    line.send_requests(request)
    line.run_prefill(1)
    for tier in serving_engine(line.decode).store.tiers:
        tier.remove_blocks([entry.key for entry in tier.list_entries()][:3])
    (result,) = line.run_until_results(1)
    assert result.token_ids == expected
    stats = serving_engine(line.decode).store.stats
    assert stats.recomputed_jobs == 1
    assert 1 <= stats.recomputed_blocks <= 5


@pytest.mark.proof
def test_tenants_share_nothing(line: InProcessPipeline) -> None:
    request = prompt_of(6 * BLOCK, line)
    ask(line, request, "one")
    result = ask(line, request.model_copy(update={"tenant": "another"}), "two")
    assert result.usage.cached_tokens == 0
    assert ask(line, request, "three").usage.cached_tokens == 5 * BLOCK


def hold_up_reads(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let reads of blocks wait. Return an event that is set when one has begun, and one that lets them go on."""
    begun, go_on = threading.Event(), threading.Event()
    load: Callable[..., list[int]] = store.load_blocks

    def slow(wanted: Sequence[ReadRequest], *, must_read: bool = False) -> list[int]:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return load(wanted, must_read=must_read)

    monkeypatch.setattr(store, "load_blocks", slow)
    return begun, go_on


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_cancelled_while_its_blocks_are_fetched(
    line: InProcessPipeline, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends at once; the fetch ends later, and its blocks go back to the pool."""
    request = prompt_of(4 * BLOCK + 2, line)
    ask(line, request, "first")
    empty_pools(line)
    worker = line.prefill if stage == "prefill" else line.decode
    if stage == "decode":
        line.send_requests(request.model_copy(update={"id": "second"}))
        line.run_prefill(1)
        empty_pools(line)
    begun, go_on = hold_up_reads(serving_engine(worker).store, monkeypatch)
    if stage == "prefill":
        line.send_requests(request.model_copy(update={"id": "second"}))
    while not begun.is_set():
        worker.run_once()
    line.prefill.record.cancel_request("second")
    go_on.set()
    results = line.run_until_results(2)
    assert {result.id: result.finish_reason for result in results}["second"] == "cancelled"
    assert core_of(worker).num_free_blocks == core_of(worker).pool.num_blocks


def test_no_step_waits_for_a_tier(line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one job's blocks are fetched, another's tokens are generated."""
    slow, quick = prompt_of(4 * BLOCK + 2, line), prompt_of(1, line)
    line.send_requests(quick.model_copy(update={"id": "quick"}))
    line.run_prefill(1)
    while not core_of(line.decode).num_running:
        line.decode.run_once()
    line.send_requests(slow.model_copy(update={"id": "slow"}))
    while "slow" not in {job.key for job in line.bus.read_all(line.pipeline.job_topic("interactive"))}:
        run_until_idle(line.prefill)
    begun, go_on = hold_up_reads(serving_engine(line.decode).store, monkeypatch)
    while not begun.is_set():
        line.decode.run_once()
    events = line.decode.running["quick"].log_events
    while len(events) < GREEDY.max_tokens:
        line.decode.run_once()
    assert "slow" in line.decode.running
    go_on.set()
    assert {result.id for result in line.run_until_results(2)} == {"quick", "slow"}
