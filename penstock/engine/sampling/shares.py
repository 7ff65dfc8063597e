"""Probabilities as integers, so that sums and shares are exact: the same in any order, batch and number of threads."""

import torch
from torch import Tensor

from penstock.engine.sampling.ranking import gather_blocks, reduce_blocks

WEIGHT_SCALE = 2.0**40
"""The weight of a row's best token; a token 10^12 times less likely has none. 2^22 tokens can be added up."""
_MIN_EXPONENT = -80.0
CHUNK_SCORES = 2**18
"""Scores weighed at once, so that intermediate results stay in the processor's cache."""


def select_rows(scores: Tensor, rows: list[int]) -> Tensor:
    """Return the given rows, in that order; without a copy if these are all rows in their order."""
    return scores if _is_every_row(rows, scores) else scores[rows]


def _is_every_row(rows: list[int], scores: Tensor) -> bool:
    return rows == list(range(len(scores)))


def to_weights(scores: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Return the weights (int64) of float32 scores [rows, n]. `top` (the best score) and `temperature`: [rows, 1]."""
    # Below the least exponent the weight is 0 all the same, and `exp` of such numbers takes up to 30 times as long.
    return (scores - top).div_(temperature).clamp_(min=_MIN_EXPONENT).exp_().mul_(WEIGHT_SCALE).long()


def sum_block_weights(scores: Tensor, rows: list[int], top: Tensor, temperature: Tensor) -> Tensor:
    """Return the sum of weights in each block of `scores[rows]`: [rows, blocks]."""
    step = max(1, CHUNK_SCORES // scores.shape[1])
    found, is_whole = [], _is_every_row(rows, scores)
    for begin in range(0, len(rows), step):
        chunk = slice(begin, begin + step)
        part = scores[chunk] if is_whole else scores[rows[chunk]]
        found.append(reduce_blocks(to_weights(part, top[chunk], temperature[chunk]), lambda block: block.sum(-1)))
    return torch.cat(found)


def pick_index(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the index at which each row reaches the share `uniform` (float64 in [0, 1), [rows, 1]) of its weight."""
    return _index_reaching(weights, _target_weight(weights, uniform))


def pick_token(scores: Tensor, blocks: Tensor, top: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """`pick` over whole rows [rows, vocabulary] whose blocks weigh `blocks`: token ids [rows, 1]."""
    wanted = _target_weight(blocks, uniform)
    block = _index_reaching(blocks, wanted)
    before = (blocks.cumsum(-1) - blocks).gather(1, block)
    found, ids = gather_blocks(scores, block)
    place = _index_reaching(to_weights(found, top, temperature), wanted - before)
    return ids.gather(1, place).clamp_(max=scores.shape[1] - 1)


def _target_weight(weights: Tensor, uniform: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.minimum((total.double() * uniform).long(), total - 1)


def _index_reaching(weights: Tensor, wanted: Tensor) -> Tensor:
    """Return the index at which the running sum first exceeds `wanted`, which is never at a weight of zero."""
    return (weights.cumsum(-1) <= wanted).sum(-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
