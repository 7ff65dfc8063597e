"""What counts as the same numbers, and what does not."""

import math

import pytest
import torch

from penstock.engine.model.compare import find_tolerance, is_close, measure_error, measure_logits_error

RIGHT = torch.tensor([3.0, -4.0, 0.0])


INTEGERS = torch.arange(20)


@pytest.mark.parametrize(
    ("mine", "right", "tolerance", "are_close"),
    [
        *((RIGHT + torch.tensor([0.0, damage, 0.0]), RIGHT, 0.1, False) for damage in (math.nan, math.inf, 1.0)),
        (RIGHT[None], RIGHT, 0.1, False), (torch.arange(3), torch.arange(4), 0.1, False),
        (torch.zeros(3), torch.zeros(3), 0.0, True), (torch.ones(3), torch.zeros(3), 0.1, False),
        (INTEGERS.where(INTEGERS > 1, 7), INTEGERS, 0.0, True), (INTEGERS.where(INTEGERS > 2, 7), INTEGERS, 0.0, False),
    ],
)  # fmt: skip
def test_what_is_close(mine: torch.Tensor, right: torch.Tensor, tolerance: float, are_close: bool) -> None:
    """Numbers of one shape, and of integers nearly all are the same."""
    assert is_close(mine, right, tolerance) == are_close


def test_an_error_is_relative_to_what_is_right_or_to_another_scale() -> None:
    assert measure_error(1.1 * RIGHT, RIGHT) == pytest.approx(0.1)
    assert measure_error(1.1 * RIGHT, RIGHT, 10 * RIGHT) == pytest.approx(0.01)
    assert measure_logits_error(RIGHT + 100.5, RIGHT + 100) == pytest.approx(0.5 / float(RIGHT.std(correction=0)))


def test_a_form_of_integers_has_its_own_tolerance() -> None:
    assert find_tolerance(torch.bfloat16, "int4") == find_tolerance(torch.float32, "int4")
    assert find_tolerance(torch.float32) < find_tolerance(torch.bfloat16) == find_tolerance(torch.float16)
