"""Logit bias and penalties, applied to the scores before a token is drawn."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.sampling.draw import SamplingParams
from penstock.messages import Sampling


def changes_scores(sampling: Sampling) -> bool:
    """Return whether `apply_penalties` changes a row of this sampling."""
    penalties = sampling.presence_penalty or sampling.frequency_penalty
    return bool(sampling.logit_bias or penalties or sampling.repetition_penalty != 1)


def apply_penalties(scores: Tensor, draws: Sequence[SamplingParams]) -> None:
    """Change `scores` [rows, vocabulary], float32, in place: bias, repetition, presence, frequency.

    Repetition looks at prompt and output and makes scores r times worse: divided where positive, multiplied where
    negative (Keskar et al., CTRL, 2019). Presence and frequency count the output: a token that occurs n times loses
    presence + n * frequency.
    """
    biased, repeated, penalized = _SparseAmounts(), _SparseAmounts(), _SparseAmounts()
    for row, draw in enumerate(draws):
        sampling = draw.sampling
        biased.add_row(row, sampling.logit_bias)
        if sampling.repetition_penalty != 1:
            repeated.add_row(row, dict.fromkeys(draw.token_ids, sampling.repetition_penalty))
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        if presence or frequency:
            penalized.add_row(
                row, {token: presence + n * frequency for token, n in Counter(draw.output_token_ids).items()}
            )
    if biased.rows:
        where, amounts = biased.to_tensors(scores.device)
        scores[where] += amounts
    if repeated.rows:
        where, factors = repeated.to_tensors(scores.device)
        found = scores[where]
        scores[where] = torch.where(found > 0, found / factors, found * factors)
    if penalized.rows:
        where, amounts = penalized.to_tensors(scores.device)
        scores[where] -= amounts


class _SparseAmounts:
    """Amounts by row and token; no token of a row occurs twice."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._tokens: list[int] = []
        self._amounts: list[float] = []

    def add_row(self, row: int, amounts: dict[int, float]) -> None:
        """Add the amounts of a row."""
        self.rows += [row] * len(amounts)
        self._tokens += amounts
        self._amounts += amounts.values()

    def to_tensors(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the index (rows, tokens) into the scores, and the amounts there."""
        where = torch.tensor(self.rows, device=device), torch.tensor(self._tokens, device=device)
        return where, torch.tensor(self._amounts, device=device, dtype=torch.float32)
