"""A hit is never slower than a miss, as far as was measured."""

import pytest

from kvstore import cost
from kvstore.cost import CostModel


def model_of(tokens_per_s: float | None = 1000.0) -> CostModel:
    return CostModel(10, lambda: tokens_per_s)


def test_of_a_tier_nobody_has_read_yet_a_few_blocks_are_tried() -> None:
    model = model_of()
    assert model.worth("disk", 1) == 1
    assert model.worth("disk", 50) == cost.FIRST_LOOK


def test_what_is_faster_than_computing_is_fetched() -> None:
    model = model_of()  # 10 ms a block
    model.speed("disk").read(10, seconds=0.05)
    assert model.worth("disk", 50) == 50


def test_what_is_slower_is_computed() -> None:
    model = model_of()
    model.speed("redis").read(10, seconds=0.5)
    assert model.worth("redis", 50) == 0
    assert model.worth("disk", 50) == cost.FIRST_LOOK, "each tier has its own speed"


def test_latency_counts_for_few_blocks() -> None:
    model = model_of()
    speed = model.speed("redis")
    for _ in range(50):
        speed.asked(0.1)
    speed.read(100, seconds=0.1 + 0.1)
    assert speed.block_s == pytest.approx(0.001, rel=0.01)
    assert model.worth("redis", 5) == 0
    assert model.worth("redis", 50) == 50


def test_while_the_engines_speed_is_not_known_everything_is_fetched() -> None:
    model = model_of(None)
    model.speed("redis").read(1, seconds=9.0)
    assert model.worth("redis", 50) == 50


def test_a_slow_tier_is_looked_at_again_now_and_then() -> None:
    model = model_of()
    model.speed("redis").read(10, seconds=0.5)
    assert model.worth("redis", 50) == 0
    model.speed("redis").measured_at -= cost.LOOK_AGAIN_S + 1
    assert model.worth("redis", 50) == cost.FIRST_LOOK
    for _ in range(20):
        model.speed("redis").read(2, seconds=0.002)
    assert model.worth("redis", 50) == 50
