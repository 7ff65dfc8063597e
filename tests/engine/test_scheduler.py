"""Order, budget, blocks and preemption. `test_fairness` is about starvation."""

import pytest

from penstock.engine.sequence import Sequence, State
from penstock.names import PriorityClass
from tests.engine.helpers import make_block_keys, sequence
from tests.engine.schedules import SIZE, ScheduledEngine, play, seq_of

pytestmark = pytest.mark.usefixtures("unknown_growth")

SCENES: dict[str, tuple[dict[str, int], str]] = {
    # Order and budget
    "decodes come first, then chunks up to the budget": (
        {"budget": 10},
        "+long30@100 +short18; long10; long10; budget 28; long10 short18; budget 14; +late30@200; long1 short1 late12",
    ),
    "a prompt leaves a token for each that decodes": (
        {"budget": 10}, "+decoding3/8b; ...; +long30@100; long9 decoding1; long9 decoding1"
    ),
    "interactive before batch, and first come within": ({"max_batch": 3}, "+a4b +b4 +c4b +d4; b4 d4 a4"),
    "a long batch prompt does not hold up an interactive one": (
        {"budget": 16}, "+long200b; ...; +short10@500; short10 long6"
    ),
    "a budget smaller than the batch serves the first": (
        {"budget": 2}, "+a1/8 +b1/8@10 +c1/8@20 +d1/8@30; a1 b1; a1 b1"
    ),
    # Prompts of unequal length
    "a prompt that is not much shorter waits": (
        {"budget": 20}, "+long61 +shorter31@200 +short30@300; short10 long10; ?shorter"
    ),
    "the shortest of running prompts goes first": (
        {"budget": 20}, "+long200 +middle60@300; middle10 long10; +short12@500; middle10 long10"
    ),
    "shorter prompts pass a long one of their tenant only": (
        {"budget": 20, "num_blocks": 400},
        "+running200#a; ...; +waiting180@1000#b +own6@2000#b +other6@3000#c; own6 running14; ?waiting ?other",
    ),
    # Blocks
    "who comes in leaves a block for each that grows": ({"num_blocks": 5}, "+old8/8 +new8/8@50; old8; ?new"),
    "and comes in where there is one": ({"num_blocks": 6}, "+old8/8 +new8/8@50; old8 new8"),
    # Preemption
    "the last in order pauses and keeps its blocks": (
        {"num_blocks": 6}, "+first10/2 +last8/8@50; ...; hold; first1; free; last1"
    ),
    # The same prompt twice
    "a second prompt waits for the blocks that the first one computes": (
        {"budget": 10}, "+first18 +second19 +other12@90; first10; first8 other2; first1 second3 other6"
    ),
    "it waits no longer when the first one is gone": ({"budget": 10}, "+first18 +second19; ...; -first; second10"),
    "an interactive one does not wait for batch work": (
        {"budget": 10}, "+batch18b; ...; +interactive18; interactive10"
    ),
    # Small ones pass a large one
    "a guest makes way and gives back its share of the step": (
        {"num_blocks": 12, "budget": 10},
        "+first8/16 +large40@500 +guest2/6@1000; first8 guest2; -first; large10; ?guest",
    ),
    "guests take no more places than there are": (
        {"num_blocks": 12, "max_batch": 2},
        "+first8/16 +large40@500 +a2/6@1000 +b2/6@1100; first8 a2; first1 a1; first1 a1",
    ),
    # Suspects
    "a suspect is alone until its first token, and the others take turns with it": (
        {"budget": 10},
        "+a3/9@100 +b3/9@200 +dark25@500!; a3 b3; dark10; a1 b1; dark10; a1 b1; dark5; a1 b1 dark1; a1 b1 dark1",
    ),
    "several suspects come one after the other": (
        {}, "+a4! +b4@10! +c4@20!; a4; b4; a1 b1; c4; a1 b1 c1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_what_each_step_computes(scene: str) -> None:
    given, script = SCENES[scene]
    play(script, **given)


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


# Preemption


def test_the_newest_batch_sequence_goes_first_then_the_newest_interactive_one_never_the_first() -> None:
    # All four come in with a block each, and there are ten; each needs four or more in the end.
    dummy = ScheduledEngine(num_blocks=10)
    seqs = [
        seq_of(4, 13, priority_class="batch"),
        seq_of(4, 37, first=50),
        seq_of(4, 13, first=100, priority_class="batch"),
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
    for prompt, max_new_tokens, priority_class, is_suspect in work:
        seq = sequence(prompt, max_new_tokens, block_keys=make_block_keys(prompt, SIZE), priority_class=priority_class)
        seq.is_suspect = is_suspect
        dummy.add(seq)
    dummy.run(limit=1000)
