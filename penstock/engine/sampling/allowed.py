"""The masks of grammars and `min_tokens`, applied to the scores after bias and penalties, before a token is drawn."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.sampling.draw import SamplingParams


def has_mask(draw: SamplingParams) -> bool:
    """Return whether `mask_scores` changes the row of these parameters."""
    return draw.allowed is not None or bool(draw.forbidden_token_ids)


def mask_scores(scores: Tensor, draws: Sequence[SamplingParams]) -> None:
    """Set the scores of tokens that may not follow to minus infinity, in place, in the rows that have a mask.

    Where everything that a grammar allows would end the answer before `min_tokens` tokens, the grammar decides.
    `scores` is [rows, vocabulary], float32.
    """
    size = scores.shape[1]
    for row, draw in enumerate(draws):
        forbidden = [token for token in draw.forbidden_token_ids if token < size]
        if draw.allowed is not None:
            is_allowed = np.unpackbits(draw.allowed.view(np.uint8), bitorder="little", count=size)
            goes_on = is_allowed.copy()
            goes_on[forbidden] = 0
            is_masked = (goes_on if goes_on.any() else is_allowed) == 0
            scores[row].masked_fill_(torch.from_numpy(is_masked).to(scores.device), -torch.inf)
        elif forbidden:
            scores[row, torch.tensor(forbidden, device=scores.device)] = -torch.inf
