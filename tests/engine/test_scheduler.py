"""Order, budget, blocks and preemption. `test_fairness` is about starvation."""

import pytest

from penstock.engine.sequence import Sequence, State
from penstock.names import PriorityClass
from tests.engine.helpers import make_block_keys, sequence
from tests.engine.schedules import SIZE, ScheduledEngine, seq_of


def _names(plan: list[tuple[Sequence, int]]) -> list[Sequence]:
    return [seq for seq, _ in plan]


pytestmark = pytest.mark.usefixtures("unknown_growth")


# Order and budget


def test_decodes_come_first_then_chunks_up_to_the_budget() -> None:
    dummy = ScheduledEngine(budget=10)
    short, long = seq_of(18), seq_of(30, first=100)
    dummy.add(long, short)
    assert dummy.step() == [(long, 10)]
    assert dummy.step() == [(long, 10)]
    dummy.budget = 28
    assert dummy.step() == [(long, 10), (short, 18)]
    late = seq_of(30, first=200)
    dummy.budget = 14
    dummy.add(late)
    assert dummy.step() == [(long, 1), (short, 1), (late, 12)]


def test_a_prompt_leaves_a_token_for_each_that_decodes() -> None:
    dummy = ScheduledEngine(budget=10)
    decoding, long = seq_of(3, 8, klass="batch"), seq_of(30, first=100)
    dummy.add(decoding)
    dummy.step()
    dummy.add(long)
    assert dummy.step() == [(long, 9), (decoding, 1)]
    assert dummy.step() == [(long, 9), (decoding, 1)]


def test_interactive_before_batch_and_first_come_within() -> None:
    dummy = ScheduledEngine(max_batch=3)
    seqs = [seq_of(4, klass="batch"), seq_of(4), seq_of(4, klass="batch"), seq_of(4)]
    dummy.add(*seqs)
    assert _names(dummy.step()) == [seqs[1], seqs[3], seqs[0]]


def test_a_long_batch_prompt_does_not_hold_up_an_interactive_one() -> None:
    dummy = ScheduledEngine(budget=16)
    long, short = seq_of(200, klass="batch"), seq_of(10, first=500)
    dummy.add(long)
    dummy.step()
    dummy.add(short)
    assert dummy.step() == [(short, 10), (long, 6)]


def test_a_budget_smaller_than_the_batch_serves_the_first() -> None:
    dummy = ScheduledEngine(budget=2)
    seqs = [seq_of(1, 8, first=10 * i) for i in range(4)]
    dummy.add(*seqs)
    assert _names(dummy.step()) == seqs[:2]
    assert _names(dummy.step()) == seqs[:2]


# Blocks


def test_the_last_token_needs_no_room() -> None:
    assert seq_of(8, 1).count_blocks_needed(SIZE) == 2
    assert seq_of(8, 2).count_blocks_needed(SIZE) == 3


def test_blocks_are_taken_as_a_sequence_grows() -> None:
    dummy = ScheduledEngine()
    seq = seq_of(6, 20)
    dummy.add(seq)
    held = []
    while dummy.alive:
        dummy.step()
        held.append(len(seq.block_table))
    assert held == [2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 0]


def test_who_comes_in_leaves_a_block_for_each_that_grows() -> None:
    for num_blocks, expected in ((6, State.RUNNING), (5, State.WAITING)):
        dummy = ScheduledEngine(num_blocks)
        old, new = seq_of(8, 8), seq_of(8, 8, first=50)
        dummy.add(old, new)
        dummy.step()
        assert (old.state, new.state) == (State.RUNNING, expected)


# Preemption


def test_the_newest_batch_sequence_goes_first_then_the_newest_interactive_one_never_the_first() -> None:
    # All four come in with a block each, and there are ten; each needs four or more in the end.
    dummy = ScheduledEngine(num_blocks=10)
    seqs = [
        seq_of(4, 13, klass="batch"),
        seq_of(4, 37, first=50),
        seq_of(4, 13, first=100, klass="batch"),
        seq_of(4, 30, first=150),
    ]
    dummy.add(*seqs)
    order: list[Sequence] = []
    while dummy.alive:
        before = {seq: seq.num_preemptions for seq in seqs}
        dummy.step()
        order += [seq for seq in seqs if seq.num_preemptions > before[seq]]
    assert order[:3] == [seqs[2], seqs[0], seqs[3]]
    assert seqs[1].num_preemptions == 0
    assert dummy.scheduler.num_preemptions == len(order)
    assert dummy.pool.num_free_blocks == 10


def test_one_that_was_preempted_is_the_first_in_line_and_keeps_its_tokens() -> None:
    dummy = ScheduledEngine(num_blocks=7)
    first, second, third = seq_of(8, 16), seq_of(8, 8, first=50), seq_of(16, 8, first=90)
    dummy.add(first, second, third)
    dummy.run(until=lambda: second.num_preemptions > 0)
    output = second.output_token_ids
    assert output
    assert second.state is State.WAITING
    assert second.block_table == []
    assert second.num_computed_tokens == 0
    dummy.run(until=lambda: second.state is State.RUNNING)
    assert third.state is State.WAITING
    assert second.output_token_ids[: len(output)] == output
    dummy.run()
    assert [seq.num_output_tokens for seq in (first, second, third)] == [16, 8, 8]


def test_what_the_pool_still_has_is_not_computed_again() -> None:
    dummy = ScheduledEngine(num_blocks=7)
    first, second = seq_of(8, 9), seq_of(12, 8, first=50)
    dummy.add(first, second)
    dummy.run(until=lambda: second.num_preemptions > 0)
    dummy.run(until=lambda: second.state is State.RUNNING)
    assert second.num_computed_tokens > SIZE
    assert second.num_cached_tokens == 0  # it was all computed once


def test_little_is_computed_twice() -> None:
    # A pool for half of the batch. Without a block left for each that grows, a quarter is computed twice.
    dummy = ScheduledEngine(num_blocks=300, budget=64, max_batch=32)
    seqs = [seq_of(8 + 37 * i % 120, 16 + 29 * i % 48, first=200 * i) for i in range(100)]
    dummy.add(*seqs)
    num_computed_tokens = 0
    while dummy.alive:
        num_computed_tokens += sum(num for _, num in dummy.step())
    assert dummy.scheduler.num_preemptions > 10
    assert num_computed_tokens < 1.1 * sum(len(seq.token_ids) - 1 for seq in seqs)


def test_the_last_in_order_pauses_and_keeps_its_blocks() -> None:
    dummy = ScheduledEngine(num_blocks=6)
    first, last = seq_of(10, 2), seq_of(8, 8, first=50)
    dummy.add(first, last)
    dummy.step()
    held = dummy.pool.allocate_blocks(dummy.pool.num_free_blocks)
    assert _names(dummy.step()) == [first]
    assert last.state is State.RUNNING
    dummy.pool.free_blocks(held)
    assert _names(dummy.step()) == [last]
    assert last.num_preemptions == 0


# The same prompt twice


def test_a_second_prompt_waits_for_the_blocks_the_first_one_computes() -> None:
    dummy = ScheduledEngine(budget=10)
    first, second, other = seq_of(18), seq_of(19), seq_of(12, first=90)
    dummy.add(first, second, other)
    assert dummy.step() == [(first, 10)]
    assert dummy.step() == [(first, 8), (other, 2)]
    assert dummy.step() == [(first, 1), (second, 3), (other, 6)]
    assert second.num_cached_tokens == 16


def test_it_waits_no_longer_when_the_first_one_is_gone() -> None:
    dummy = ScheduledEngine(budget=10)
    first, second = seq_of(18), seq_of(19)
    dummy.add(first, second)
    dummy.step()
    dummy.remove(first)
    assert dummy.step() == [(second, 10)]


def test_an_interactive_one_does_not_wait_for_batch_work() -> None:
    dummy = ScheduledEngine(budget=10)
    batch, interactive = seq_of(18, klass="batch"), seq_of(18)
    dummy.add(batch)
    dummy.step()
    dummy.add(interactive)
    assert dummy.step() == [(interactive, 10)]


def test_a_prompt_goes_on_beside_a_decoding_sequence_that_finds_no_block() -> None:
    """The step's one token is kept for the decoding sequence, which cannot use it."""
    dummy = ScheduledEngine(7, budget=1, max_batch=4)
    start = list(range(10))
    work: list[tuple[list[int], int, PriorityClass, bool]] = [
        (start[:7], 4, "interactive", True),
        (start[:3] + 6 * [102], 4, "batch", False),
        (start, 10, "batch", True),
        (start[:8] + 9 * [102], 1, "interactive", True),
    ]
    for prompt, max_new_tokens, klass, is_suspect in work:
        seq = sequence(prompt, max_new_tokens, block_keys=make_block_keys(prompt, SIZE), klass=klass)
        seq.is_suspect = is_suspect
        dummy.add(seq)
    dummy.run(limit=1000)
