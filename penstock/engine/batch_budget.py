"""What batch sequences may add to a step that interactive ones take part in.

Beside interactive sequences, batch ones are given rows and prompt tokens, the first in order first, only as long as

    seconds of what batch adds <= SHARE * seconds of the step without it

by the step's measured cost (`cost`); the others pause, with their blocks, and go on when interactive work leaves. Every
`PATIENCE` steps the share is all of it instead, so that the step may take twice as long, and something of batch takes
part whatever it costs: batch work never stands still, and 99 of 100 steps are well within the share. A step in which
nothing interactive takes part knows no share.
"""

import math
from collections.abc import Iterable

from penstock.engine.cost import StepCost
from penstock.engine.sequence import Sequence, State

MAX_BATCH_SHARE = 0.1
FORCED_BATCH_STEPS = 256


class BatchBudget:
    """The books of one step. Without a cost, nothing is known of steps and all is allowed."""

    def __init__(self, cost: StepCost | None, running: Iterable[Sequence], *, is_patient: bool = True) -> None:
        """Of `running`, the interactive ones that decode count from the start. `is_patient`: not one in `PATIENCE`."""
        self._cost, self._is_patient = cost, is_patient
        self._seconds_by_sequence: dict[Sequence, float] = {}
        self._interactive_s = cost.fixed_s if cost else 0.0
        """Of the step without batch."""
        self._batch_s, self._num_batch, self._num_interactive = 0.0, 0, 0
        self._has_chunk = False
        for seq in running:
            if seq.klass == "interactive" and seq.num_pending_tokens == 1 and seq.state is State.RUNNING:
                self.add_sequence(seq, 1)

    def limit_tokens(self, seq: Sequence, num_tokens: int) -> int:
        """How many of `num_tokens` tokens the sequence may have in the step."""
        cost = self._cost
        if cost is None or seq.klass == "interactive" or not self._num_interactive:
            return num_tokens
        least = 1 if self._is_forced else 0
        if seq.num_pending_tokens == 1:
            return 1 if cost.row_seconds(seq) <= self._left_s else least
        chunk_s = cost.chunk_s if self._is_patient and not self._has_chunk else 0.0
        most = (self._left_s - chunk_s) / max(cost.token_seconds(seq), 1e-12)
        return min(num_tokens, max(least, math.floor(most)))

    @property
    def can_admit(self) -> bool:
        """Whether one more batch sequence might get something."""
        cost = self._cost
        return (
            cost is None
            or not self._num_interactive
            or self._is_forced
            or self._left_s >= min(cost.row_s, cost.token_s)
        )

    def count_affordable_rows(self) -> float:
        """How many batch sequences of no length would decode beside what is there."""
        if self._cost is None or not self._num_interactive:
            return math.inf
        return self._left_s / max(self._cost.row_s + self._cost.known_outside_s, 1e-12)

    def add_sequence(self, seq: Sequence, num_tokens: int) -> None:
        """The sequence has so many tokens in the step. What counted from the start does not count twice."""
        if self._cost is None or seq in self._seconds_by_sequence:
            return
        is_chunk = seq.num_pending_tokens > 1
        chunk_s = self._cost.chunk_s if is_chunk and not self._has_chunk else 0.0
        self._has_chunk = self._has_chunk or is_chunk
        self._seconds_by_sequence[seq] = price = self._cost.estimate_seconds(seq, num_tokens) + chunk_s
        self._add_seconds(seq, price, 1)

    def remove_sequence(self, seq: Sequence) -> None:
        """It was preempted, and takes no part."""
        if seq in self._seconds_by_sequence:
            self._add_seconds(seq, -self._seconds_by_sequence.pop(seq), -1)

    def _add_seconds(self, seq: Sequence, price: float, number: int) -> None:
        if seq.klass == "interactive":
            self._interactive_s += price
            self._num_interactive += number
        else:
            self._batch_s += price
            self._num_batch += number

    @property
    def _left_s(self) -> float:
        return (MAX_BATCH_SHARE if self._is_patient else 1.0) * self._interactive_s - self._batch_s

    @property
    def _is_forced(self) -> bool:
        return not self._is_patient and not self._num_batch
