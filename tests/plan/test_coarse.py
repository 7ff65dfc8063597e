"""The coarse model: times that can be done by hand, the scheduler's shares, and how near the simulation it is."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.settings import SloSettings
from penstock.engine.scheduling.cost import StepCost
from penstock.errors import PlanError
from penstock.names import CLASSES
from penstock.plan import plan
from penstock.plan.coarse import CoarseLoad, CoarseOutcome, CoarseSimulation, Ints, share_tokens
from penstock.plan.placing import WorkerSpec
from penstock.plan.plan import Goals, make_plan, play_trace, render_plan
from penstock.plan.rates import DecodeBatch, WorkerRates
from penstock.plan.simulator import Simulation
from penstock.plan.trace import Arrival, compute_quantile
from sim.placement.rules import RULES
from sim.placement.traces import SHAPES, draw_load, list_requests

COST = StepCost(fixed_s=0.01, row_s=0.001, context_s=0.0, chunk_s=0.0, token_s=0.001)
SPEC = WorkerSpec(COST, num_blocks=64, block_size=16, slo=SloSettings(interactive_gap_s=1.0))
H200 = WorkerSpec(StepCost(0.0267, 0.00094, 2.35e-9, 0.0, 9.6e-5), 3900, 128, max_batch=64, max_step_tokens=1024)
RATES = WorkerRates("a test", 10_000.0, (DecodeBatch(1, 50.0), DecodeBatch(16, 320.0)), 16, 1000, None)


def make_load(*rows: tuple[float, int, int, int, int]) -> CoarseLoad:
    """Return requests of times, tokens of prompts and answers, chats, and tokens of the turns before."""
    at_s, *rest = zip(*rows, strict=True)
    nothing = np.zeros(len(rows), np.int64)
    prompt, output, chat, earlier = (np.array(one) for one in rest)
    return CoarseLoad(np.array(at_s, float), prompt, output, chat, earlier, nothing, nothing)


def play(num_workers: int, load: CoarseLoad, spec: WorkerSpec = SPEC, workers: Ints | None = None) -> CoarseOutcome:
    return CoarseSimulation(num_workers, spec, load, workers=workers).run()


def test_steps_take_what_they_cost() -> None:
    done = play(1, make_load((1.0, 100, 3, 0, 0)))
    assert done.ttft_s == pytest.approx([0.11]), "a step with a hundred prompt tokens"
    assert done.itl_s == pytest.approx([0.011]), "steps of one row"
    late = play(1, make_load((0.0, 100, 5, 0, 0), (0.05, 50, 1, 1, 0)))
    assert late.first_s == pytest.approx([0.11, 0.11 + 0.061]), "both share the next step"
    assert late.end_s == pytest.approx([0.171 + 3 * 0.011, 0.171])


@pytest.mark.parametrize(("ttft_s", "first_s"), [(4.0, 0.11 + 0.05 + 0.022), (0.1, 0.11 + 0.061)])
def test_a_prompt_keeps_to_the_gap_of_an_answer_unless_its_own_first_token_were_late(
    ttft_s: float, first_s: float
) -> None:
    spec = replace(SPEC, slo=SloSettings(interactive_gap_s=0.0505, interactive_ttft_s=ttft_s))
    done = play(1, make_load((0.0, 100, 5, 0, 0), (0.05, 50, 1, 1, 0)), spec)
    assert done.first_s[1] == pytest.approx(first_s), "39 tokens and then 11; or all at once"


def test_a_turn_finds_prompt_and_answer_in_the_pool_of_its_worker_until_others_need_the_place() -> None:
    turns = ((0.0, 64, 33, 0, 0), (10.0, 120, 3, 0, 97))
    done = play(2, make_load(*turns))
    assert done.worker[0] == done.worker[1], "it is its home"
    assert done.pool_tokens.tolist() == [0, 96], "of 97 tokens those in full blocks"
    assert done.ttft_s[1] == pytest.approx(0.034), "24 tokens are left"
    for num_others, found in ((896, 96), (959, 64), (1000, 16)):
        other = (5.0, num_others, 1, 1, 0)
        done = play(1, make_load(turns[0], other, turns[1]))
        assert done.pool_tokens.tolist() == [0, 0, found], "of 1,024 tokens; the end of what is older goes first"
    elsewhere = play(2, make_load(*turns), workers=np.array([0, 1]))
    assert elsewhere.pool_tokens.tolist() == [0, 0]


def test_jobs_go_where_the_fewest_are_of_those_with_room() -> None:
    jobs = make_load(*((0.0, prompt, 20, chat, 0) for chat, prompt in enumerate((900, 60, 60, 60, 200, 60))))
    placers = np.zeros(6, np.int64)
    done = CoarseSimulation(2, SPEC, jobs, placers=placers, are_jobs=True).run()
    large, worker = done.worker[0], done.worker.tolist()
    assert sorted(worker[:2]) == sorted(worker[2:4]) == [0, 1], "by turns, as one more is on its way"
    assert worker[4] != large, "1,024 tokens have no room for both"
    assert worker[5] == large, "it has one less"
    blind = CoarseSimulation(2, SPEC, jobs, placers=np.arange(6), are_jobs=True, seed=2).run()
    assert max(np.bincount(blind.worker)) > 3, "each of these placers knows of none of the others"


def test_a_long_prompt_shares_its_step_with_those_at_most_half_as_long() -> None:
    pending = np.array([[1000, 100, 600, 50], [100, 0, 0, 0], [50, 1000, 300, 0]])
    shares = share_tokens(pending, np.array([256, 256, 256])).tolist()
    assert shares == [[128, 100, 0, 28], [100, 0, 0, 0], [50, 103, 103, 0]]


def test_a_pool_or_a_batch_that_is_full_makes_requests_wait() -> None:
    both = make_load((0.0, 400, 113, 0, 0), (0.0, 400, 114, 1, 0))
    done = play(1, both)
    assert done.first_s[1] > done.end_s[0], "together they need 65 blocks of 64"
    assert play(1, both, replace(SPEC, num_blocks=65)).first_s[1] < done.end_s[0]
    assert play(1, both, replace(SPEC, num_blocks=65, max_batch=1)).first_s[1] > done.end_s[0]


@pytest.mark.parametrize(
    ("rows", "num_workers", "message"),
    [
        ([(0.0, 1, 1, 0, 0)], 0, "at least one worker"),
        ([(0.0, 0, 1, 0, 0)], 1, "at least one prompt token"),
        ([(0.0, 1, 0, 0, 0)], 1, "at least one prompt token"),
        ([(1.0, 1, 1, 0, 0), (0.0, 1, 1, 0, 0)], 1, "in the order of their times"),
        ([(float("nan"), 1, 1, 0, 0)], 1, "in the order of their times"),
        ([(0.0, 1, 1, -1, 0)], 1, "must be numbered from 0"),
        ([(0.0, 1000, 26, 0, 0)], 1, "needs 65 KV blocks, and the pool has 64"),
    ],
)
def test_what_cannot_be_played_is_an_error(
    rows: list[tuple[float, int, int, int, int]], num_workers: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        CoarseSimulation(num_workers, SPEC, make_load(*rows))


def test_no_request_is_an_error() -> None:
    nothing = np.zeros(0, np.int64)
    with pytest.raises(PlanError, match="no request"):
        CoarseSimulation(1, SPEC, CoarseLoad.without_chats(nothing.astype(float), nothing, nothing))


REQUEST = st.tuples(st.floats(0, 5), st.integers(1, 900), st.integers(1, 40), st.integers(0, 3), st.integers(0, 900))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(REQUEST, min_size=1, max_size=40).map(sorted), num_workers=st.integers(1, 9), jobs=st.booleans())
def test_every_request_is_answered_once_and_nothing_stays(
    rows: list[tuple[float, int, int, int, int]], num_workers: int, jobs: bool
) -> None:
    workers = np.arange(len(rows)) % num_workers if jobs else None
    played = CoarseSimulation(num_workers, SPEC, make_load(*rows), workers=workers, are_jobs=jobs)
    ended, end_answers = list[int](), played._end_answers

    def note_ends(found: Ints) -> None:
        number, column = np.nonzero(played._row_end[found] <= played._steps[found, None])
        ended.extend(played._row[found[number], column].tolist())
        end_answers(found)

    with mock.patch.object(played, "_end_answers", note_ends):
        done = played.run()
    assert sorted(ended) == list(range(len(rows)))
    assert (done.load.at_s < done.first_s).all()
    assert (done.first_s <= done.end_s).all()
    assert (done.end_s > done.first_s)[done.load.output_tokens > 1].all()
    assert jobs or (done.pool_tokens < done.load.prompt_tokens).all()
    for left in (played._num_rows, played._num_prompts, played._context, played._reserved, played._queued):
        assert not left.any()


def test_more_workers_answer_sooner() -> None:
    load = draw_load(SHAPES["skewed"], 30.0, 20.0)
    waits = [np.quantile(play(num, load, H200).ttft_s, [0.5, 0.99]) for num in (8, 16, 32, 64)]
    for few, many in pairwise(waits):
        assert (many < few * 1.05).all()


def test_it_is_near_the_simulation() -> None:
    """The same chats on the same workers, but for the hash that gives each its home."""
    load = draw_load(SHAPES["one_system_prompt"], 5.0, 180.0)
    done = play(4, load, H200)
    real = Simulation({"auto": (4, H200)}, [RULES["ours"](), RULES["ours"]()]).run(list_requests(load, 128))
    near = {0.5: 0.1, 0.99: 0.2}
    for share, error in near.items():
        assert compute_quantile(done.ttft_s.tolist(), share) == pytest.approx(
            compute_quantile([one.ttft_s for one in real], share), rel=error
        )
        assert compute_quantile(done.itl_s.tolist(), share) == pytest.approx(
            compute_quantile([one.itl_s for one in real], share), rel=error
        )
    assert done.pool_tokens.sum() == pytest.approx(sum(one.pool_tokens for one in real), rel=0.05)


def test_a_plan_of_a_long_trace_is_made_by_it_and_says_so() -> None:
    rng = np.random.default_rng(0)
    rows = zip(rng.uniform(0, 30, 150), rng.integers(1, 3000, 150), rng.integers(1, 200, 150), strict=True)
    trace = sorted(Arrival(at_s, int(prompt), int(output)) for at_s, prompt, output in rows)
    goals = Goals(ttft_s=1.0)
    real = make_plan(trace, RATES, goals)
    waits = play_trace(trace, RATES, RATES.batches[1], 2, 6)
    with mock.patch.object(plan, "MAX_SIMULATED_TOKENS", 1000):
        made = make_plan(trace, RATES, goals)
        coarse = play_trace(trace, RATES, RATES.batches[1], 2, 6)
    off_s = np.abs(np.array([one.ttft_s for one in coarse]) - [one.ttft_s for one in waits]).mean()
    assert off_s < 0.03 * np.mean([one.ttft_s for one in waits]), "requests go where they go in the simulation"
    # Jobs go by chance among equal workers: with other ids, the simulation's own mean is off by as much.
    assert np.mean([one.itl_s for one in coarse]) == pytest.approx(np.mean([one.itl_s for one in waits]), rel=0.03)
    assert (made.prefill, made.decode) == (real.prefill, real.decode)
    assert made.auto == pytest.approx(real.auto, abs=1)
    assert made.auto_waits.ttft_p50_s == pytest.approx(real.auto_waits.ttft_p50_s, rel=0.2)
    assert made.goodput == pytest.approx(real.goodput, rel=0.1)
    said = [line for _, line in render_plan(made, trace)]
    assert any("coarse model" in line and "error" in line for line in said)
    assert "priority classes" in said[-1]
    assert (made.as_json()["is_coarse"], real.as_json()["is_coarse"]) == (True, False)
    assert not any("coarse" in line for _, line in render_plan(real, trace))
    assert {one.priority_class for one in play_trace(trace, RATES, RATES.batches[1], 2, 0)} <= set(CLASSES)


def test_a_request_that_fills_the_pool_is_answered() -> None:
    done = play(1, make_load((0.0, 100, 64 * 16 - 99, 0, 0)))
    assert done.end_s == pytest.approx([0.11 + (64 * 16 - 100) * 0.011])
    with pytest.raises(PlanError, match="needs 65 KV blocks"):  # a job's first token is read, too
        CoarseSimulation(1, SPEC, make_load((0.0, 100, 64 * 16 - 99, 0, 0)), are_jobs=True)
    CoarseSimulation(1, SPEC, make_load((0.0, 100, 64 * 16 - 100, 0, 0)), are_jobs=True).run()
