"""Probabilities as integers, so that sums and shares are exact: the same in any order, batch and number of threads.

A weight is made of the score by additions and multiplications in float32 alone. IEEE 754 says how each is rounded, so
every processor, instruction set and device has the same. `kernels/src/sampler.cpp` computes it in the same order.
"""

import math

import torch
from torch import Tensor

WEIGHT_BITS = 40
WEIGHT_SCALE = 2.0**WEIGHT_BITS
"""The weight of a row's best token; a token 10^12 times less likely has none. 2^22 tokens can be added up."""
_MIN_EXPONENT = -64.0
_POWER_OF_TWO = (1.32647203e-3, 9.67151299e-3, 5.55073358e-2, 2.40222424e-1, 6.93147004e-1, 1.0)
"""The polynomial of 2^x between -1/2 and 1/2, highest power first; it is wrong by 2e-7 of the value at most."""
_FLOAT_BIAS, _FLOAT_FRACTION_BITS = 127, 23
_MIN_TEMPERATURE = 1e-30
"""The lowest divisor in float32. Any temperature near it gives the best token."""


def compute_rate(temperature: float) -> float:
    """Return how fast the logarithm of a weight, to base 2, falls with the score. Used in float32."""
    return math.log2(math.e) / max(temperature, _MIN_TEMPERATURE)


def to_weights(scores: Tensor, top: Tensor, rate: Tensor) -> Tensor:
    """Return the weights (int64) of float32 scores [rows, n]. `top` (the best score) and `rate`: [rows, 1].

    A score that is not a number has no weight, and neither has any token beside a best score that is not finite.
    """
    least = torch.tensor(_MIN_EXPONENT, device=scores.device)
    part = torch.fmax((scores - top).mul_(rate), least)  # takes the number of the two
    whole = part.round()
    part -= whole
    value = part * _POWER_OF_TWO[0]
    for coefficient in _POWER_OF_TWO[1:-1]:
        value.add_(coefficient).mul_(part)
    value.add_(_POWER_OF_TWO[-1])
    bits = whole.int().add_(_FLOAT_BIAS + WEIGHT_BITS).bitwise_left_shift_(_FLOAT_FRACTION_BITS)
    return value.mul_(bits.view(torch.float32)).long()


def pick_index(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which each row reaches the share `uniform` (float64 in [0, 1), [rows, 1]) of its weight.

    There the running sum first exceeds that share, which is never at a weight of zero.
    """
    total = weights.sum(-1, keepdim=True)
    wanted = torch.minimum((total.double() * uniform).long(), total - 1)
    return (weights.cumsum(-1) <= wanted).sum(-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
