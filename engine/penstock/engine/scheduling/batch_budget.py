"""How much time batch sequences may add to a step that interactive sequences take part in.

Batch sequences get rows and prompt tokens, in scheduling order, as long as

    seconds that batch work adds <= MAX_BATCH_SHARE * seconds of the step without it

by the measured cost of steps (`cost`). The others pause, keep their blocks, and go on when interactive work ends. In
every `FORCED_BATCH_PERIOD_STEPS`th step the share is 1, so the step may take twice as long, and at least one batch
sequence takes part whatever it costs. So batch work never stands still, and 99 of 100 steps are well within the share.
A step without interactive sequences has no limit.
"""

import math
from collections.abc import Iterable

from penstock.engine.scheduling.cost import StepCost
from penstock.engine.sequence import Sequence, State

MAX_BATCH_SHARE = 0.1
FORCED_BATCH_PERIOD_STEPS = 256


class BatchBudget:
    """The seconds of interactive and batch work in one step. Without a measured cost nothing is limited."""

    def __init__(self, cost: StepCost | None, running: Iterable[Sequence], *, is_share_limited: bool = True) -> None:
        """Count the decoding interactive sequences among `running`.

        `is_share_limited` is false in one of `FORCED_BATCH_PERIOD_STEPS` steps.
        """
        self._cost, self._is_share_limited = cost, is_share_limited
        self._seconds_by_sequence: dict[Sequence, float] = {}
        self._interactive_s = cost.fixed_s if cost else 0.0
        """Seconds of the step without batch work."""
        self._batch_s, self._num_batch, self._num_interactive = 0.0, 0, 0
        self._has_chunk = False
        for seq in running:
            if seq.priority_class == "interactive" and seq.num_pending_tokens == 1 and seq.state is State.RUNNING:
                self.add_sequence(seq, 1)

    def limit_tokens(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens the sequence may compute in the step."""
        cost = self._cost
        if not num_tokens or cost is None or seq.priority_class == "interactive" or not self._num_interactive:
            return num_tokens
        min_tokens = 1 if self._is_forced else 0
        if seq.num_pending_tokens == 1:
            return 1 if cost.row_seconds(seq) <= self._remaining_s else min_tokens
        chunk_s = cost.chunk_s if self._is_share_limited and not self._has_chunk else 0.0
        max_tokens = cost.count_chunk_tokens(self._remaining_s - chunk_s, seq.num_computed_tokens)
        return min(num_tokens, max(min_tokens, max_tokens))

    @property
    def can_admit(self) -> bool:
        """Whether one more batch sequence might compute something in the step."""
        cost = self._cost
        return (
            cost is None
            or not self._num_interactive
            or self._is_forced
            or self._remaining_s >= min(cost.row_s, cost.token_s)
        )

    def count_affordable_rows(self) -> float:
        """Return how many more batch sequences without context could decode in the step."""
        if self._cost is None or not self._num_interactive:
            return math.inf
        return self._remaining_s / max(self._cost.row_s + self._cost.known_outside_s, 1e-12)

    def add_sequence(self, seq: Sequence, num_tokens: int) -> None:
        """Count `num_tokens` tokens of a sequence, unless the sequence is counted already."""
        if self._cost is None or seq in self._seconds_by_sequence:
            return
        is_chunk = seq.num_pending_tokens > 1
        chunk_s = self._cost.chunk_s if is_chunk and not self._has_chunk else 0.0
        self._has_chunk = self._has_chunk or is_chunk
        self._seconds_by_sequence[seq] = seconds = self._cost.estimate_seconds(seq, num_tokens) + chunk_s
        self._add_seconds(seq, seconds, 1)

    def remove_sequence(self, seq: Sequence) -> None:
        """Take out a sequence that was preempted."""
        if seq in self._seconds_by_sequence:
            self._add_seconds(seq, -self._seconds_by_sequence.pop(seq), -1)

    def _add_seconds(self, seq: Sequence, seconds: float, number: int) -> None:
        if seq.priority_class == "interactive":
            self._interactive_s += seconds
            self._num_interactive += number
        else:
            self._batch_s += seconds
            self._num_batch += number

    @property
    def _remaining_s(self) -> float:
        return (MAX_BATCH_SHARE if self._is_share_limited else 1.0) * self._interactive_s - self._batch_s

    @property
    def _is_forced(self) -> bool:
        return not self._is_share_limited and not self._num_batch
