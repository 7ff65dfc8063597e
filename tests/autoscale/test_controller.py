"""The controller's decisions, on a pipeline that flows."""

import json
from itertools import pairwise

import pytest

from penstock.autoscale.controller import Bounds, Controller
from tests.autoscale.fluid import TARGETS, FluidPipeline, count_reversals


@pytest.mark.parametrize("rate", [0.5, 4.6, 9.9])
@pytest.mark.parametrize("seed", range(2))
def test_a_constant_load_with_five_percent_of_noise_turns_no_number(rate: float, seed: int) -> None:
    pipeline = FluidPipeline(noise=0.05, seed=seed)
    pipeline.run(rate, 700)
    numbers = [one.numbers["auto"] for one in pipeline.run(rate, 600)]
    assert len(set(numbers)) == 1
    assert pipeline.backlog_s < 1


def test_queued_work_counts() -> None:
    """As it does not in dynamo#10528: completions tell nothing of what waits."""
    pipeline = FluidPipeline(start_s=5)
    pipeline.run(3.0, 120)
    before = pipeline.decisions[-1].numbers["auto"]
    pipeline.backlog_s = 60.0
    after = pipeline.run(3.0, 5)[-1]
    assert after.numbers["auto"] >= 11 > before
    assert "backlog" in after.reasons["auto"]


def test_without_traffic_all_go_together() -> None:
    """As they do not in dynamo#6985."""
    pipeline = FluidPipeline(Bounds(zero_after_s=60.0), kinds=("prefill", "decode"))
    pipeline.run(6.0, 300)
    assert pipeline.count("prefill") > 1
    quiet = pipeline.run(0.0, 55)
    assert all(number for one in quiet for number in one.numbers.values())
    pipeline.run(0.0, 30)
    assert pipeline.decisions[-1].numbers == {"prefill": 0, "decode": 0}
    pipeline.run(0.1, 10)
    assert pipeline.decisions[-1].numbers == {"prefill": 1, "decode": 1}


def test_it_does_not_swing_where_one_less_would_be_too_few() -> None:
    """As it does in dynamo#9294, which goes down as long as each worker is idle enough, and up again."""
    pipeline = FluidPipeline()
    for rate in (1.0, 3.0, 1.5):
        pipeline.run(rate, 800)
        assert count_reversals([one.numbers["auto"] for one in pipeline.run(rate, 600)]) == 0


def test_it_goes_up_at_once_and_counts_who_starts() -> None:
    pipeline = FluidPipeline(start_s=30)
    pipeline.run(2.0, 300)
    first = pipeline.decisions[-1].numbers["auto"]
    numbers = [one.numbers["auto"] for one in pipeline.run(8.0, 60)]
    assert numbers == sorted(numbers)
    assert first < numbers[1] <= numbers[-1] <= 8, "the queue of a start of 30 s is not asked for again and again"


def test_it_goes_down_by_one_after_three_windows_each() -> None:
    pipeline = FluidPipeline()
    pipeline.run(10.0, 700)
    before = pipeline.count()
    numbers = [one.numbers["auto"] for one in pipeline.run(1.0, 1200)]
    assert numbers[:17] == [before] * 17, "90 s"
    assert all(first - second in (0, 1) for first, second in pairwise(numbers))
    assert numbers[-1] == 1


def test_without_a_signal_nothing_goes_down() -> None:
    pipeline = FluidPipeline(Bounds(zero_after_s=60.0))
    pipeline.run(10.0, 200)
    before, pipeline.missing = pipeline.count(), ("no heartbeat has a rate",)
    decisions = pipeline.run(0.0, 600)
    assert {one.numbers["auto"] for one in decisions} == {before}
    assert decisions[-1].alerts == ("no heartbeat has a rate",)


def test_workers_that_vanish_are_expected_back_and_those_that_leave_are_not() -> None:
    pipeline = FluidPipeline()
    pipeline.run(10.0, 200)
    before = pipeline.count()
    pipeline.ready["auto"], pipeline.lost = pipeline.ready["auto"][2:], {"auto": 2}
    assert pipeline.look(1.0).numbers["auto"] == before
    other = FluidPipeline()
    other.run(10.0, 200)
    other.run(1.0, 60)
    del other.ready["auto"][2:]
    assert other.look(1.0).numbers["auto"] < before, "an operator is believed"


def test_numbers_of_an_operator_are_where_it_begins() -> None:
    pipeline = FluidPipeline()
    pipeline.run(1.0, 200)
    pipeline.ready["auto"] += ["auto-8", "auto-9", "auto-10"]
    numbers = [one.numbers["auto"] for one in pipeline.run(1.0, 600)]
    assert numbers[:10] == [4] * 10
    assert numbers[-1] == 1


def test_a_start_that_never_ends_neither_counts_nor_blocks() -> None:
    pipeline = FluidPipeline(start_s=10)
    pipeline.run(6.0, 700)
    before, pipeline.never_ready = pipeline.count(), True
    numbers = [one.numbers["auto"] for one in pipeline.run(9.0, 400)]
    assert max(numbers) < 4 * before, "no growth without end"
    assert any("start" in alert for alert in pipeline.decisions[-1].alerts)
    pipeline.backlog_s = 0.0
    numbers = [one.numbers["auto"] for one in pipeline.run(1.0, 1500)]
    assert numbers[-1] == 1
    pipeline.never_ready = False
    pipeline.run(9.0, 120)
    assert not pipeline.decisions[-1].alerts


def test_a_prompt_alone_above_the_limit_is_told_and_does_not_grow_the_number() -> None:
    pipeline = FluidPipeline(prompt_s=5.0)
    pipeline.run(0.3, 400)
    assert pipeline.decisions[-1].numbers["auto"] <= 3
    assert any("more workers do not help" in alert for alert in pipeline.decisions[-1].alerts)


def test_a_bound_makes_room_first() -> None:
    pipeline = FluidPipeline(Bounds(least=1, most=4), kinds=("prefill", "decode"))
    for decision in pipeline.run(12.0, 300):
        assert sum(decision.numbers.values()) <= 4
    assert "at most 4" in "".join(pipeline.decisions[-1].reasons.values())
    assert FluidPipeline(Bounds(least=3)).run(0.1, 300)[-1].numbers == {"auto": 3}


def test_batch_work_fills_what_is_left_and_counts_by_its_deadline() -> None:
    pipeline = FluidPipeline(Bounds(zero_after_s=60.0))
    pipeline.batch_s = 3600.0
    pipeline.run(0.5, 300)
    assert pipeline.decisions[-1].numbers["auto"] == 1
    pipeline.batch_s = 3 * 86_400.0
    pipeline.run(0.5, 300)
    assert pipeline.decisions[-1].numbers["auto"] == 4
    pipeline.batch_s = 10.0
    assert all(one.numbers["auto"] for one in pipeline.run(0.0, 400)), "some of it is open"


def test_another_controller_goes_on_with_what_is_written_down() -> None:
    one, two = FluidPipeline(noise=0.05), FluidPipeline(noise=0.05)
    for rate, seconds in ((3.0, 400), (9.0, 200), (2.0, 1000)):
        expected = [decision.numbers for decision in one.run(rate, seconds)]
        found = []
        for _ in range(0, seconds, 100):
            state = json.loads(json.dumps(two.controller.export_state()))
            two.controller = Controller(TARGETS, two.bounds, state)
            found += [decision.numbers for decision in two.run(rate, 100)]
        assert found == expected


def test_a_controller_that_knows_nothing_holds_what_there_is() -> None:
    pipeline = FluidPipeline()
    pipeline.run(8.0, 200)
    before = pipeline.count()
    pipeline.controller = Controller(TARGETS, pipeline.bounds)
    assert {one.numbers["auto"] for one in pipeline.run(8.0, 100)} == {before}
