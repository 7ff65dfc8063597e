"""The masks of grammars, applied to the scores after bias and penalties, before a token is drawn."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.sampling.draw import SamplingParams


def mask_scores(scores: Tensor, draws: Sequence[SamplingParams]) -> None:
    """Set the scores of tokens that may not follow to minus infinity, in place, in the rows that have a mask.

    `scores` is [rows, vocabulary], float32.
    """
    for row, draw in enumerate(draws):
        if draw.allowed is not None:
            is_allowed = np.unpackbits(draw.allowed.view(np.uint8), bitorder="little", count=scores.shape[1])
            scores[row].masked_fill_(torch.from_numpy(is_allowed == 0).to(scores.device), -torch.inf)
