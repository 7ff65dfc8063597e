import random
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from engine.pool import BlockPool
from engine.scheduler import Plan, Scheduler
from engine.sequence import Sequence, State
from tests.engine.helpers import keys_of, sequence

SIZE = 4


def _scheduler(num_blocks: int = 100) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, SIZE))


def _seq(
    length: int, max_new: int = 4, *, klass: Literal["interactive", "batch"] = "interactive", first: int = 0
) -> Sequence:
    prompt = list(range(first, first + length))
    return sequence(prompt, max_new, prefix_keys=keys_of(prompt, SIZE), klass=klass)


def _finish(scheduler: Scheduler, plan: Plan) -> None:
    """What the engine does after the forward pass."""
    for seq, num in plan:
        seq.num_computed += num
        for i in range(min(seq.num_computed // SIZE, len(seq.prefix_keys))):
            scheduler.pool.publish(seq.blocks[i], seq.prefix_keys[i])
        if seq.num_pending == 0:
            seq.append(0)


def test_decodes_come_first_then_chunks_up_to_the_budget() -> None:
    scheduler = _scheduler()
    short, long = _seq(3), _seq(30, first=100)
    for seq in (short, long):
        scheduler.add(seq)
    plan = scheduler.schedule(10, 8)
    assert plan == [(short, 3), (long, 7)]
    _finish(scheduler, plan)
    assert scheduler.schedule(10, 8) == [(short, 1), (long, 9)]


def test_interactive_before_batch_and_first_come_within() -> None:
    scheduler = _scheduler()
    seqs = [_seq(4, klass="batch"), _seq(4), _seq(4, klass="batch"), _seq(4)]
    for seq in seqs:
        scheduler.add(seq)
    assert [seq for seq, _ in scheduler.schedule(100, 3)] == [seqs[1], seqs[3], seqs[0]]


def test_no_more_than_max_batch_run() -> None:
    scheduler = _scheduler()
    seqs = [_seq(4) for _ in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    assert len(scheduler.schedule(100, 2)) == 2
    scheduler.remove(seqs[0])
    assert [seq for seq, _ in scheduler.schedule(100, 2)] == seqs[1:]


def test_the_first_in_line_waits_for_its_blocks_and_those_behind_it_too() -> None:
    scheduler = _scheduler(num_blocks=5)
    running, large, small = _seq(8, 5), _seq(12, 5, first=50), _seq(1, 1)
    for seq in (running, large, small):
        scheduler.add(seq)
    assert scheduler.schedule(100, 8) == [(running, 8)]
    scheduler.remove(running)
    assert scheduler.schedule(100, 8) == [(large, 12), (small, 1)]


def test_the_last_token_needs_no_room() -> None:
    assert _seq(8, 1).blocks_needed(SIZE) == 2
    assert _seq(8, 2).blocks_needed(SIZE) == 3


def test_a_shared_block_is_never_the_one_written() -> None:
    scheduler = _scheduler()
    first, again = _seq(8), _seq(8)
    scheduler.add(first)
    _finish(scheduler, scheduler.schedule(100, 8))
    scheduler.add(again)
    scheduler.schedule(100, 8)
    assert again.blocks[0] == first.blocks[0]
    assert not set(again.blocks[1:]) & set(first.blocks)
    assert again.num_cached == SIZE


@given(st.integers(0, 2**32), st.integers(6, 30), st.integers(1, 12), st.integers(1, 5))
def test_everything_ends_and_nothing_is_lost(seed: int, num_blocks: int, budget: int, batch: int) -> None:
    rng = random.Random(seed)
    scheduler = _scheduler(num_blocks)
    alive: list[Sequence] = []
    for _ in range(80):
        if rng.random() < 0.3:
            klass: Literal["interactive", "batch"] = rng.choice(["interactive", "batch"])
            seq = _seq(rng.randint(1, 16), rng.randint(1, 6), klass=klass, first=rng.choice([0, 0, 50]))
            scheduler.add(seq)
            alive.append(seq)
        plan = scheduler.schedule(budget, batch)
        assert sum(num for _, num in plan) <= budget
        assert scheduler.num_running <= batch
        written = [seq.blocks[(seq.num_computed + i) // SIZE] for seq, num in plan for i in range(num)]
        owners = {block: [s for s in alive if block in s.blocks] for block in written}
        assert all(len(held) == 1 for held in owners.values())
        _finish(scheduler, plan)
        for seq in [seq for seq in alive if seq.state is State.DONE or rng.random() < 0.02]:
            scheduler.remove(seq)
            alive.remove(seq)
        scheduler.pool.check_integrity()
    for _ in range(2000):
        if not alive:
            break
        _finish(scheduler, scheduler.schedule(budget, batch))
        for seq in [seq for seq in alive if seq.state is State.DONE]:
            scheduler.remove(seq)
            alive.remove(seq)
    assert not alive
    assert scheduler.pool.num_free == num_blocks


def test_a_long_batch_prompt_does_not_hold_up_an_interactive_one() -> None:
    scheduler = _scheduler()
    long, short = _seq(200, klass="batch"), _seq(10, first=500)
    scheduler.add(long)
    _finish(scheduler, scheduler.schedule(16, 8))
    scheduler.add(short)
    assert scheduler.schedule(16, 8) == [(short, 10), (long, 6)]
