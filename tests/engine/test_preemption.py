"""In a pool too small for all sequences they are preempted, and their tokens are those of a large pool."""

import random

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.handover import export_blocks, import_blocks
from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence, State
from penstock.messages import Sampling
from penstock.names import CLASSES
from tests.engine.helpers import GREEDY, drain, make_block_keys, run_sequences, sequence

SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=50)
NUM_NEW = 28
NUM_BLOCKS = 9

Blocks = list[bytes]

pytestmark = pytest.mark.usefixtures("unknown_growth")


def _engine(model: LoadedModel, num_blocks: int = NUM_BLOCKS, **values: int) -> Engine:
    engine = Engine(model, EngineSettings(dtype="float32", pool_mb=16, **values))  # type: ignore[arg-type]
    held = engine.pool.num_blocks - num_blocks
    engine.pool.allocate_blocks(held)  # These blocks belong to no sequence, so the pool is smaller.
    return engine


def _sequences() -> list[Sequence]:
    """Return sequences of both classes, greedy and sampled, some resumed; every third begins like the first."""
    rng = random.Random(3)
    common = [rng.randrange(5, 900) for _ in range(36)]
    seqs = []
    for i in range(10):
        prompt = (common if i % 3 == 0 else []) + [rng.randrange(5, 900) for _ in range(rng.randrange(1, 60))]
        seqs.append(
            sequence(
                prompt,
                NUM_NEW,
                name=f"seq-{i}",
                sampling=SAMPLED if i % 2 else GREEDY,
                seed=i,
                output_token_ids=[7, 8, 9] if i % 5 == 4 else [],
                klass=CLASSES[i % 4 // 2],
                tenant="ab"[i % 2],
            )
        )
    return seqs


@pytest.fixture(scope="module")
def done(demo: LoadedModel) -> list[tuple[list[int], Blocks]]:
    """The tokens of each sequence in a large pool of its own, and the KV of its prompt."""
    done: list[tuple[list[int], Blocks]] = []
    for seq in _sequences():
        engine = Engine(demo, EngineSettings(dtype="float32", pool_mb=4))
        (answer,) = run_sequences(engine, [seq], remove=False)
        done.append((answer, export_blocks(engine, seq)))
    assert len({tuple(answer) for answer, _ in done}) == len(done)
    return done


@pytest.fixture
def alone(done: list[tuple[list[int], Blocks]]) -> list[list[int]]:
    return [answer for answer, _ in done]


@pytest.mark.parametrize(("max_batch", "step_tokens"), [(12, 256), (6, 19)])
def test_the_tokens_are_those_of_each_alone(
    demo: LoadedModel, alone: list[list[int]], max_batch: int, step_tokens: int
) -> None:
    engine = _engine(demo, max_batch=max_batch, max_step_tokens=step_tokens)
    seqs = _sequences()
    assert run_sequences(engine, seqs) == alone
    assert engine.scheduler.num_preemptions == sum(seq.num_preemptions for seq in seqs) > 3
    assert {seq.klass for seq in seqs if seq.num_preemptions} == set(CLASSES)
    engine.scheduler.check_integrity()
    assert engine.num_free_blocks == NUM_BLOCKS


def test_they_arrive_and_are_cancelled_meanwhile(demo: LoadedModel, alone: list[list[int]]) -> None:
    engine, rng = _engine(demo, max_batch=8, max_step_tokens=32), random.Random(1)
    seqs = _sequences()
    todo, cancelled = list(seqs), set()
    while todo or engine.has_work():
        if todo and rng.random() < 0.4:
            engine.add_sequence(todo.pop(0))
        for item in engine.step():
            if item.seq.state is State.DONE:
                engine.remove_sequence(item.seq)
        engine.scheduler.check_integrity()
        held = [seq for seq in seqs if seq.block_table or seq.num_preemptions]
        if rng.random() < 0.03 and held:
            seq = rng.choice(held)
            cancelled.add(seq)
            engine.remove_sequence(seq)
            assert seq.block_table == []
    assert cancelled
    assert engine.scheduler.num_preemptions > 0
    assert [seq.output_token_ids for seq in seqs if seq.num_output_tokens == NUM_NEW] == [
        answer for seq, answer in zip(seqs, alone, strict=True) if seq.num_output_tokens == NUM_NEW
    ]
    assert {seq for seq in seqs if seq.num_output_tokens < NUM_NEW} <= cancelled
    assert engine.num_free_blocks == NUM_BLOCKS


def test_imported_blocks_and_tails_are_as_good_as_computed_ones(
    demo: LoadedModel, done: list[tuple[list[int], Blocks]], alone: list[list[int]]
) -> None:
    engine, handed = _engine(demo, max_batch=12), []
    for seq, (answer, blocks) in zip(_sequences(), done, strict=True):
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        copy = sequence(
            prompt, NUM_NEW, output_token_ids=answer[:3], sampling=seq.sampling, seed=seq.seed, klass=seq.klass
        )
        import_blocks(engine, copy, blocks)  # as many as there is capacity for; they evict earlier ones
        engine.add_sequence(copy)
        for item in engine.step():
            if item.seq.state is State.DONE:
                engine.remove_sequence(item.seq)
        handed.append(copy)
    drain(engine)
    assert [seq.output_token_ids for seq in handed] == alone
    assert engine.scheduler.num_preemptions > 0
    assert all(seq.tail_payload is None for seq in handed)
    assert sum(seq.num_cached_tokens == seq.num_prompt_tokens for seq in handed) > 2
    assert engine.num_free_blocks == NUM_BLOCKS


def test_a_preempted_prompt_offers_no_blocks_until_they_are_there_again(demo: LoadedModel) -> None:
    engine = _engine(demo, max_batch=4, max_step_tokens=16)
    batch = sequence([5 + i for i in range(120)], 1, klass="batch")
    engine.add_sequence(batch)
    for _ in range(4):
        engine.step()
    assert engine.count_completed_blocks(batch) == 4
    first = export_blocks(engine, batch, 4)
    engine.add_sequence(sequence([500 + i for i in range(100)], 1))
    engine.step()
    assert batch.num_preemptions == 1
    assert engine.count_completed_blocks(batch) == 0
    while batch.num_output_tokens == 0:
        for item in engine.step():
            if item.seq is not batch:
                engine.remove_sequence(item.seq)
    assert engine.count_completed_blocks(batch) == 7
    assert export_blocks(engine, batch, 4) == first
    assert engine.count_cached_blocks(make_block_keys(batch.token_ids[:120])) == 7
