"""Batch work beside interactive work: what it may add to a step, and that it neither disturbs nor starves."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.model.model import LoadedModel
from penstock.engine.scheduling.batch_budget import MAX_BATCH_SHARE, BatchBudget
from penstock.engine.scheduling.cost import StepCost, TrialStep, measure_cost
from penstock.engine.sequence import Sequence, State
from penstock.names import PriorityClass
from penstock.plan.placing import WorkerSpec
from tests.engine.helpers import run_sequences, sequence
from tests.engine.schedules import ScheduledEngine, seq_of

COST = StepCost(fixed_s=20.0, row_s=1.0, context_s=0.0, chunk_s=0.0, token_s=0.5)
"""Beside four rows there is room for two, or for four tokens of a prompt."""
FORCED_BATCH_PERIOD_STEPS = 32


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a test grows with the square of its steps."""
    monkeypatch.setattr("penstock.engine.scheduling.scheduler.FORCED_BATCH_PERIOD_STEPS", FORCED_BATCH_PERIOD_STEPS)


def _dummy(cost: StepCost | None = COST, num_blocks: int = 2000, max_batch: int = 32) -> ScheduledEngine:
    dummy = ScheduledEngine(num_blocks, max_batch=max_batch, budget=400)
    dummy.scheduler.cost = cost
    return dummy


def _fill(
    dummy: ScheduledEngine, count: int, priority_class: PriorityClass, max_new_tokens: int = 400, length: int = 1
) -> list[Sequence]:
    first = 10_000 * len(dummy.alive)
    seqs = [seq_of(length, max_new_tokens, priority_class=priority_class, first=first + 1000 * i) for i in range(count)]
    dummy.add(*seqs)
    return seqs


def _num_batch(dummy: ScheduledEngine) -> int:
    return sum(num for seq, num in dummy.step() if seq.priority_class == "batch")


@pytest.mark.proof
def test_a_step_with_interactive_rows_is_hardly_longer_and_the_rest_pauses_in_place() -> None:
    dummy = _dummy()
    batch = _fill(dummy, 10, "batch")
    assert _num_batch(dummy) == 10
    interactive = _fill(dummy, 4, "interactive")
    for _ in range(FORCED_BATCH_PERIOD_STEPS - 3):
        plan = dict(dummy.step())
        assert set(interactive) <= plan.keys()
        assert [seq for seq in plan if seq.priority_class == "batch"] == batch[:2]
    assert all(seq.state is State.RUNNING and seq.num_preemptions == 0 for seq in batch)
    for seq in interactive:
        dummy.remove(seq)
    assert _num_batch(dummy) == 10


@pytest.mark.parametrize("cost", [None, StepCost(5.0, 0.0, 0.0, 0.0, 0.0)])
def test_all_take_part_if_rows_cost_nothing_or_their_cost_is_unknown(cost: StepCost | None) -> None:
    dummy = _dummy(cost)
    _fill(dummy, 10, "batch")
    _fill(dummy, 4, "interactive")
    assert len(dummy.step()) == 14


def test_a_batch_prompt_is_cut_to_the_share_and_pays_for_being_the_first_chunk() -> None:
    for chunk_s, expected in ((0.0, 4), (1.0, 2), (2.0, 0), (50.0, 0)):
        dummy = _dummy(StepCost(20.0, 1.0, 0.0, chunk_s, 0.5))
        _fill(dummy, 4, "interactive")
        dummy.step()
        _fill(dummy, 1, "batch", length=200)
        assert _num_batch(dummy) == expected


def test_an_interactive_prompt_comes_first_and_its_time_counts() -> None:
    dummy = _dummy(StepCost(20.0, 1.0, 0.0, 100.0, 0.5))
    (prompt,) = _fill(dummy, 1, "interactive", length=200)
    (batch,) = _fill(dummy, 1, "batch", length=300)
    assert dummy.step() == [(prompt, 200), (batch, 44)]  # a tenth of 20 + 100 + 100


def test_long_sequences_count_for_more() -> None:
    dummy = _dummy(StepCost(20.0, 1.0, 0.01, 0.0, 0.5))
    _fill(dummy, 2, "batch", length=100)
    dummy.step()
    _fill(dummy, 4, "interactive")
    assert [_num_batch(dummy) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("row_s", [0.1, 30.0, 3000.0])
def test_every_so_often_something_of_batch_takes_part_whatever_it_costs(row_s: float) -> None:
    dummy = _dummy(StepCost(20.0, row_s, 0.0, 500.0, row_s))
    _fill(dummy, 5, "batch")
    dummy.step()
    _fill(dummy, 1, "interactive", max_new_tokens=4 * FORCED_BATCH_PERIOD_STEPS)
    counts = [_num_batch(dummy) for _ in range(3 * FORCED_BATCH_PERIOD_STEPS)]
    if row_s == 0.1:
        assert min(counts[1:]) == 5
    else:
        assert sum(counts) == 3
    assert all(seq.num_preemptions == 0 for seq in dummy.alive)


def test_a_batch_prompt_is_never_stuck() -> None:
    dummy = _dummy(StepCost(20.0, 1.0, 0.0, 500.0, 30.0))
    (batch,) = _fill(dummy, 1, "batch", length=3, max_new_tokens=2)
    dummy.scheduler._num_steps = 1
    _fill(dummy, 1, "interactive", max_new_tokens=8 * FORCED_BATCH_PERIOD_STEPS)
    assert dummy.run(until=lambda: batch.state is State.DONE) <= 5 * FORCED_BATCH_PERIOD_STEPS


def test_what_was_promoted_keeps_its_place_and_to_the_share() -> None:
    dummy = _dummy(StepCost(20.0, 30.0, 0.0, 0.0, 30.0), max_batch=4)
    batch = _fill(dummy, 1, "batch", max_new_tokens=6)[0]
    served = [0, 0]
    while batch.state is not State.DONE:
        if dummy.scheduler.num_waiting < 3:
            _fill(dummy, 3, "interactive", max_new_tokens=30)
        for seq, _ in dummy.step():
            served[seq is batch] += 1
        assert dummy.scheduler._num_steps < 12 * FORCED_BATCH_PERIOD_STEPS
    assert batch.num_preemptions <= 1
    assert served[0] > 50 * served[1]


def test_where_no_interactive_one_can_go_on_batch_does() -> None:
    dummy = _dummy(StepCost(20.0, 30.0, 0.0, 0.0, 30.0), num_blocks=6)
    batch = seq_of(3, 6, priority_class="batch")
    dummy.add(batch)
    dummy.step()
    batch.priority = 0  # as if promoted
    dummy.scheduler._promoted = batch
    interactive = seq_of(3, 9, first=500)
    dummy.add(interactive)
    dummy.step()
    held = dummy.pool.allocate_blocks(dummy.pool.num_free_blocks)
    plans = [[seq for seq, _ in dummy.step()] for _ in range(3)]
    assert any(batch in plan for plan in plans)
    dummy.pool.free_blocks(held)
    dummy.run()


def test_what_is_preempted_gives_its_share_back() -> None:
    share = BatchBudget(COST, _running(4, "interactive"))
    first, second, third = _running(3, "batch")
    for seq in (first, second):
        assert share.limit_tokens(seq, 1) == 1
        share.add_sequence(seq, 1)
    assert share.limit_tokens(third, 1) == 0
    share.remove_sequence(first)
    assert share.limit_tokens(third, 1) == 1


def _running(count: int, priority_class: PriorityClass) -> list[Sequence]:
    seqs = [seq_of(1, priority_class=priority_class, first=100 * i) for i in range(count)]
    for seq in seqs:
        seq.move_to(State.RUNNING)
    return seqs


# Cost


def _machine(
    fixed: float, row: float, context: float, chunk: float, token: float, prompt_context: float
) -> Callable[[TrialStep], float]:
    return lambda one: (
        fixed
        + one.num_decodes * (row + context * one.context_tokens)
        + (one.prompt_tokens > 0) * chunk
        + one.prompt_tokens * (token + prompt_context * one.prompt_context_tokens)
    )


def test_the_formula_is_found_again() -> None:
    cost = measure_cost(_machine(5.0, 0.25, 0.001, 2.0, 0.1, 0.0004), 8, 100)
    found = [cost.fixed_s, cost.row_s, cost.context_s, cost.chunk_s, cost.token_s, cost.prompt_context_s]
    assert found == pytest.approx([5.0, 0.25, 0.001, 2.0, 0.1, 0.0004])


@pytest.mark.parametrize("prompt_context_s", [None, 0.0, 0.002])
def test_a_time_has_as_many_prompt_tokens_as_take_it(prompt_context_s: float | None) -> None:
    cost = replace(COST, context_s=0.001, prompt_context_s=prompt_context_s)
    for seconds, num_before in product((0.0, 0.4, 7.0, 300.0), (0, 500)):
        count = cost.count_chunk_tokens(seconds, num_before)
        assert cost.chunk_seconds(count, num_before) <= seconds + 1e-9 < cost.chunk_seconds(count + 1, num_before)
    assert cost.count_chunk_tokens(-1.0, 0) == 0


def test_an_engine_knows_its_steps_and_shares_them(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=16))
    engine.measure_speed()
    cost = engine.scheduler.cost
    assert cost is not None
    assert cost.fixed_s + cost.row_s > 0
    assert engine.num_free_blocks == engine.pool.num_blocks
    engine.pool.check_integrity()
    prompts = [[5 + i, 6, 7] for i in range(4)]
    alone = [run_sequences(engine, [sequence(prompt, 30)])[0] for prompt in prompts]
    classes: list[PriorityClass] = ["batch", "interactive", "batch", "batch"]
    engine.scheduler.cost = StepCost(20.0, 1.0, 0.0, 0.0, 1.0)  # one beside the interactive one
    seqs = [
        sequence(prompt, 30, priority_class=priority_class)
        for prompt, priority_class in zip(prompts, classes, strict=True)
    ]
    assert run_sequences(engine, seqs) == alone


def test_what_a_token_costs_between_steps_is_the_least_seen() -> None:
    cost = StepCost(20.0, 1.0, 0.0, 0.0, 0.5)
    seq = seq_of(1)
    assert cost.row_seconds(seq) == 1.0
    for seconds, tokens in ((8.0, 4), (3.0, 6), (9.0, 3)):
        cost.record_outside(seconds, tokens)
    assert cost.row_seconds(seq) == 1.5


def test_room_for_batch_beside_interactive_is_what_would_not_pause(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=64))
    engine.scheduler.cost = COST
    assert engine.free_capacity("batch") == 32
    engine.add_sequence(sequence([5, 6, 7], 9))
    engine.step()
    assert engine.free_capacity("interactive") == 31
    assert engine.free_capacity("batch") == 1 + int(MAX_BATCH_SHARE * 21)
    engine.add_sequence(sequence([8, 9], 9, priority_class="batch"))
    assert engine.free_capacity("batch") == int(MAX_BATCH_SHARE * 21)


def test_a_prompt_costs_its_chunks_its_tokens_and_what_each_reads() -> None:
    cost = StepCost(20.0, 1.0, context_s=0.01, chunk_s=5.0, token_s=0.5)
    spec = WorkerSpec(cost, num_blocks=10, max_step_tokens=4)
    assert spec.prompt_seconds(10) == pytest.approx(3 * 25.0 + 10 * 0.5 + 45 * 0.01)
    assert spec.prompt_seconds(2, 100) == pytest.approx(25.0 + 2 * 0.5 + 201 * 0.01)
    assert spec.prompt_seconds(0, 100) == 0.0
