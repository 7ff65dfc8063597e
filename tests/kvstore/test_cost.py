"""A hit is never slower than a miss, as far as was measured."""

import pytest

from penstock.kvstore import cost
from penstock.kvstore.cost import CostModel


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def model_of(tokens_per_s: float | None = 1000.0, clock: Clock | None = None) -> CostModel:
    return CostModel(10, lambda: tokens_per_s, clock or Clock())


def read(model: CostModel, num_blocks: int, block_s: float, tier: str = "redis") -> int:
    """Read of a tier as a store does, if each block takes `block_s`; how many of the blocks were read."""
    left = num_blocks
    while left and (count := model.count_blocks_to_read(tier, left)):
        model.tier_speed(tier).record_read(count, count * block_s)
        left -= count
    return num_blocks - left


def test_of_a_tier_nobody_has_read_yet_a_few_blocks_are_tried() -> None:
    model = model_of()
    assert model.count_blocks_to_read("disk", 1) == 1
    assert model.count_blocks_to_read("disk", 50) == cost.NUM_PROBE_BLOCKS


def test_what_is_faster_than_computing_is_fetched() -> None:
    model = model_of()  # 10 ms a block
    model.tier_speed("disk").record_read(10, seconds=0.05)
    assert model.count_blocks_to_read("disk", 50) == 50


def test_what_is_slower_is_computed() -> None:
    model = model_of()
    assert read(model, 50, 0.05) == 2 * cost.NUM_PROBE_BLOCKS, "two looks at it say so"
    assert model.count_blocks_to_read("redis", 50) == 0
    assert model.count_blocks_to_read("disk", 50) == cost.NUM_PROBE_BLOCKS, "each tier has its own speed"


def test_latency_counts_for_few_blocks() -> None:
    model = model_of()
    speed = model.tier_speed("redis")
    for _ in range(50):
        speed.record_lookup(0.1)
    speed.record_read(100, seconds=0.1 + 0.1)
    assert speed.block_s == pytest.approx(0.001, rel=0.01)
    assert model.count_blocks_to_read("redis", 5) < 5
    assert model.count_blocks_to_read("redis", 50) == 50


def test_while_the_engines_speed_is_not_known_everything_is_fetched() -> None:
    model = model_of(None)
    model.tier_speed("redis").record_read(1, seconds=9.0)
    assert model.count_blocks_to_read("redis", 50) == 50


def test_a_slow_tier_is_looked_at_again_now_and_then() -> None:
    clock = Clock()
    model = model_of(clock=clock)
    assert read(model, 50, 0.05) == 2 * cost.NUM_PROBE_BLOCKS
    for _ in range(3):
        clock.now_s += cost.PROBE_INTERVAL_S - 0.1
        assert read(model, 50, 0.05) == 0
        clock.now_s += 0.1
        assert read(model, 50, 0.05) == cost.NUM_PROBE_BLOCKS
    clock.now_s += cost.PROBE_INTERVAL_S
    assert read(model, 50, 0.001) == 50, "it became fast, and one look is enough to know"


def test_one_hiccup_does_not_switch_a_tier_off() -> None:
    clock = Clock()
    model = model_of(clock=clock)
    assert read(model, 50, 0.0001) == 50
    for held_up in (40, cost.NUM_PROBE_BLOCKS):
        model.tier_speed("redis").record_read(held_up, seconds=2.0)
        assert read(model, 50, 0.0001) == 50, "one look again tells"
        clock.now_s += cost.PROBE_INTERVAL_S


def test_a_hiccup_of_the_first_read_does_not_either() -> None:
    model = model_of()
    assert model.count_blocks_to_read("redis", 50) == cost.NUM_PROBE_BLOCKS
    model.tier_speed("redis").record_read(cost.NUM_PROBE_BLOCKS, seconds=2.0)  # it connects, its memory is cold
    assert read(model, 48, 0.0001) == 48


def test_a_question_that_is_held_up_does_not_either() -> None:
    model = model_of()
    model.tier_speed("redis").record_lookup(2.0)  # the first one connects
    model.tier_speed("redis").record_lookup(0.001)
    assert read(model, 50, 0.0001) == 50
    model.tier_speed("redis").record_lookup(2.0)
    assert model.count_blocks_to_read("redis", 50) == 50


def test_a_tier_that_is_held_up_all_the_time_costs_no_more_than_computing() -> None:
    clock = Clock()
    model = model_of(clock=clock)  # 10 ms a block
    taken_s, num_requests = 0.0, 1000
    for number in range(num_requests):
        block_s = 0.001 if number % 2 else 0.04
        num_read = read(model, 50, block_s)
        taken_s += num_read * block_s + (50 - num_read) * 0.01
        clock.now_s += 0.1
    assert taken_s < 1.1 * num_requests * 50 * 0.01
