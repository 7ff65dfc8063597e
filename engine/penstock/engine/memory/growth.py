"""How many blocks running answers will need, as far as those before them tell. Plain Python.

An answer is taken to end after each of its tokens with the same probability `rate`, the share of tokens behind which
one ended lately, and in any case after `max_new_tokens`. So of blocks that sequences hold now, after `tokens` more of
each

    exp(-rate * tokens) * (blocks held now + tokens / block size)

are expected to be held, summed over the sequences that may get so many. They need the maximum over all `tokens`.
"""

import math
from collections.abc import Iterable

WINDOW_TOKENS = 2**16
"""A count loses half of its weight at least once in so many generated tokens."""
FIRST_TOKENS, FIRST_ENDS = 512.0, 1.0
"""Tokens and ends that are counted from the start, so that the first answers are not expected to be endless."""


class GrowthEstimate:
    """Counts generated tokens and early ends of answers, and expects the same of those that run."""

    def __init__(self) -> None:
        self._num_tokens = self._num_ends = 0.0

    def record_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._num_tokens += count
        if self._num_tokens >= 2 * WINDOW_TOKENS:
            self._num_tokens, self._num_ends = self._num_tokens / 2, self._num_ends / 2

    def record_end(self) -> None:
        """Count an answer that ended before it had all the tokens that it might have got."""
        self._num_ends += 1

    def estimate_peak_blocks(self, answers: Iterable[tuple[int, int]], block_size: int) -> float:
        """Return how many blocks answers hold together when they hold the most.

        For each answer the number of tokens that it may still get, and the blocks that it holds now.
        """
        rate = (self._num_ends + FIRST_ENDS) / (self._num_tokens + FIRST_TOKENS)
        ordered = sorted(answers, reverse=True)
        peak = sum_held = 0.0
        for number, (num_left, num_held) in enumerate(ordered, 1):
            sum_held += num_held
            # Where only these answers may go on, the sum has one maximum, and it may lie outside.
            num_next = ordered[number][0] if number < len(ordered) else 0
            tokens = min(max(1 / rate - sum_held / number * block_size, num_next), num_left)
            peak = max(peak, math.exp(-rate * tokens) * (sum_held + number * tokens / block_size))
        return peak
