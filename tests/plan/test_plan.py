"""Sums that can be done by hand, and what must hold for all of them."""

from dataclasses import replace
from unittest import mock

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.names import CLASSES, Pipeline
from penstock.plan import plan
from penstock.plan.goodput import Slo, Slos
from penstock.plan.plan import (
    LOG_REQUEST_BYTES,
    LOG_TOKEN_BYTES,
    Goals,
    make_plan,
    measure_waits,
    play_auto,
    play_trace,
    render_plan,
)
from penstock.plan.rates import DecodeBatch, WorkerRates
from penstock.plan.trace import Arrival, compute_peak, compute_quantile
from penstock.record import Record
from tests.record import play

RATES = WorkerRates(
    source="a test",
    prefill_tokens_per_s=1000.0,
    batches=(DecodeBatch(1, 50.0), DecodeBatch(8, 200.0), DecodeBatch(16, 320.0)),  # 20, 40 and 50 ms a token
    block_size=16,
    pool_blocks=1000,
    block_bytes=2**20,
)
STEADY = [Arrival(float(at), 2000, 100) for at in range(100)]
GOALS = Goals(utilisation=0.8, window_s=10.0)


@pytest.mark.proof
def test_the_sums_are_those_done_by_hand() -> None:
    made = make_plan(STEADY, RATES, GOALS)
    assert made.prompt_tokens_per_s == 2000.0, "ten prompts in any ten seconds"
    assert made.prefill_by_rate == 3, "2,000 / (1,000 x 0.8) = 2.5"
    assert made.batch == DecodeBatch(16, 320.0)
    assert made.decode_by_rate == 1, "100 / (320 x 0.8) = 0.39"
    assert made.places == pytest.approx(5.0), "one a second, each for 100 x 50 ms"
    assert made.kv_blocks == pytest.approx(5 * 132), "2,100 tokens in blocks of 16"
    assert made.decode_by_blocks == 1, "660 / (1,000 x 0.8) = 0.83"
    assert made.redis_bytes == pytest.approx(100 * (6000 + 100 * 80) * 3600 / 99)
    assert (made.prefill, made.decode) == (3, 1)
    assert made.auto_busy == pytest.approx(2000 / 1000 + 100 / 320)
    assert made.auto_by_rate == made.auto == 3, "2.31 / 0.8 = 2.9"
    lines = [f"{name:5} {line}" for name, line in render_plan(made, STEADY)]
    assert lines.index("      or 3 auto workers") == lines.index("plan  3 prefill and 1 decode workers") + 1


def test_texts_need_no_decode_worker() -> None:
    texts = [Arrival(float(at), 2000, 0) for at in range(100)]
    made = make_plan(texts, replace(RATES, pool_blocks=1), GOALS)
    assert (made.prefill, made.decode, made.auto) == (3, 0, 3), "2,000 / (1,000 x 0.8) = 2.5; each text is a prompt"
    assert made.waits.ttft_p50_s == pytest.approx(2.0), "the seconds of its tokens, as nobody waits"
    lines = [line for _, line in render_plan(made, texts)]
    assert "3 embed or auto workers" in lines
    assert not any("decode" in line or "answers" in line or "output" in line for line in lines)
    mixed = make_plan(sorted([*STEADY, *texts]), RATES, GOALS)
    assert (mixed.prefill_by_rate, mixed.decode) == (5, 1), "4,000 / (1,000 x 0.8) = 5; answers as before"


def test_the_pool_may_ask_for_more_than_the_rate() -> None:
    made = make_plan(STEADY, replace(RATES, pool_blocks=200), GOALS)
    assert made.decode_by_blocks == made.decode == 5, "660 / (200 x 0.8) = 4.1"
    assert make_plan(STEADY, replace(RATES, pool_blocks=None), GOALS).decode == 1


def test_a_goal_between_tokens_chooses_the_batch() -> None:
    assert make_plan(STEADY, RATES, replace(GOALS, itl_s=0.04)).batch == DecodeBatch(8, 200.0)
    assert make_plan(STEADY, RATES, replace(GOALS, itl_s=0.02)).decode == 3, "100 / (50 x 0.8) = 2.5"


def test_a_goal_for_first_tokens_adds_workers_until_the_simulation_meets_it() -> None:
    burst = [Arrival(0.0, 1000, 1)] * 8 + [Arrival(60.0, 1000, 1)]
    assert make_plan(burst, RATES, GOALS).prefill == 1, "800 tokens/s, in the peak's ten seconds"
    assert make_plan(burst, RATES, replace(GOALS, ttft_s=2.0)).prefill == 4, "two after each other, a second each"
    assert make_plan(burst, RATES, replace(GOALS, ttft_s=1.0)).prefill == 8
    goal = make_plan(burst, RATES, replace(GOALS, ttft_s=2.0, slos={"interactive": Slo(9.0, 1.0)}))
    assert goal.auto >= goal.prefill
    assert goal.auto_waits.ttft_p99_s <= 2.0


def test_what_no_number_of_workers_can_do_is_an_error_that_says_so() -> None:
    with pytest.raises(PlanError, match=r"the fastest takes 0\.02 s"):
        make_plan(STEADY, RATES, replace(GOALS, itl_s=0.01))
    with pytest.raises(PlanError, match=r"99% of the first tokens within 1\.5 s: prompts alone take 2 s; a faster dev"):
        make_plan(STEADY, RATES, replace(GOALS, ttft_s=1.5))
    with pytest.raises(PlanError, match="needs 132 KV blocks and the pool has 100"):
        make_plan(STEADY, replace(RATES, pool_blocks=100), GOALS)


def test_limits_by_default_that_no_number_of_workers_meets_are_refused_as_given_ones() -> None:
    batch = [one._replace(priority_class="batch") for one in STEADY]
    slos: Slos = {"interactive": Slo(4.0, 0.015), "batch": Slo(1.0, 0.5)}
    goals = replace(GOALS, slos=slos)
    with pytest.raises(PlanError, match=r"no measured batch keeps to 0\.015 s .* PENSTOCK_SLO_…_ITL_S"):
        make_plan(STEADY, RATES, goals)
    with pytest.raises(PlanError, match=r"90% of the first tokens within 1 s: .* PENSTOCK_SLO_…_TTFT_S"):
        make_plan(batch, RATES, goals)
    assert make_plan(STEADY, RATES, replace(goals, itl_s=0.03)).batch.size == 1, "a goal that is given goes before"
    assert make_plan(STEADY, RATES, replace(GOALS, slos={"interactive": Slo(4.0, 0.04)})).batch.size == 8
    few_long = [*STEADY, *(one._replace(prompt_tokens=9000) for one in STEADY[:9])]
    assert make_plan(sorted(few_long), RATES, GOALS).prefill, "nine of ten are enough"


@settings(max_examples=20)
@given(data=st.data())
def test_an_auto_worker_alone_takes_no_longer_than_one_of_each(data: st.DataObject) -> None:
    """A single request has a step's own time once for its prompt's chunks, and its tokens at the measured rate."""
    trace = [Arrival(0.0, data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 300)))]
    rates = replace(RATES, pool_blocks=None)
    (both,), (apart,) = play_auto(trace, rates, RATES.batches[0], 1), play_trace(trace, rates, RATES.batches[0], 1, 1)
    assert both.itl_s == pytest.approx(apart.itl_s)
    assert apart.ttft_s * 0.9 <= both.ttft_s <= apart.ttft_s + RATES.batches[0].step_s


def test_the_simulation_is_that_of_workers_one_step_after_the_other() -> None:
    trace = [Arrival(0.0, 100, 3), Arrival(0.0, 200, 3), Arrival(1.0, 100, 1)]
    waits = measure_waits(play_trace(trace, RATES, DecodeBatch(1, 50.0), 1, 1))
    assert (waits.ttft_p50_s, waits.ttft_p99_s) == pytest.approx((0.1, 0.3)), "after 0.1, 0.3 and 0.1 s"
    assert waits.itl_p99_s == pytest.approx(0.02), "22 ms a step of one row; the first is done before the other comes"


@pytest.mark.proof
def test_goodput_is_the_rate_at_which_nine_of_ten_are_in_time() -> None:
    """Each request takes two seconds, and comes when the one before it is done: at a higher rate more and more wait."""
    trace = [Arrival(2.0 * at, 2000, 1) for at in range(10)]
    rates = replace(RATES, pool_blocks=None)
    in_time = replace(GOALS, utilisation=1.0, window_s=20.0, slos={"interactive": Slo(2.5, 1.0)})
    made = make_plan(trace, rates, in_time)
    assert (made.prefill, made.mean_rate, made.met_share) == (1, 5 / 9, 1.0), "one after the other, without a pause"
    assert made.mean_rate < made.goodput < made.mean_rate * 1.2, "a fifth faster, from the third on they are late"
    lines = dict(render_plan(made, trace))
    assert lines["goodput"] == f"{made.goodput:.2f} requests/s, 90% of them in time"
    easy = make_plan(trace, rates, replace(in_time, slos={"interactive": Slo(60.0, 1.0)}))
    assert dict(render_plan(easy, trace))["goodput"].startswith("at least 2.39 requests/s")
    with pytest.raises(PlanError, match="90% of the first tokens within 1 s"):
        make_plan(trace, rates, replace(in_time, slos={"interactive": Slo(1.0, 1.0)}))


def test_each_class_has_limits_of_its_own_and_the_worse_one_counts() -> None:
    trace = [
        Arrival(0.0, 2000, 1, priority_class="batch"),
        Arrival(1.0, 2000, 1),
        Arrival(30.0, 2000, 1, priority_class="batch"),
    ]
    slos: Slos = {"interactive": Slo(2.5, 1.0), "batch": Slo(3.0, 1.0)}
    made = make_plan(trace, replace(RATES, pool_blocks=None), replace(GOALS, slos=slos))
    assert made.met_share == 0.5, "the first one is overtaken by what is interactive"
    assert any("batch 3 s and 1,000 ms" in line for _, line in render_plan(made, trace))


def test_a_peak_is_that_of_any_window() -> None:
    trace = [Arrival(at, 1, 1) for at in (0.0, 9.0, 10.0, 11.0, 18.9, 30.0)]
    assert compute_peak(trace, lambda _: 1, 10.0) == 0.4, "from 9 to 18.9; at 19 it is over"


@pytest.mark.parametrize("num_tokens", [16, 400])
def test_the_memory_of_a_stream_is_what_a_real_server_takes(
    server: "redis.Redis", record: Record, pipeline: Pipeline, num_tokens: int
) -> None:
    claim = play.decode(record)
    play.say(record, claim, range(num_tokens))
    assert record.finish_request(claim, play.end())
    keys = (pipeline.log_key("r1"), pipeline.record_key("r1"))
    taken = sum(server.memory_usage(key, samples=0) or 0 for key in keys)
    # Short logs take half as much in our Valkey, whose nodes of streams are smaller than the default.
    assert 0.3 < taken / (LOG_REQUEST_BYTES + LOG_TOKEN_BYTES * num_tokens) < 1.0


ARRIVALS = st.builds(Arrival, st.floats(0, 300), st.integers(1, 5000), st.integers(1, 500))
TRACES = st.lists(ARRIVALS, min_size=1, max_size=30).map(sorted)


@settings(max_examples=60)
@given(trace=TRACES, more=ARRIVALS, utilisation=st.floats(0.1, 1.0), factor=st.floats(1.0, 4.0))
def test_more_load_or_slower_workers_never_need_fewer(
    trace: list[Arrival], more: Arrival, utilisation: float, factor: float
) -> None:
    slos: Slos = dict.fromkeys(CLASSES, Slo(60.0, 1.0))
    goals, roomy = replace(GOALS, utilisation=utilisation, slos=slos), replace(RATES, pool_blocks=10_000)

    def by_sums(trace: list[Arrival], rates: WorkerRates, goals: Goals) -> tuple[int, ...]:
        names = ("play_trace", "play_auto", "measure_waits", "find_goodput", "compute_met_share")
        simulated = dict.fromkeys(names, mock.DEFAULT)
        with mock.patch.multiple(plan, **simulated):  # no sum follows from these
            made = make_plan(trace, rates, goals)
        assert made.prefill >= made.prefill_by_rate
        return made.prefill_by_rate, made.decode_by_rate, made.decode, made.auto

    base = by_sums(trace, roomy, goals)
    busier = by_sums(sorted([*trace, more]), roomy, goals)
    faster = by_sums(trace, replace(roomy, prefill_tokens_per_s=1000.0 * factor), goals)
    fuller = by_sums(trace, roomy, replace(goals, utilisation=1.0))
    assert all(now >= before for now, before in zip(busier, base, strict=True))
    assert all(now <= before for now, before in zip(faster, base, strict=True))
    assert all(now <= before for now, before in zip(fuller, base, strict=True))


@settings(max_examples=30)
@given(trace=TRACES)
def test_nobody_waits_where_each_has_a_worker(trace: list[Arrival]) -> None:
    waits = measure_waits(play_trace(trace, replace(RATES, pool_blocks=None), RATES.batches[0], len(trace), 1))
    alone_s = [one.prompt_tokens / RATES.prefill_tokens_per_s for one in trace]
    assert waits.ttft_p99_s == pytest.approx(compute_quantile(alone_s, 0.99), abs=1e-6)
