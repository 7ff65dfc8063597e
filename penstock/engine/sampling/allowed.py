"""The masks of grammars and `min_tokens`, applied to the scores after bias and penalties, before a token is drawn."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from penstock.engine.sampling.draw import SamplingParams
from penstock.engine.sampling.shares import CHUNK_SCORES

_BITS = torch.arange(256)[:, None] >> torch.arange(8) & 1
_MAXIMA_BY_BYTE = torch.where(_BITS == 1, torch.inf, -torch.inf)
"""By a byte of a mask, what the scores of its 8 tokens may be at most: [256, 8]."""


def has_mask(draw: SamplingParams) -> bool:
    """Return whether `mask_scores` changes the row of these parameters."""
    return draw.allowed is not None or bool(draw.forbidden_token_ids)


def mask_scores(scores: Tensor, draws: Sequence[SamplingParams]) -> None:
    """Set the scores of tokens that may not follow to minus infinity, in place, in the rows that have a mask.

    Where everything that a grammar allows would end the answer before `min_tokens` tokens, the grammar decides.
    `scores` is [rows, vocabulary], float32.
    """
    size = scores.shape[1]
    masks: dict[int, NDArray[np.int32]] = {}
    for row, draw in enumerate(draws):
        forbidden = [token for token in draw.forbidden_token_ids if token < size]
        if draw.allowed is not None:
            masks[row] = _remove_tokens(draw.allowed, forbidden) if forbidden else draw.allowed
        elif forbidden:
            scores[row, torch.tensor(forbidden, device=scores.device)] = -torch.inf
    if not masks:
        return
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(scores.device).int()
    maxima_by_byte = _MAXIMA_BY_BYTE.to(scores.device)
    rows, step = list(masks), max(1, CHUNK_SCORES // size)
    for begin in range(0, len(rows), step):
        chunk = rows[begin : begin + step]
        # Filling by booleans takes ten times as long where allowed and forbidden tokens alternate, because it branches.
        maxima = embedding(packed[begin : begin + step], maxima_by_byte).flatten(1)[:, :size]
        if chunk == list(range(chunk[0], chunk[0] + len(chunk))):
            part = scores[chunk[0] : chunk[0] + len(chunk)]
            torch.minimum(part, maxima, out=part)
        else:
            scores[chunk] = torch.minimum(scores[chunk], maxima)


def _remove_tokens(mask: NDArray[np.int32], token_ids: Collection[int]) -> NDArray[np.int32]:
    """Return the mask without these tokens, or the mask itself if nothing would be left."""
    others = mask.copy()
    words = others.view(np.uint32)
    for token in token_ids:
        words[token // 32] &= ~np.uint32(1 << token % 32)
    return others if words.any() else mask
