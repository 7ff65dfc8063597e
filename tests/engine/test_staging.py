"""Blocks that are staged and pinned while steps run, and blocks of generated tokens."""

import random
import threading
from typing import Any

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling
from tests.engine.helpers import drain, make_block_keys, needs_kernels, run_sequences, sequence, stage_blocks
from tools.handover import export_blocks, import_blocks

SAMPLED = Sampling(temperature=0.9, top_p=0.95)
NUM_NEW = 40
pytestmark = pytest.mark.usefixtures("unknown_growth")

SMALL = EngineSettings(max_batch=6, max_step_tokens=40, pool_mb=16)

PATHS = [
    "torch",
    pytest.param(("float32", "auto"), marks=needs_kernels, id="float32"),
    pytest.param(("bfloat16", "int8"), marks=needs_kernels, id="bfloat16 with int8 KV"),
]


@pytest.fixture(scope="module", params=PATHS)
def model(request: pytest.FixtureRequest, demo: LoadedModel) -> LoadedModel:
    """The demo model on torch, and on the kernels."""
    if request.param == "torch":
        return demo
    dtype, kv_dtype = request.param
    return accelerate_model(load_model(EngineSettings(dtype=dtype, kv_dtype=kv_dtype)))


def _prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(5, 1000) for _ in range(length)] for length in (1, 9, 16, 33, 48, 70, 25, 90)]


def _seqs() -> list[Sequence]:
    return [
        sequence(prompt, NUM_NEW, name=str(n), seed=n, **({"sampling": SAMPLED} if n % 2 else {}))
        for n, prompt in enumerate(_prompts())
    ]


def _resumed(seq: Sequence, num_given: int) -> Sequence:
    """Return the sequence of another worker that continues the request, with the keys of all full blocks."""
    prompt, given = seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids[:num_given]
    return sequence(prompt, NUM_NEW, name=seq.id, seed=seq.seed, sampling=seq.sampling, output_token_ids=given,
                    block_keys=make_block_keys(prompt + given))  # fmt: skip


@pytest.fixture(scope="module")
def done(demo: LoadedModel) -> tuple[list[int], list[bytes]]:
    """What a sequence says after the prompt of 70 tokens, and the prompt's blocks."""
    engine, seq = Engine(demo, SMALL), sequence(_prompts()[5], NUM_NEW)
    (output,) = run_sequences(engine, [seq], remove=False)
    return output, export_blocks(engine, seq)


# Blocks from a tier


def test_views_are_the_pools_own_memory_and_sequences_find_committed_blocks(
    demo: LoadedModel, done: tuple[list[int], list[bytes]]
) -> None:
    second, again, (output, payloads) = Engine(demo, SMALL), sequence(_prompts()[5], NUM_NEW), done
    staged = stage_blocks(second, again.block_keys)
    assert (staged.num_cached, len(staged.views)) == (0, 4)
    assert second.num_free_blocks == second.pool.num_blocks - 4
    for block, view, payload in zip(staged.new_blocks, staged.views, payloads, strict=False):
        view[:] = payload
        assert bytes(second.storage.copy_block(block, 16)) == payload
    assert second.pool.count_cached_prefix(again.block_keys) == 0  # not before they are committed
    assert staged.is_valid()
    second.commit_staged_blocks(staged, 3)
    second.commit_staged_blocks(staged, 0)
    assert second.pool.count_cached_prefix(again.block_keys) == 3
    assert second.num_free_blocks == second.pool.num_blocks
    further = stage_blocks(second, again.block_keys)
    assert (further.num_cached, len(further.views)) == (3, 1)
    second.commit_staged_blocks(further, 0)
    assert run_sequences(second, [again]) == [output]
    assert again.num_cached_tokens == 48


def test_committed_blocks_cannot_be_written_through_their_views(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    staged = stage_blocks(engine, [b"a", b"b"])
    kept = staged.views[1][:10]
    engine.commit_staged_blocks(staged, 2)
    with pytest.raises(ValueError, match="released"):
        staged.views[0][0] = 1
    assert not staged.is_valid()
    del kept


def _make_keys(count: int) -> list[bytes]:
    return [bytes([n % 256, n // 256]) for n in range(count)]


def test_blocks_committed_for_a_waiting_sequence_are_not_staged_again(
    demo: LoadedModel, done: tuple[list[int], list[bytes]]
) -> None:
    engine, seq, (output, payloads) = Engine(demo, SMALL), sequence(_prompts()[5], NUM_NEW), done
    import_blocks(engine, seq, payloads[:4])
    engine.add_sequence(seq)
    others = _make_keys(engine.pool.num_blocks - 5)
    assert engine.stage_blocks([*others, b"one more"]) is None
    staged = stage_blocks(engine, others)
    engine.step()
    assert seq.num_cached_tokens == 64
    engine.commit_staged_blocks(staged, 0)
    drain(engine, engine.scheduler.check_integrity)
    assert seq.output_token_ids == output


def test_batch_stages_no_blocks_that_its_waiting_sequences_need_and_interactive_does(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    keys = _make_keys(engine.pool.num_blocks)
    engine.add_sequence(sequence([5] * 40, NUM_NEW, priority_class="batch"))
    assert engine.stage_blocks(keys, "batch") is None
    engine.step()
    assert engine.stage_blocks(keys, "batch") is None
    staged = stage_blocks(engine, keys)  # It may preempt, so it gets what is free now.
    assert 0 < len(staged.views) < len(keys)
    engine.commit_staged_blocks(staged, 0)


def test_a_prefix_that_is_being_staged_is_waited_for(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    staged = stage_blocks(engine, [b"a", b"b"])
    assert engine.stage_blocks([b"a", b"c"]) is None
    other = stage_blocks(engine, [b"c", b"a"])  # of another prompt, as a key covers all tokens before its block
    engine.commit_staged_blocks(other, 0)
    engine.commit_staged_blocks(staged, 2)
    assert stage_blocks(engine, [b"a", b"b"]).num_cached == 2


def test_imported_blocks_are_no_hits_and_readmission_counts_nothing(
    demo: LoadedModel, done: tuple[list[int], list[bytes]]
) -> None:
    engine, payloads = Engine(demo, SMALL), done[1]
    for num_blocks, num_hits in ((3, 0), (len(payloads), 4)):
        seq = sequence(_prompts()[5], 2)
        import_blocks(engine, seq, payloads[:num_blocks])
        assert engine.pool.num_hits == 0
        run_sequences(engine, [seq])
        assert (engine.pool.num_hits, engine.pool.num_misses) == (num_hits, 4)


def test_blocks_are_filled_by_another_thread_while_steps_run(model: LoadedModel) -> None:
    first, second = Engine(model, SMALL), Engine(model, SMALL)
    others, done = _seqs()[:4], _seqs()[4:]
    expected = run_sequences(first, [*others, *done], remove=False)
    second.storage.data.fill_(7)
    copies = [_resumed(seq, 0) for seq in done]
    staged = [stage_blocks(second, copy.block_keys) for copy in copies]
    payloads = [export_blocks(first, seq, seq.num_prompt_tokens // 16) for seq in done]
    stepping, filled = threading.Event(), threading.Event()

    def fill() -> None:
        stepping.wait()
        for blocks, written in zip(staged, payloads, strict=True):
            for view, payload in zip(blocks.views, written, strict=True):
                view[:] = payload
        filled.set()

    thread = threading.Thread(target=fill)
    thread.start()
    for seq in (running := [_resumed(seq, 0) for seq in others]):
        second.add_sequence(seq)
    second.step()
    stepping.set()
    while second.has_work() and not filled.is_set():
        second.step()
    thread.join()
    for blocks, copy in zip(staged, copies, strict=True):
        second.commit_staged_blocks(blocks, len(blocks.views))
        second.add_sequence(copy)
    drain(second, second.scheduler.check_integrity)
    assert [seq.output_token_ids for seq in [*running, *copies]] == expected
    assert all(copy.num_cached_tokens == (copy.num_prompt_tokens - 1) // 16 * 16 for copy in copies)


# Blocks to a tier


def test_a_pinned_block_stays_after_its_sequence(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=1, max_batch=2))
    assert engine.pool.num_blocks == 10
    seq = sequence(_prompts()[5], 20)
    engine.add_sequence(seq)
    engine.step()
    pinned = engine.pin_blocks(seq, range(5))
    block = seq.block_table[0]
    assert [engine.pool.count_pins(block) for block in seq.block_table] == [2, 2, 2, 2, 1]  # the last is a copy
    address = engine.storage.data[block].data_ptr()
    assert memoryview(pinned[0].payload).readonly
    assert bytes(pinned[0].payload) == bytes(engine.storage.copy_block(block, 16))
    before = [bytes(each.payload) for each in pinned]
    engine.remove_sequence(seq)
    others = [sequence([n + 300] * 60, 20, name=str(n)) for n in range(3)]
    run_sequences(engine, others)
    assert engine.num_free_blocks == 6
    assert [bytes(each.payload) for each in pinned] == before
    assert all(each.is_valid() for each in pinned)
    assert engine.storage.data[block].data_ptr() == address
    for each in pinned:
        engine.unpin_block(each)
        engine.unpin_block(each)
    assert engine.num_free_blocks == 10
    assert all(each.is_valid() for each in pinned)  # until they are allocated again
    engine.pool.allocate_blocks(10)
    assert [each.is_valid() for each in pinned] == [False] * 4 + [True]


def test_a_pinned_partial_block_has_zeros_after_its_end(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=1, max_batch=1))
    run_sequences(engine, [sequence(list(range(2, 100)), 4)])  # leaves something behind in the blocks
    seq = sequence(list(range(200, 221)), 1)
    run_sequences(engine, [seq], remove=False)
    payload = engine.pin_blocks(seq, [1])[0].payload
    assert payload.nbytes == engine.block_bytes
    row = engine.model.layout.layers[0].k_shape[1] * 4  # the first head's tokens come first
    assert bytes(payload[5 * row : 16 * row]) == bytes(11 * row)
    assert any(payload[: 5 * row])


class Watch:
    """Checks at each call that no full block has changed since it was first seen, unless it was allocated again."""

    def __init__(self, engine: Engine, seqs: list[Sequence]) -> None:
        self._engine, self._seqs = engine, seqs
        self._seen: dict[tuple[int, int], bytes] = {}

    def __call__(self) -> None:
        pool, storage = self._engine.pool, self._engine.storage
        for seq in self._seqs:
            for block in seq.block_table[: seq.num_computed_tokens // 16]:
                self._seen.setdefault((block, pool.page_tags[block]), bytes(storage.copy_block(block, 16)))
        for (block, tag), content in self._seen.items():
            if pool.page_tags[block] == tag:
                assert bytes(storage.copy_block(block, 16)) == content, "a full block was written"

    @property
    def num_seen(self) -> int:
        return len(self._seen)


def test_full_blocks_are_never_written_again(model: LoadedModel) -> None:
    """Neither by chunks, prefix hits, preemption, resumption nor tails."""
    engine, rounds = Engine(model, SMALL), 2
    engine.pool.allocate_blocks(engine.pool.num_blocks - 16)  # held by nobody: the pool is that much smaller
    first = [seq for _ in range(rounds) for seq in _seqs()]
    watch = Watch(engine, first)
    for seq in first:
        engine.add_sequence(seq)
    drain(engine, watch)
    second = [_resumed(seq, 21) for seq in first[:8]]
    third = Watch(engine, second)
    for seq in second:
        if seq.num_prompt_tokens % 16 and seq.num_prompt_tokens < 16:
            seq.tail_payload = bytes(engine.block_bytes)
        engine.add_sequence(seq)
    drain(engine, third)
    assert engine.scheduler.num_preemptions >= rounds
    assert watch.num_seen > 30 * rounds
    assert third.num_seen > 20


def test_blocks_outside_of_host_memory_are_copied(model: LoadedModel) -> None:
    """As on a GPU, whose memory is not at hand here: the pool's own bytes are neither read nor written in place."""
    first, second = Engine(model, SMALL), Engine(model, SMALL)
    second.storage.is_host_memory = False
    seqs = _seqs()
    expected = run_sequences(first, seqs, remove=False)
    for seq in seqs:
        copy, num_full = _resumed(seq, 0), seq.num_prompt_tokens // 16
        payloads = export_blocks(first, seq, num_full)
        assert import_blocks(second, copy, payloads) == num_full
        assert run_sequences(second, [copy], remove=False)[0] == expected[seqs.index(seq)]
        assert export_blocks(second, copy, num_full) == payloads


# Generated blocks


@pytest.mark.parametrize("num_given", [1, 17, 39])
def test_resumed_from_the_blocks_of_prompt_and_answer(model: LoadedModel, num_given: int) -> None:
    first, second = Engine(model, SMALL), Engine(model, SMALL.model_copy(update={"pool_mb": 64}))
    done = _seqs()
    expected = run_sequences(first, done, remove=False)
    resumed = [_resumed(seq, num_given) for seq in done]
    for seq, copy in zip(done, resumed, strict=True):
        num_full = (len(copy.token_ids) - 1) // 16
        payloads = export_blocks(first, seq, num_full)
        if num_full == seq.num_prompt_tokens // 16 and seq.num_prompt_tokens % 16:
            payloads = [*payloads, _prompt_tail(first, seq)]
        assert import_blocks(second, copy, payloads) == num_full
    assert run_sequences(second, resumed) == expected
    assert all(copy.num_cached_tokens == copy.num_prompt_tokens for copy in resumed)


def _prompt_tail(engine: Engine, seq: Sequence) -> bytes:
    """The prompt's partial block as a prefill worker stores it."""
    index, num_rows = divmod(seq.num_prompt_tokens, 16)
    return bytes(engine.storage.copy_block(seq.block_table[index], num_rows))


def _say_20(engine: Engine, **given: Any) -> Sequence:
    """A sequence that has said 20 tokens. The keys of its full blocks are known, and so the blocks found, at once."""
    engine.add_sequence(seq := sequence(_prompts()[3], NUM_NEW, **given))
    while seq.num_output_tokens < 20:
        engine.step()
    engine.add_block_keys(seq, make_block_keys(seq.token_ids)[2:])
    assert engine.pool.count_cached_prefix(make_block_keys(seq.token_ids)) == 3
    return seq


def test_a_follow_up_turn_finds_the_answer(model: LoadedModel) -> None:
    engine = Engine(model, SMALL)
    seq = _say_20(engine)
    while len(seq.token_ids) < 64:
        engine.step()
    engine.add_block_keys(seq, make_block_keys(seq.token_ids)[3:])
    assert (
        engine.pool.count_cached_prefix(make_block_keys(seq.token_ids)) == 3
    )  # the last token is still to be computed
    drain(engine, engine.scheduler.check_integrity)
    turn = [*seq.token_ids, 7, 8, 9]
    follow_up = sequence(turn, NUM_NEW)
    (output,) = run_sequences(engine, [follow_up])
    assert follow_up.num_cached_tokens == 64
    assert [output] == run_sequences(Engine(model, SMALL), [sequence(turn, NUM_NEW)])


def test_a_preempted_sequence_finds_its_answer(model: LoadedModel) -> None:
    engine = Engine(model, SMALL)
    (expected,) = run_sequences(Engine(model, SMALL), [sequence(_prompts()[3], NUM_NEW)])
    seq = _say_20(engine, priority_class="batch")
    held = engine.pool.allocate_blocks(engine.num_free_blocks - 1)
    engine.add_sequence(sequence([5] * 20, 2))
    engine.step()
    assert seq.num_preemptions == 1
    engine.pool.free_blocks(held)
    engine.step()
    assert seq.num_computed_tokens >= 48
    assert seq.num_cached_tokens == 0
    assert (engine.pool.num_hits, engine.pool.num_misses) == (0, 3)  # each counted when it first came in
    drain(engine, engine.scheduler.check_integrity)
    assert seq.output_token_ids == expected
