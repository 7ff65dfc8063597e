"""Drawing tokens at random: temperature, top-k, top-p, min-p.

A request that filters draws among the tokens left, in falling order; one that does not, among all tokens in the order
of their ids, which needs no ranking. Each is the inverse of a cumulative distribution at the token's random number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.device import to_device
from penstock.engine.sampling.draw import SamplingParams, draw_uniform
from penstock.engine.sampling.ranking import MAX_BLOCKWISE_TOKENS, top_tokens
from penstock.engine.sampling.shares import compute_rate, pick_index, to_weights

_CANDIDATE_COUNTS = (MAX_BLOCKWISE_TOKENS, 4096, 2**31)
"""How many top tokens are considered at first, and how many for rows whose filters leave more than that."""


def draw_at_random(scores: Tensor, draws: Sequence[SamplingParams]) -> list[int]:
    """Draw a token for each row of `scores` [rows, vocabulary], float32."""
    whole = [row for row, draw in enumerate(draws) if not _has_filters(draw)]
    nucleus = [row for row, draw in enumerate(draws) if draw.sampling.top_p < 1 and not _has_top_k(draw, scores)]
    filtered = [row for row, draw in enumerate(draws) if _has_filters(draw)]
    settings, top, tokens = _RowSettings(draws, scores), scores.amax(-1, keepdim=True), [0] * len(draws)
    totals = torch.zeros(len(draws), 1, dtype=torch.int64, device=scores.device)
    if whole:
        weights = to_weights(scores[whole], top[whole], settings.rate[whole])
        set_rows(tokens, whole, pick_index(weights, settings.uniform[whole])[:, 0].tolist())
    if nucleus:
        totals[nucleus] = to_weights(scores[nucleus], top[nucleus], settings.rate[nucleus]).sum(-1, keepdim=True)
    for width in _CANDIDATE_COUNTS:
        if filtered:
            some = [draws[row] for row in filtered]
            found = _draw_filtered(scores[filtered], top[filtered], some, totals[filtered], width)
            set_rows(tokens, filtered, found)
            filtered = [row for row, token in zip(filtered, found, strict=True) if token < 0]
    return tokens


def set_rows(values: list[int], rows: list[int], found: list[int]) -> None:
    """Set `values` at the given rows."""
    for row, value in zip(rows, found, strict=True):
        values[row] = value


def _has_filters(draw: SamplingParams) -> bool:
    sampling = draw.sampling
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _has_top_k(draw: SamplingParams, scores: Tensor) -> bool:
    return 0 < draw.sampling.top_k < scores.shape[1]


def _draw_filtered(
    scores: Tensor, top: Tensor, draws: Sequence[SamplingParams], totals: Tensor, width: int
) -> list[int]:
    """Draw a token for each row; -1 if its filters leave more than the first `width` tokens.

    `top` has the best score of each row, and `totals` the weight of whole rows with top-p and no top-k: [rows, 1].
    """
    settings = _RowSettings(draws, scores)
    values, ids = top_tokens(scores, min(width, scores.shape[1]))
    weights = to_weights(values, top, settings.rate)
    weights.masked_fill_(torch.arange(weights.shape[1], device=scores.device) >= settings.top_k, 0)
    reached = weights.cumsum(-1)
    top_k_seen = settings.top_k <= weights.shape[1]
    total = torch.where(top_k_seen, reached[:, -1:], totals)
    # The nucleus: the fewest tokens that reach top_p together, so those before which it is not reached yet.
    limit = total.double() * settings.top_p
    least = weights[:, :1].double() * settings.min_p
    inside = ((reached - weights).double() < limit) | (settings.top_p == 1)
    inside &= weights.double() >= least
    # With top-k beyond the width, what top-p is a share of is not known yet, so min-p alone cannot end the search.
    whole_known = (settings.top_k == scores.shape[1]) | (settings.top_p == 1)
    complete = top_k_seen | (whole_known & (weights[:, -1:].double() < least))
    complete |= whole_known & (settings.top_p < 1) & (reached[:, -1:].double() >= limit)
    tokens = ids.gather(1, pick_index(weights.masked_fill_(~inside, 0), settings.uniform))
    tokens = torch.where(complete, tokens, -1).masked_fill_(~top.isfinite(), 0)  # as rows without filters have it
    found: list[int] = tokens[:, 0].tolist()
    return found


class _RowSettings:
    """The sampling settings of some rows, each a tensor [rows, 1]."""

    def __init__(self, draws: Sequence[SamplingParams], scores: Tensor) -> None:
        self._device = scores.device
        samplings, size = [draw.sampling for draw in draws], scores.shape[1]
        self.rate = self._to_column([compute_rate(s.temperature) for s in samplings], torch.float32)
        self.top_k = self._to_column([min(s.top_k or size, size) for s in samplings], torch.int64)
        self.top_p = self._to_column([s.top_p for s in samplings], torch.float64)
        self.min_p = self._to_column([s.min_p for s in samplings], torch.float64)
        self.uniform = self._to_column([draw_uniform(draw.seed, draw.position) for draw in draws], torch.float64)

    def _to_column(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return to_device(values, self._device, dtype)[:, None]
