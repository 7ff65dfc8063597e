"""Logit bias and penalties, applied to the scores before a token is drawn."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sampling.draw import SamplingParams

Entries = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Tokens of a row, none twice, and an amount for each."""


def apply_penalties(scores: Tensor, draws: Sequence[SamplingParams]) -> None:
    """Change `scores` [rows, vocabulary], float32, in place: bias, repetition, presence, frequency.

    Repetition looks at prompt and output and makes scores r times worse: divided where positive, multiplied where
    negative (Keskar et al., CTRL, 2019). Presence and frequency count the output: a token that occurs n times loses
    presence + n * frequency. The native sampler does the same.
    """
    for find_entries, change in (
        (_find_biases, torch.add), (_find_repetitions, _penalize_repetition), (_find_occurrences, torch.sub)
    ):  # fmt: skip
        _change_scores(scores, [find_entries(draw) for draw in draws], change)


def _find_biases(draw: SamplingParams) -> Entries:
    bias = draw.sampling.logit_bias
    return np.array([*bias], np.int64), np.array([*bias.values()], np.float64)


def _find_repetitions(draw: SamplingParams) -> Entries:
    if draw.counts is None or draw.sampling.repetition_penalty == 1:
        return np.empty(0, np.int64), np.empty(0)
    return draw.counts.token_ids, np.full(len(draw.counts.token_ids), draw.sampling.repetition_penalty)


def _find_occurrences(draw: SamplingParams) -> Entries:
    sampling = draw.sampling
    if draw.counts is None or not (sampling.presence_penalty or sampling.frequency_penalty):
        return np.empty(0, np.int64), np.empty(0)
    counts = draw.counts.output_counts
    occurs = counts > 0
    lost = sampling.presence_penalty + counts[occurs].astype(np.float64) * sampling.frequency_penalty
    return draw.counts.token_ids[occurs], lost


def _penalize_repetition(scores: Tensor, factors: Tensor) -> Tensor:
    return torch.where(scores > 0, scores / factors, scores * factors)


def _change_scores(scores: Tensor, found: Sequence[Entries], change: Callable[[Tensor, Tensor], Tensor]) -> None:
    lengths = [len(tokens) for tokens, _ in found]
    if not any(lengths):
        return
    rows = torch.from_numpy(np.repeat(np.arange(len(found)), lengths)).to(scores.device)
    tokens = torch.from_numpy(np.concatenate([tokens for tokens, _ in found])).to(scores.device)
    amounts = torch.from_numpy(np.concatenate([amounts for _, amounts in found]).astype(np.float32)).to(scores.device)
    scores[rows, tokens] = change(scores[rows, tokens], amounts)
