"""Whether two computations of the same numbers agree, as far as their dtype goes."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.weights.forms import GGUF

MIN_EQUAL_INTEGERS = 0.9
"""Share of integers that must be the same, such as the experts chosen: in 16 bits two of them may be equally good."""


class Tolerance(NamedTuple):
    """The largest relative error where only rounding differs."""

    part: float
    """Tolerance for the output of one layer or norm."""
    state: float
    """Tolerance for a layer's recurrent state after some tokens."""
    logits: float
    """Tolerance for a model's logits; one differently routed expert shifts all of them slightly."""


_BY_DTYPE = {
    torch.float32: Tolerance(1e-4, 1e-3, 0.01),
    torch.bfloat16: Tolerance(0.02, 0.03, 0.1),
    torch.float16: Tolerance(0.02, 0.03, 0.1),
}
_BY_FORM = {"int8": Tolerance(0.1, 0.1, 0.3), "int4": Tolerance(0.4, 0.4, 1.0), GGUF: Tolerance(0.1, 0.1, 0.3)}
"""Where inputs, or weights too, become integers: random weights lose as much, trained ones less. Logits of no relation
are off by 1.4."""


def find_tolerance(dtype: torch.dtype, form: str = "") -> Tolerance:
    """Return the tolerance for numbers of a dtype that are computed with weights in a form."""
    return _BY_FORM.get(form, _BY_DTYPE[dtype])


def measure_error(mine: Tensor, right: Tensor, scale: Tensor | None = None) -> float:
    """Return the root mean square of the difference, relative to that of `scale`, by default of what is right.

    It is infinite where the shapes differ.
    """
    if mine.shape != right.shape:
        return float("inf")
    mine, right = mine.float(), right.float()
    scale = right if scale is None else scale.float()
    error = (mine - right).square().mean().sqrt()
    return float(error / scale.square().mean().sqrt()) if error else 0.0


def measure_logits_error(mine: Tensor, right: Tensor) -> float:
    """Return the error of logits relative to their spread."""
    return measure_error(mine, right, right - right.mean())


def is_close(mine: Tensor, right: Tensor, tolerance: float, scale: Tensor | None = None) -> bool:
    """Return whether numbers are the same as far as the tolerance goes, and nearly all integers equal."""
    if not right.is_floating_point():
        return mine.shape == right.shape and bool((mine == right).float().mean() >= MIN_EQUAL_INTEGERS)
    return measure_error(mine, right, scale) <= tolerance
