"""The formulas of sizes."""

import math
from dataclasses import replace

import pytest

from penstock.autoscale.sizing import (
    Load,
    Speed,
    Targets,
    count_decode,
    count_prefill,
    predict_p99_s,
    size_kind,
)
from penstock.config.settings import PACED_SHARE

TARGETS, SPEED = Targets(4.0, 0.05), Speed(rows=20, step_s=0.05, pool_tokens=100_000)
LOAD = Load(rate=5.0, prompt_s=0.4, prompt_s2=0.4, output_tokens=100.0, context_tokens=2000.0)


def estimate_wait_s(load: Load, num: float) -> float:
    """Return the mean seconds that a prompt waits before `num` workers, each with its share of the arrivals."""
    return load.rate / num * load.prompt_s2 / (2 * (1 - load.rate * load.prompt_s / num))


@pytest.mark.parametrize("rate", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("spread", [1.0, 4.0, 30.0])
def test_the_real_number_of_prefill_workers_is_where_the_mean_is_its_share_of_the_limit(
    rate: float, spread: float
) -> None:
    load = replace(LOAD, rate=rate, prompt_s2=spread * LOAD.prompt_s**2)
    num = count_prefill(load, TARGETS)
    assert math.isclose(estimate_wait_s(load, num) + load.prompt_s, 0.8 * TARGETS.ttft_s)


def test_the_simulation_has_the_mean_of_the_formula() -> None:
    """With one worker, where it is not rounded."""
    load = Load(1.0, 0.5, 0.25, 0.0)  # prompts of one length
    one_s = predict_p99_s(load, 1, TARGETS)
    assert 1.5 < one_s / (estimate_wait_s(load, 1) + 0.5) < 5
    assert predict_p99_s(load, 2, TARGETS) < one_s < predict_p99_s(replace(load, rate=1.6), 1, TARGETS)
    assert math.isinf(predict_p99_s(replace(load, rate=2.0), 1, TARGETS))


def test_a_prompt_beside_answers_keeps_to_their_gap_until_it_would_be_late() -> None:
    load = Load(0.001, 0.4, 0.16, output_tokens=100_000.0)  # prompts of one length, far from each other
    speed = Speed(rows=20, step_s=0.04, row_s=0.001)  # 100 answers a second: 5 rows within the gap, and steps of 25 ms
    assert predict_p99_s(load, 1, TARGETS) == pytest.approx(0.4)
    assert predict_p99_s(load, 1, TARGETS, speed) == pytest.approx(0.4 * 50 / 25)
    paced_s = predict_p99_s(load, 1, replace(TARGETS, ttft_s=1.6), speed)
    assert paced_s == pytest.approx(PACED_SHARE * 1.6), "just in time"
    late_s = predict_p99_s(load, 1, replace(TARGETS, ttft_s=0.1), speed)
    assert late_s == pytest.approx(0.4 / 0.9), "longer steps leave rows a tenth of the time"
    few = replace(load, output_tokens=1.0)
    assert predict_p99_s(few, 1, TARGETS, speed) == pytest.approx(0.4, rel=0.01), "rarely is any answer there"


def test_decode_is_by_rows_and_by_memory() -> None:
    assert count_decode(LOAD, SPEED) == pytest.approx(5 * 100 * 0.05 / 20)
    assert size_kind("decode", LOAD, SPEED, TARGETS).number == 2
    need = size_kind("decode", LOAD, replace(SPEED, pool_tokens=10_000), TARGETS)
    assert (need.number, need.reason) == (5, "memory 5.00")


def test_auto_workers_do_both() -> None:
    both = count_prefill(LOAD, TARGETS) + count_decode(LOAD, SPEED)
    assert size_kind("auto", LOAD, SPEED, TARGETS).number == math.ceil(both)


def test_heavy_tails_need_more_workers() -> None:
    heavy = replace(LOAD, prompt_s2=6 * LOAD.prompt_s**2)
    assert count_prefill(heavy, TARGETS) > 1.2 * count_prefill(LOAD, TARGETS)


def test_what_waits_needs_workers_beside_what_arrives() -> None:
    assert size_kind("prefill", replace(LOAD, backlog_s=40.0), SPEED, TARGETS).number == 10
    full = replace(LOAD, waiting_answers_s=40.0)
    assert size_kind("prefill", full, SPEED, TARGETS).number == 3, "it waits for rows"
    assert size_kind("decode", full, SPEED, TARGETS).number == 10
    assert size_kind("auto", full, SPEED, TARGETS).number == 12
    slow = replace(LOAD, backlog_s=40.0, start_s=40.0)
    assert size_kind("prefill", slow, SPEED, TARGETS).number == 3, "who is ready in 40 s helps none that waits now"


def test_a_worker_that_goes_takes_its_pool_with_it() -> None:
    found = replace(LOAD, pool_hit_s=0.8)
    assert found.spread_over(3, 4).prompt_s == pytest.approx(0.6)
    assert found.spread_over(5, 4) is found


def test_no_number_helps_prompts_that_alone_take_longer() -> None:
    need = size_kind("prefill", replace(LOAD, prompt_s=5.0, prompt_s2=26.0, backlog_s=1e6), SPEED, TARGETS)
    assert need.is_hopeless
    assert need.number == math.ceil(25 / 0.9)


def test_without_load_none_is_needed_and_with_an_open_request_one() -> None:
    nothing = replace(LOAD, rate=0.0)
    assert size_kind("auto", nothing, SPEED, TARGETS).number == 0
    assert size_kind("auto", replace(nothing, is_open=True), SPEED, TARGETS).number == 1
