"""How often each token occurs in a sequence: what penalties read."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_MIN_SPARE = 256
"""The least number of further tokens that there is room for after the arrays have grown."""


class TokenCounts:
    """The different tokens of a sequence, and how often each is in its output. It grows with each output token."""

    def __init__(self, prompt: Iterable[int], output: Sequence[int] = ()) -> None:
        self._prompt_ids = np.unique(np.fromiter(prompt, np.int64))
        """The different tokens of the prompt, in order: the first of all ids."""
        self._places: dict[int, int] = {}
        """By token that the prompt does not have: where it is among all ids."""
        self._num = len(self._prompt_ids)
        self._ids = np.concatenate([self._prompt_ids, np.zeros(_MIN_SPARE, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)
        self.add_output(output)

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Every token of the prompt and the output, once."""
        return self._ids[: self._num]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """How often each of `token_ids` is in the output."""
        return self._counts[: self._num]

    def add_output(self, token_ids: Iterable[int]) -> None:
        """Count further output tokens."""
        for token_id in token_ids:
            place = int(self._prompt_ids.searchsorted(token_id))
            if place == len(self._prompt_ids) or self._prompt_ids[place] != token_id:
                place = self._places.setdefault(token_id, self._num)
            if place == self._num:
                self._append_id(token_id)
            self._counts[place] += 1

    def _append_id(self, token_id: int) -> None:
        if self._num == len(self._ids):
            spare = np.zeros(max(_MIN_SPARE, self._num), np.int64)
            self._ids, self._counts = np.concatenate([self._ids, spare]), np.concatenate([self._counts, spare])
        self._ids[self._num] = token_id
        self._num += 1

    def copy_with(self, token_ids: Iterable[int]) -> "TokenCounts":
        """Return the counts of a sequence that has these output tokens, too."""
        other = TokenCounts(())
        other._prompt_ids, other._num = self._prompt_ids, self._num
        other._places, other._ids, other._counts = self._places.copy(), self._ids.copy(), self._counts.copy()
        other.add_output(token_ids)
        return other
