"""Bias and penalties: what a request changes in its scores, before anything is drawn. Other tokens are not touched."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.sampling.draw import Draw
from penstock.messages import Sampling


def changes_scores(sampling: Sampling) -> bool:
    """Whether `adjust` does anything to a row of this sampling."""
    penalties = sampling.presence_penalty or sampling.frequency_penalty
    return bool(sampling.logit_bias or penalties or sampling.repetition_penalty != 1)


def adjust(scores: Tensor, draws: Sequence[Draw]) -> None:
    """Change `scores` [rows, vocabulary], float32, in place: bias, repetition, presence, frequency.

    Repetition looks at prompt and output and makes scores r times worse: divided where positive, multiplied where
    negative (Keskar et al., CTRL, 2019). Presence and frequency count the output: what was said n times loses
    presence + n * frequency.
    """
    biased, repeated, said = _Entries(), _Entries(), _Entries()
    for row, draw in enumerate(draws):
        sampling = draw.sampling
        biased.add(row, sampling.logit_bias)
        if sampling.repetition_penalty != 1:
            repeated.add(row, dict.fromkeys(draw.token_ids, sampling.repetition_penalty))
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        if presence or frequency:
            said.add(row, {token: presence + n * frequency for token, n in Counter(draw.output).items()})
    if biased.rows:
        where, amounts = biased.on(scores.device)
        scores[where] += amounts
    if repeated.rows:
        where, factors = repeated.on(scores.device)
        found = scores[where]
        scores[where] = torch.where(found > 0, found / factors, found * factors)
    if said.rows:
        where, amounts = said.on(scores.device)
        scores[where] -= amounts


class _Entries:
    """Amounts by token, for several rows; no token of a row comes twice."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._tokens: list[int] = []
        self._amounts: list[float] = []

    def add(self, row: int, amounts: dict[int, float]) -> None:
        """Take a row's amounts."""
        self.rows += [row] * len(amounts)
        self._tokens += amounts
        self._amounts += amounts.values()

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Rows and tokens, to index the scores with, and what is due there."""
        where = torch.tensor(self.rows, device=device), torch.tensor(self._tokens, device=device)
        return where, torch.tensor(self._amounts, device=device, dtype=torch.float32)
