"""What counts as the same numbers, and what does not."""

import math

import pytest
import torch

from penstock.engine.compare import find_tolerance, is_close, measure_error, measure_logits_error

RIGHT = torch.tensor([3.0, -4.0, 0.0])


@pytest.mark.parametrize("damage", [math.nan, math.inf, 1.0])
def test_other_numbers_are_not_close(damage: float) -> None:
    assert not is_close(RIGHT + torch.tensor([0.0, damage, 0.0]), RIGHT, 0.1)


def test_numbers_of_another_shape_are_not_close() -> None:
    assert not is_close(RIGHT[None], RIGHT, 0.1)
    assert not is_close(torch.arange(3), torch.arange(4), 0.1)


def test_an_error_is_relative_to_what_is_right_or_to_another_scale() -> None:
    assert measure_error(1.1 * RIGHT, RIGHT) == pytest.approx(0.1)
    assert measure_error(1.1 * RIGHT, RIGHT, 10 * RIGHT) == pytest.approx(0.01)
    assert measure_logits_error(RIGHT + 100.5, RIGHT + 100) == pytest.approx(0.5 / float(RIGHT.std(correction=0)))


def test_zeros_are_zeros() -> None:
    assert is_close(torch.zeros(3), torch.zeros(3), 0.0)
    assert not is_close(torch.ones(3), torch.zeros(3), 0.1)


def test_nearly_all_integers_are_the_same() -> None:
    right = torch.arange(20)
    assert is_close(right.where(right > 1, 7), right, 0.0)
    assert not is_close(right.where(right > 2, 7), right, 0.0)


def test_a_form_of_integers_has_its_own_tolerance() -> None:
    assert find_tolerance(torch.bfloat16, "int4") == find_tolerance(torch.float32, "int4")
    assert find_tolerance(torch.float32) < find_tolerance(torch.bfloat16) == find_tolerance(torch.float16)
