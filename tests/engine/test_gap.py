"""How many prompt tokens a step has beside interactive answers: as many as their longest gap allows, by its cost."""

from dataclasses import replace
from itertools import product

import pytest

from penstock.config.settings import PACED_SHARE, EngineSettings, SloSettings
from penstock.engine.engine import Engine
from penstock.engine.memory.pool import BlockPool
from penstock.engine.model.model import LoadedModel
from penstock.engine.scheduling.cost import StepCost
from penstock.engine.scheduling.draft_budget import draft_tokens
from penstock.engine.scheduling.scheduler import WAITING_STEPS, Scheduler
from penstock.engine.sequence import Plan, Sequence
from penstock.names import PriorityClass
from tests.draws import mark_some
from tests.engine.helpers import run_sequences, sequence

COST = StepCost(fixed_s=0.01, row_s=0.001, context_s=1e-8, chunk_s=0.002, token_s=0.0001)
SLO = SloSettings()
USUAL = 256


def make_scheduler(num_rows: int, priority_class: PriorityClass = "interactive", cost: StepCost = COST) -> Scheduler:
    """Return a scheduler with sequences that decode."""
    scheduler = Scheduler(BlockPool(10_000, 16))
    for number in range(num_rows):
        scheduler.add_sequence(sequence([number], 999, priority_class=priority_class))
    if num_rows:
        take_step(scheduler)
    scheduler.cost = cost
    return scheduler


def take_step(scheduler: Scheduler, at_s: float = 0.0) -> tuple[Plan, float]:
    """Run a step; return its plan and its seconds by the cost."""
    plan = scheduler.schedule(scheduler.choose_budget(USUAL, at_s=at_s), 256)
    seconds = 0.0 if scheduler.cost is None else scheduler.cost.step_seconds(plan)
    for seq, num in plan:
        seq.num_computed_tokens += num
        if seq.num_pending_tokens == 0:
            seq.append_token(1)
    return plan, seconds


def add_prompt(scheduler: Scheduler, length: int, since_s: float = 0.0, number: int = 1) -> Sequence:
    seq = sequence(list(range(20_000 * number, 20_000 * number + length)), 4)
    seq.since_s = since_s
    scheduler.add_sequence(seq)
    return seq


@pytest.mark.parametrize(
    ("gap_s", "num_rows", "length"),
    mark_some(list(product((0.02, 0.05, 0.2), (1, 4, 16), (300, 3000))), pytest.mark.proof, 1),
)
def test_a_step_beside_answers_computes_as_much_as_their_gap_allows(gap_s: float, num_rows: int, length: int) -> None:
    scheduler = make_scheduler(num_rows)
    scheduler.slo = SloSettings(interactive_gap_s=gap_s, interactive_ttft_s=1000)
    prompt = add_prompt(scheduler, length)
    may_begin = scheduler.max_gap_s > COST.fixed_s + COST.chunk_s + num_rows * (COST.row_s + 1e-6)
    for _ in range(300 if may_begin else 20):
        plan, seconds = take_step(scheduler)
        assert len(plan) == num_rows + 1, "every answer has its token"
        num_tokens = dict(plan)[prompt]
        is_whole = prompt.num_output_tokens or num_tokens == WAITING_STEPS * USUAL
        assert not may_begin or seconds <= gap_s
        assert not may_begin or is_whole or seconds > gap_s - 2 * COST.chunk_seconds(1, length)
        if prompt.num_output_tokens:
            break
    assert bool(prompt.num_output_tokens) == may_begin


@pytest.mark.parametrize("num_rows", [30, 60])
def test_a_prompt_that_would_be_late_has_as_many_tokens_as_it_needs(num_rows: int) -> None:
    scheduler = make_scheduler(num_rows)
    add_prompt(scheduler, 2000, since_s=100.0)
    due_s = 100.0 + PACED_SHARE * SLO.interactive_ttft_s
    budgets = [scheduler.choose_budget(USUAL, at_s=due_s - left_s) - num_rows for left_s in (1.4, 1.0, 0.5, 0.1)]
    assert budgets[0] < USUAL / 2, "rows leave 8 ms, or nothing"
    assert budgets == sorted(budgets)
    assert budgets[-1] == 500 - num_rows, "a fourth of what waits, as without answers"
    at_s, most = due_s - 1.2, 0.0
    while True:
        plan, seconds = take_step(scheduler, at_s)
        at_s += seconds
        if any(seq.num_output_tokens == 1 for seq, _ in plan):
            break
        most = max(most, seconds)
    assert due_s - 0.3 <= at_s <= due_s + 0.2, "in time, and no sooner than it must"
    assert most <= 1.6 * max(SLO.interactive_gap_s, COST.step_seconds(plan)), "by steps that are all a little longer"


def test_several_prompts_are_computed_as_fast_as_the_last_of_them_needs() -> None:
    scheduler = make_scheduler(40)
    for number in range(1, 9):
        add_prompt(scheduler, 800, since_s=0.0, number=number)
    due_s, at_s, firsts = PACED_SHARE * SLO.interactive_ttft_s, 0.0, list[float]()
    while len(firsts) < 8:
        plan, seconds = take_step(scheduler, at_s)
        at_s += seconds
        firsts += [at_s for seq, _ in plan if seq.num_output_tokens == 1 and seq.num_prompt_tokens == 800]
    assert firsts[-1] <= due_s + 0.2


def test_where_one_answer_alone_takes_longer_than_the_gap_prompts_are_computed_as_without_it() -> None:
    scheduler = make_scheduler(1, cost=replace(COST, fixed_s=0.05))
    add_prompt(scheduler, 1000, since_s=100.0)
    assert scheduler.choose_budget(USUAL, at_s=100.0) == USUAL


@pytest.mark.parametrize(("num_rows", "priority_class"), [(0, "interactive"), (8, "batch")])
def test_where_no_interactive_answer_waits_no_gap_bounds_a_step(num_rows: int, priority_class: PriorityClass) -> None:
    scheduler = make_scheduler(num_rows, priority_class)
    scheduler.slo = SloSettings(interactive_gap_s=1e-3)
    add_prompt(scheduler, 800)
    assert scheduler.choose_budget(USUAL) == USUAL


def test_without_a_measured_cost_all_steps_have_their_usual_size() -> None:
    scheduler = make_scheduler(4)
    scheduler.cost = None
    add_prompt(scheduler, 800)
    assert scheduler.choose_budget(USUAL) == USUAL


def test_batch_work_beside_prompts_is_within_the_gap_too() -> None:
    scheduler = make_scheduler(4)
    for number in range(20):
        scheduler.add_sequence(sequence([900 + number], 999, priority_class="batch"))
    add_prompt(scheduler, 5000)
    has_both = 0
    for _ in range(20):
        plan, seconds = take_step(scheduler)
        has_both += {seq.priority_class for seq, _ in plan} == {"interactive", "batch"}
        assert seconds <= SLO.interactive_gap_s
    assert has_both


def test_steps_that_take_longer_than_their_cost_are_planned_shorter_until_they_do_not() -> None:
    scheduler = make_scheduler(4)
    add_prompt(scheduler, 5000, since_s=1000.0)
    as_measured = scheduler.choose_budget(USUAL)
    for _ in range(300):
        scheduler.gap_pace.record_step(0.04, expected_s=0.02)
    assert scheduler.gap_pace.high_slowdown == pytest.approx(2.0, rel=0.1)
    assert scheduler.choose_budget(USUAL) < as_measured / 2
    scheduler.gap_pace.record_step(50.0, expected_s=0.02)
    assert scheduler.gap_pace.high_slowdown < 3.0, "one long wait is no trend"
    for _ in range(300):
        scheduler.gap_pace.record_step(0.02, expected_s=0.02)
    assert scheduler.choose_budget(USUAL) == pytest.approx(as_measured, rel=0.1)


def test_drafts_beside_a_prompt_take_no_more_than_the_gap_leaves() -> None:
    counts = []
    for gap_s in (0.0122, 0.0145, 1.0):
        scheduler = Scheduler(BlockPool(1000, 16))
        copying = sequence([5, 6, 7] * 9, 30)
        scheduler.add_sequence(copying)
        copying.num_computed_tokens = dict(scheduler.schedule(USUAL, 16))[copying]
        copying.append_token(5)
        scheduler.cost = replace(COST, row_s=1e-5, chunk_s=0.0)
        scheduler.slo = SloSettings(interactive_gap_s=gap_s)
        add_prompt(scheduler, 20)
        plan = scheduler.schedule(USUAL, 16)
        draft_tokens(plan, scheduler, USUAL)
        counts.append(len(copying.draft))
    assert counts[0] < counts[1] <= counts[2]


def test_no_gap_changes_a_token(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=16))

    def answer(gap_s: float) -> tuple[list[list[int]], set[int]]:
        engine.scheduler.cost, engine.scheduler.slo = COST, SloSettings(interactive_gap_s=gap_s)
        seqs = [sequence(list(range(300, 300 + length)), 12, name=str(length)) for length in (3, 90, 200)]
        engine.add_sequence(seqs[0])
        engine.step()
        budgets, schedule = set[int](), engine.scheduler.schedule

        def note_budget(token_budget: int, max_batch: int) -> Plan:
            budgets.add(token_budget)
            return schedule(token_budget, max_batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", note_budget)
            run_sequences(engine, seqs[1:])
        for seq in seqs:
            engine.remove_sequence(seq)
        return [seq.output_token_ids for seq in seqs], budgets

    short, short_budgets = answer(0.015)
    long, long_budgets = answer(0.05)
    assert short == long
    assert min(short_budgets) < 32 < max(long_budgets)


def test_an_engine_records_the_gaps_of_interactive_answers_beside_prompts_alone(demo: LoadedModel) -> None:
    engine = Engine(demo, EngineSettings(pool_mb=16))
    engine.scheduler.cost, expected = COST, list[float]()
    pace = engine.scheduler.gap_pace
    pace.record_step = lambda seconds, expected_s: expected.append(expected_s)  # type: ignore[method-assign]

    def record_beside(priority_class: PriorityClass) -> int:
        row = sequence([3, 4, 5], 40, name=priority_class, priority_class=priority_class)
        engine.add_sequence(row)
        for _ in range(3):
            engine.step()
        engine.add_sequence(prompt := sequence(list(range(300, 340)), 1))
        while prompt.num_output_tokens == 0:
            engine.step()
        for seq in (row, prompt):
            engine.remove_sequence(seq)
        num, expected[:] = len(expected), []
        return num

    assert record_beside("batch") == 0
    assert record_beside("interactive") == 1
