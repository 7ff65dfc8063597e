"""The masks of grammars and `min_tokens`: what may not follow has a score of minus infinity."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from penstock.engine.sampling.draw import SamplingParams

_BITS = torch.arange(256)[:, None] >> torch.arange(8) & 1
_MAXIMA_BY_BYTE = torch.where(_BITS == 1, torch.inf, -torch.inf)
"""By a byte of a mask, what the scores of its 8 tokens may be at most: [256, 8]."""


def find_masks(draws: Sequence[SamplingParams], size: int) -> tuple[list[NDArray[np.int32] | None], list[list[int]]]:
    """Return the mask of each row, and the tokens that may not follow where it has none.

    Where everything that a grammar allows would end the answer before `min_tokens` tokens, the grammar decides. `size`
    is that of the vocabulary.
    """
    forbidden = [[token for token in draw.forbidden_token_ids if token < size] for draw in draws]
    masks = [
        _remove_tokens(draw.allowed, tokens) if draw.allowed is not None and tokens else draw.allowed
        for draw, tokens in zip(draws, forbidden, strict=True)
    ]
    return masks, [[] if mask is not None else tokens for mask, tokens in zip(masks, forbidden, strict=True)]


def make_scores(logits: Tensor, draws: Sequence[SamplingParams]) -> Tensor:
    """Return logits [rows, vocabulary] as new scores in float32, minus infinity where a token may not follow."""
    masks, forbidden = find_masks(draws, logits.shape[1])
    scores = logits.to(torch.float32, copy=True)
    _mask_rows(scores, {row: mask for row, mask in enumerate(masks) if mask is not None})
    for row, tokens in enumerate(forbidden):
        if tokens:
            scores[row, torch.tensor(tokens, device=scores.device)] = -torch.inf
    return scores


def _mask_rows(scores: Tensor, masks: dict[int, NDArray[np.int32]]) -> None:
    if not masks:
        return
    rows = list(masks)
    packed = torch.from_numpy(np.stack(list(masks.values())).view(np.uint8)).to(scores.device).int()
    # Filling by booleans takes ten times as long where allowed and forbidden tokens alternate, because it branches.
    maxima = embedding(packed, _MAXIMA_BY_BYTE.to(scores.device)).flatten(1)[:, : scores.shape[1]]
    scores[rows] = torch.minimum(scores[rows], maxima)


def _remove_tokens(mask: NDArray[np.int32], token_ids: Collection[int]) -> NDArray[np.int32]:
    """Return the mask without these tokens, or the mask itself if nothing would be left."""
    others = mask.copy()
    words = others.view(np.uint32)
    for token in token_ids:
        words[token // 32] &= ~np.uint32(1 << token % 32)
    return others if words.any() else mask
