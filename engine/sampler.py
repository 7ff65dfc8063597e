"""From logits to tokens. A token depends on its own logits, its request's seed and its position, and on
nothing else.

The random number of a token is a hash of (seed, position): a resumed request draws the numbers it would have
drawn, in another batch, on another worker or after a crash.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.messages import Sampling

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64


@dataclass(frozen=True)
class Draw:
    """How one row's token is chosen. `position` counts output tokens from 0."""

    sampling: Sampling
    seed: int
    position: int


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that `seed` and `position` alone decide: 53 bits of SplitMix64's mixing."""
    start = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((start + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def sample(logits: Tensor, draws: Rows[Draw]) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary]; of equal ones the lowest id comes first."""
    assert len(logits) == len(draws)
    tokens: list[int] = logits.argmax(-1).tolist()
    random_rows = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random_rows:
        chosen = _sample_random(logits[random_rows], [draws[row] for row in random_rows])
        for row, token in zip(random_rows, chosen, strict=True):
            tokens[row] = token
    return tokens


def _sample_random(logits: Tensor, draws: Rows[Draw]) -> list[int]:
    """Inverse of the cumulative distribution over tokens in order of falling probability, in float64."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    ordered, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    scores = (ordered.double() - ordered[:, :1].double()) / column([d.sampling.temperature for d in draws])
    weights = scores.exp()
    rank = torch.arange(weights.shape[1], device=logits.device)[None]
    top_k = column([float(d.sampling.top_k or weights.shape[1]) for d in draws])
    weights = weights.masked_fill(rank >= top_k, 0.0)
    # Nucleus: the fewest tokens that reach top_p together, so those before which top_p is not reached yet.
    before = weights.cumsum(-1) - weights
    top_p = column([d.sampling.top_p for d in draws])
    outside = (before >= top_p * weights.sum(-1, keepdim=True)) & (top_p < 1) & (rank > 0)
    cumulative = weights.masked_fill(outside, 0.0).cumsum(-1)
    target = column([uniform(d.seed, d.position) for d in draws]) * cumulative[:, -1:]
    index = (cumulative <= target).sum(-1, keepdim=True)
    # Rounding may put the target on the total itself: then the last token that can be drawn is meant.
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    tokens: list[int] = ids.gather(-1, index.minimum(last))[:, 0].tolist()
    return tokens
