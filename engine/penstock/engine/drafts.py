"""Draft the tokens that may follow, so that one step can give a sequence several.

A draft is a guess. Its tokens are computed in the step of the token before them, and every position is drawn by the
ordinary sampler. The drafted tokens that equal the draws are kept, with the one draw behind them. So a wrong draft
costs time and changes no token.

Guesses come from two places: what followed when the last tokens occurred before in prompt or answer, and what the
grammar forces. Each is compared with the token that comes, also where it was not computed. So the share that is right
is known without computing drafts, and a sequence whose guesses fail costs nothing but the comparison.
"""

from collections.abc import Collection

from penstock.grammar.state import GrammarState

NGRAM_TOKENS = (2, 1)
"""How many of the last tokens are looked for in the tokens before them, the most first."""
MAX_COUNTED_TOKENS = 4
"""Guesses behind this many equal tokens, or more, are right equally often."""
MAX_INDEXED_PROMPT_TOKENS = 4096
"""Tokens at the end of a prompt in which they are looked for."""
FIRST_SHARE_RIGHT, NEWEST_WEIGHT = 0.5, 0.25
"""The share of right guesses before the first one, and what the newest guess counts in it."""


class Drafter:
    """Guesses the next tokens of one sequence by its n-grams, and counts how often guesses were right."""

    def __init__(self, rows: Collection[int] = ()) -> None:
        """`rows` are the ids of tokens that stand for pictures: guesses end before them."""
        self._rows = rows
        self._num_read = 0
        """Leading tokens of the sequence that are indexed and were compared."""
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in NGRAM_TOKENS]
        """For each length of n-grams: the index after the last occurrence of each."""
        self._source, self._num_equal = 0, 0
        """Index of the token that may come once more, and how many tokens before it equal the last ones; 0: none."""
        self._shares_right = [FIRST_SHARE_RIGHT] * (1 + MAX_COUNTED_TOKENS)
        """By the number of equal tokens before: the share of right guesses."""
        self._forced: list[int] = []
        """Tokens that the grammar was found to force next."""
        self._forced_share_right = FIRST_SHARE_RIGHT

    def propose_tokens(
        self, token_ids: list[int], grammar: GrammarState | None, max_tokens: int
    ) -> tuple[list[int], list[float]]:
        """Return up to `max_tokens` tokens that may follow, and how likely it is that each and all before it are right.

        `token_ids` are all tokens of the sequence so far, and `grammar` has been advanced by its output.
        """
        self._read_new_tokens(token_ids)
        draft = self._repeat_tokens(token_ids, max_tokens)
        if grammar is not None:
            draft = draft[: grammar.count_allowed(draft)] if draft else draft
            self._forced = self._forced or grammar.find_forced_tokens()
            forced = self._forced[:max_tokens]
            if forced and draft[: len(forced)] != forced:
                return forced, [self._forced_share_right ** (1 + index) for index in range(len(forced))]
        probability, probabilities = 1.0, []
        for index in range(len(draft)):
            probability *= self._shares_right[min(self._num_equal + index, MAX_COUNTED_TOKENS)]
            probabilities.append(probability)
        return draft, probabilities

    def _read_new_tokens(self, token_ids: list[int]) -> None:
        """Index the tokens that came since the last call, and compare them with the guesses."""
        if not self._num_read:
            self._index_prompt(token_ids)
        for index in range(self._num_read, len(token_ids)):
            token = token_ids[index]
            if self._num_equal:
                is_right, length = token_ids[self._source] == token, min(self._num_equal, MAX_COUNTED_TOKENS)
                self._shares_right[length] += (is_right - self._shares_right[length]) * NEWEST_WEIGHT
                self._source, self._num_equal = (self._source + 1, self._num_equal + 1) if is_right else (0, 0)
            if self._forced:
                is_right = self._forced.pop(0) == token
                self._forced_share_right += (is_right - self._forced_share_right) * NEWEST_WEIGHT
                self._forced = self._forced if is_right else []
            for length, ends in zip(NGRAM_TOKENS, self._ends, strict=True):
                ngram = tuple(token_ids[index + 1 - length : index + 1])
                if self._num_equal < length and (source := ends.get(ngram)) is not None:
                    self._source, self._num_equal = source, length
                ends[ngram] = index + 1
        self._num_read = len(token_ids)

    def _index_prompt(self, token_ids: list[int]) -> None:
        first = max(0, len(token_ids) - MAX_INDEXED_PROMPT_TOKENS)
        self._num_read = max(0, len(token_ids) - 1)  # the last token is read like one that has just come
        known = token_ids[first : self._num_read]
        for length, ends in zip(NGRAM_TOKENS, self._ends, strict=True):
            ngrams = zip(*(known[offset:] for offset in range(length)), strict=False)
            ends.update((ngram, index) for index, ngram in enumerate(ngrams, first + length))

    def _repeat_tokens(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """Return the tokens from the source on, which may run into the draft itself."""
        if not self._num_equal:
            return []
        draft = token_ids[self._source : self._source + max_tokens]
        if (
            self._rows
            and (first := next((at for at, token in enumerate(draft) if token in self._rows), None)) is not None
        ):
            return draft[:first]
        period = len(draft)
        while len(draft) < max_tokens:
            draft.append(draft[len(draft) - period])
        return draft
