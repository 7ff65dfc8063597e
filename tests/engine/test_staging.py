"""KV on its way in and out while steps run, and blocks of generated tokens."""

import random
import threading
from collections.abc import Callable

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.handover import export_blocks, import_blocks
from penstock.engine.kernels import library
from penstock.engine.model import LoadedModel, load_model
from penstock.engine.sequence import Sequence, State
from penstock.messages import Sampling
from tests.engine.helpers import keys_of, land, run, sequence
from tests.engine.no_gpu import model_on, recording, varlen_attn

SAMPLED = Sampling(temperature=0.9, top_p=0.95)
NUM_NEW = 40
SMALL = EngineSettings(max_batch=6, max_step_tokens=40, pool_mb=16)

has_kernels = pytest.mark.skipif(library.load_library() is None, reason="the kernels were not built")
PATHS = ["torch", pytest.param("float32", marks=has_kernels), pytest.param("bfloat16", marks=has_kernels)]


@pytest.fixture(scope="module", params=PATHS)
def model(request: pytest.FixtureRequest, demo: LoadedModel) -> LoadedModel:
    """The demo model on torch, and on the kernels."""
    if request.param == "torch":
        return demo
    model = load_model(EngineSettings(dtype=request.param))
    accelerate_model(model)
    return model


def _prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(5, 1000) for _ in range(length)] for length in (1, 9, 16, 33, 48, 70, 25, 90)]


def _seqs() -> list[Sequence]:
    return [
        sequence(prompt, NUM_NEW, name=str(n), seed=n, **({"sampling": SAMPLED} if n % 2 else {}))
        for n, prompt in enumerate(_prompts())
    ]


def _resumed(seq: Sequence, num_given: int) -> Sequence:
    """The same request as another worker goes on with it; all full blocks are named."""
    prompt, given = seq.token_ids[: seq.num_prompt_tokens], seq.output_token_ids[:num_given]
    return sequence(prompt, NUM_NEW, name=seq.id, seed=seq.seed, sampling=seq.sampling, output_token_ids=given,
                    block_keys=keys_of(prompt + given))  # fmt: skip


def _drive(engine: Engine, after_step: Callable[[], None]) -> None:
    while engine.has_work():
        for item in engine.step():
            if item.seq.state is State.DONE:
                engine.remove_sequence(item.seq)
        after_step()


# In


def test_views_are_the_pools_own_memory_and_sequences_find_what_landed(demo: LoadedModel) -> None:
    first, second = Engine(demo, SMALL), Engine(demo, SMALL)
    (done,) = seqs = [sequence(_prompts()[5], NUM_NEW)]
    (output,) = run(first, seqs, remove=False)
    payloads = export_blocks(first, done)
    again = sequence(_prompts()[5], NUM_NEW)
    landing = land(second, again.block_keys)
    assert (landing.num_cached, len(landing.views)) == (0, 4)
    assert second.num_free_blocks == second.pool.num_blocks - 4
    for block, view, payload in zip(landing.new_blocks, landing.views, payloads, strict=False):
        view[:] = payload
        assert bytes(second.storage.copy_block(block, 16)) == payload
    assert second.count_cached_blocks(again.block_keys) == 0  # not before it is closed
    assert landing.is_valid()
    second.commit_staged_blocks(landing, 3)
    second.commit_staged_blocks(landing, 0)
    assert second.count_cached_blocks(again.block_keys) == 3
    assert second.num_free_blocks == second.pool.num_blocks
    further = land(second, again.block_keys)
    assert (further.num_cached, len(further.views)) == (3, 1)
    second.commit_staged_blocks(further, 0)
    assert run(second, [again]) == [output]
    assert again.num_cached_tokens == 48


def test_a_closed_landing_cannot_be_written(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    landing = land(engine, [b"a", b"b"])
    kept = landing.views[1][:10]
    engine.commit_staged_blocks(landing, 2)
    with pytest.raises(ValueError, match="released"):
        landing.views[0][0] = 1
    assert not landing.is_valid()
    del kept


def test_a_block_that_was_computed_meanwhile_stays_and_the_landed_one_goes(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    seq = sequence(_prompts()[3], 2)
    landing = land(engine, seq.block_keys)
    (output,) = run(engine, [seq], remove=False)
    for view in landing.views:
        view[:] = b"\7" * engine.block_bytes
    engine.commit_staged_blocks(landing, 2)
    engine.scheduler.check_integrity()
    engine.remove_sequence(seq)
    assert engine.num_free_blocks == engine.pool.num_blocks
    again = sequence(_prompts()[3], 2)
    assert run(engine, [again]) == [output]
    assert again.num_cached_tokens == 32


def test_a_landing_leaves_a_block_to_each_that_grows(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    seqs = [sequence([n + 5] * 10, NUM_NEW, name=str(n)) for n in range(3)]
    for seq in seqs:
        engine.add_sequence(seq)
    engine.step()
    num_free = engine.num_free_blocks
    keys = [bytes([n % 256, n // 256]) for n in range(num_free)]
    assert engine.stage_blocks(keys) is None  # one block too many: it waits for those that are at work
    landing = land(engine, keys[3:])
    assert len(landing.views) == num_free - 3
    for _ in range(8):
        engine.step()
    assert engine.scheduler.num_preemptions == 0
    engine.scheduler.check_integrity()
    engine.commit_staged_blocks(landing, 0)
    _drive(engine, engine.scheduler.check_integrity)
    assert [seq.num_output_tokens for seq in seqs] == [NUM_NEW] * 3
    assert engine.num_free_blocks == engine.pool.num_blocks


def test_what_landed_for_one_that_waits_is_not_taken_by_the_next_landing(demo: LoadedModel) -> None:
    first, engine = Engine(demo, SMALL), Engine(demo, SMALL)
    prompt = _prompts()[5]
    done = sequence(prompt, NUM_NEW)
    (output,) = run(first, [done], remove=False)
    seq = sequence(prompt, NUM_NEW)
    import_blocks(engine, seq, export_blocks(first, done)[:4])
    engine.add_sequence(seq)
    others = [bytes([n % 256, n // 256]) for n in range(engine.pool.num_blocks - -(-len(prompt) // 16))]
    assert engine.stage_blocks([*others, b"one more"]) is None
    landing = land(engine, others)
    engine.step()
    assert seq.num_cached_tokens == 64
    engine.commit_staged_blocks(landing, 0)
    _drive(engine, engine.scheduler.check_integrity)
    assert seq.output_token_ids == output


def test_batch_leaves_the_waiting_of_its_class_their_room_and_interactive_does_not_wait_for_it(
    demo: LoadedModel,
) -> None:
    engine = Engine(demo, SMALL)
    keys = [bytes([n % 256, n // 256]) for n in range(engine.pool.num_blocks)]
    engine.add_sequence(sequence([5] * 40, NUM_NEW, klass="batch"))
    assert engine.stage_blocks(keys, "batch") is None
    engine.step()
    assert engine.stage_blocks(keys, "batch") is None
    landing = land(engine, keys)  # it comes in by preemption: what there is room for has to do
    assert 0 < len(landing.views) < len(keys)
    engine.commit_staged_blocks(landing, 0)


def test_what_is_landing_already_is_waited_for(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    landing = land(engine, [b"a", b"b"])
    assert engine.stage_blocks([b"a", b"c"]) is None
    other = land(engine, [b"c", b"a"])  # of another prompt: keys are names of all that is before, too
    engine.commit_staged_blocks(other, 0)
    engine.commit_staged_blocks(landing, 2)
    assert land(engine, [b"a", b"b"]).num_cached == 2


def test_what_is_fetched_for_a_sequence_is_no_hit_and_a_second_look_counts_nothing(demo: LoadedModel) -> None:
    first, engine = Engine(demo, SMALL), Engine(demo, SMALL)
    prompt = _prompts()[5]
    done = sequence(prompt, 2)
    run(first, [done], remove=False)
    payloads = export_blocks(first, done)
    seq = sequence(prompt, 2)
    import_blocks(engine, seq, payloads[:3])
    assert (engine.pool.num_hits, engine.pool.num_misses) == (0, 0)
    run(engine, [seq])
    assert (engine.pool.num_hits, engine.pool.num_misses) == (0, 4)
    again = sequence(prompt, 2)
    import_blocks(engine, again, payloads)
    run(engine, [again])
    assert (engine.pool.num_hits, engine.pool.num_misses) == (4, 4)


def test_blocks_are_filled_by_another_thread_while_steps_run(model: LoadedModel) -> None:
    first, second = Engine(model, SMALL), Engine(model, SMALL)
    others, done = _seqs()[:4], _seqs()[4:]
    expected = run(first, [*others, *done], remove=False)
    second.storage.data.fill_(7)
    copies = [_resumed(seq, 0) for seq in done]
    landings = [land(second, copy.block_keys) for copy in copies]
    payloads = [export_blocks(first, seq, seq.num_prompt_tokens // 16) for seq in done]
    stepping, filled = threading.Event(), threading.Event()

    def fill() -> None:
        stepping.wait()
        for landing, blocks in zip(landings, payloads, strict=True):
            for view, payload in zip(landing.views, blocks, strict=True):
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
    for landing, copy in zip(landings, copies, strict=True):
        second.commit_staged_blocks(landing, len(landing.views))
        second.add_sequence(copy)
    _drive(second, second.scheduler.check_integrity)
    assert [seq.output_token_ids for seq in [*running, *copies]] == expected
    assert all(copy.num_cached_tokens == (copy.num_prompt_tokens - 1) // 16 * 16 for copy in copies)


# Out


def test_a_lent_block_stays_whatever_becomes_of_its_sequence(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=1, max_batch=2))
    assert engine.pool.num_blocks == 10
    seq = sequence(_prompts()[5], 20)
    engine.add_sequence(seq)
    engine.step()
    lent = [engine.pin_block(seq, index) for index in range(5)]
    block = seq.block_table[0]
    assert [engine.pool.count_pins(block) for block in seq.block_table] == [2, 2, 2, 2, 1]  # the last is a copy
    address = engine.storage.data[block].data_ptr()
    assert memoryview(lent[0].payload).readonly
    assert bytes(lent[0].payload) == bytes(engine.storage.copy_block(block, 16))
    before = [bytes(each.payload) for each in lent]
    engine.remove_sequence(seq)
    others = [sequence([n + 300] * 60, 20, name=str(n)) for n in range(3)]
    run(engine, others)
    assert engine.num_free_blocks == 6
    assert [bytes(each.payload) for each in lent] == before
    assert all(each.is_valid() for each in lent)
    assert engine.storage.data[block].data_ptr() == address
    for each in lent:
        engine.unpin_block(each)
        engine.unpin_block(each)
    assert engine.num_free_blocks == 10
    assert all(each.is_valid() for each in lent)  # until somebody else gets it
    engine.pool.allocate_blocks(10)
    assert [each.is_valid() for each in lent] == [False] * 4 + [True]


def test_a_lent_payload_is_no_copy(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    seq = sequence(_prompts()[3], 2)
    run(engine, [seq], remove=False)
    lent = engine.pin_block(seq, 0)
    with pytest.raises(TypeError):
        lent.payload[0] = 1
    engine.storage.data[seq.block_table[0]].fill_(0)
    assert not any(lent.payload)
    assert lent.payload.nbytes == engine.block_bytes


def test_a_partial_block_is_lent_with_zeros_behind_its_end(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=1, max_batch=1))
    run(engine, [sequence(list(range(2, 100)), 4)])  # leaves something behind in the blocks
    seq = sequence(list(range(200, 221)), 1)
    run(engine, [seq], remove=False)
    payload = engine.pin_block(seq, 1).payload
    assert payload.nbytes == engine.block_bytes
    row = engine.model.layout.layers[0].k_shape[1] * 4  # the first head's tokens come first
    assert bytes(payload[5 * row : 16 * row]) == bytes(11 * row)
    assert any(payload[: 5 * row])


class Watch:
    """Sees to it that what is in a full block never changes as long as the block is not allocated anew."""

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


def _watched(engine: Engine, rounds: int = 2) -> None:
    """Chunks, prefix hits, preemption, resumption, tails: nothing of it writes a full block."""
    engine.pool.allocate_blocks(engine.pool.num_blocks - 16)  # held by nobody: the pool is that much smaller
    first = [seq for _ in range(rounds) for seq in _seqs()]
    watch = Watch(engine, first)
    for seq in first:
        engine.add_sequence(seq)
    _drive(engine, watch)
    second = [_resumed(seq, 21) for seq in first[:8]]
    third = Watch(engine, second)
    for seq in second:
        if seq.num_prompt_tokens % 16 and seq.num_prompt_tokens < 16:
            seq.tail_payload = bytes(engine.block_bytes)
        engine.add_sequence(seq)
    _drive(engine, third)
    assert engine.scheduler.num_preemptions >= 2 * rounds
    assert watch.num_seen > 30 * rounds
    assert third.num_seen > 20


def test_full_blocks_are_never_written_again(model: LoadedModel) -> None:
    _watched(Engine(model, SMALL))


def test_recorded_steps_write_no_full_block_again(demo: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = recording(model_on(monkeypatch, demo, varlen_attn), SMALL)
    _watched(engine, rounds=1)
    assert recorder.num_replayed > 20


# Generated blocks


@pytest.mark.parametrize("num_given", [1, 17, 39])
def test_resumed_from_the_blocks_of_prompt_and_answer(model: LoadedModel, num_given: int) -> None:
    first, second = Engine(model, SMALL), Engine(model, SMALL.model_copy(update={"pool_mb": 64}))
    done = _seqs()
    expected = run(first, done, remove=False)
    resumed = [_resumed(seq, num_given) for seq in done]
    for seq, copy in zip(done, resumed, strict=True):
        num_full = (len(copy.token_ids) - 1) // 16
        payloads = export_blocks(first, seq, num_full)
        if num_full == seq.num_prompt_tokens // 16 and seq.num_prompt_tokens % 16:
            payloads = [*payloads, _prompt_tail(first, seq)]
        assert import_blocks(second, copy, payloads) == num_full
    assert run(second, resumed) == expected
    assert all(copy.num_cached_tokens == copy.num_prompt_tokens for copy in resumed)


def _prompt_tail(engine: Engine, seq: Sequence) -> bytes:
    """The prompt's partial block as a prefill worker stores it."""
    index, num_rows = divmod(seq.num_prompt_tokens, 16)
    return bytes(engine.storage.copy_block(seq.block_table[index], num_rows))


def test_a_follow_up_turn_finds_the_answer(model: LoadedModel) -> None:
    engine = Engine(model, SMALL)
    seq = sequence(_prompts()[3], NUM_NEW)
    engine.add_sequence(seq)
    while seq.num_output_tokens < 20:
        engine.step()
    engine.add_block_keys(seq, keys_of(seq.token_ids)[2:])  # at once
    assert engine.count_cached_blocks(keys_of(seq.token_ids)) == 3
    while len(seq.token_ids) < 64:
        engine.step()
    engine.add_block_keys(seq, keys_of(seq.token_ids)[3:])
    assert engine.count_cached_blocks(keys_of(seq.token_ids)) == 3  # the last token is still to be computed
    _drive(engine, engine.scheduler.check_integrity)
    turn = [*seq.token_ids, 7, 8, 9]
    follow_up = sequence(turn, NUM_NEW)
    (output,) = run(engine, [follow_up])
    assert follow_up.num_cached_tokens == 64
    assert [output] == run(Engine(model, SMALL), [sequence(turn, NUM_NEW)])


def test_a_preempted_sequence_finds_its_answer(model: LoadedModel) -> None:
    engine = Engine(model, SMALL)
    (expected,) = run(Engine(model, SMALL), [sequence(_prompts()[3], NUM_NEW)])
    seq = sequence(_prompts()[3], NUM_NEW, klass="batch")
    engine.add_sequence(seq)
    while seq.num_output_tokens < 20:
        engine.step()
    engine.add_block_keys(seq, keys_of(seq.token_ids)[2:])
    held = engine.pool.allocate_blocks(engine.num_free_blocks - 1)
    other = sequence([5] * 20, 2)
    engine.add_sequence(other)
    engine.step()
    assert seq.num_preemptions == 1
    engine.pool.free_blocks(held)
    engine.step()
    assert seq.num_computed_tokens >= 48
    assert seq.num_cached_tokens == 0
    assert (engine.pool.num_hits, engine.pool.num_misses) == (0, 3)  # each counted when it first came in
    _drive(engine, engine.scheduler.check_integrity)
    assert seq.output_token_ids == expected


def test_keys_of_tokens_that_are_not_known_are_refused(demo: LoadedModel) -> None:
    engine = Engine(demo, SMALL)
    seq = sequence(_prompts()[3], NUM_NEW)
    with pytest.raises(AssertionError, match="too many keys"):
        engine.add_block_keys(seq, [b"x"])
