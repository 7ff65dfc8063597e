"""Emitting: the tokens of one step go to their logs while the next step is computed."""

from collections.abc import Sequence

from penstock.messages import TokenEvent
from penstock.record import AppendOutcome, Claim, Record


class Emitter:
    """One batch of appends under way at a time, in one round trip.

    `send` returns at once; `collect` waits for the answers to what was sent last. A request that was lost or cancelled
    is therefore noticed one step late, and that step's token for it is refused by the record's fence.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._sent: list[tuple[Claim, TokenEvent]] = []

    def send(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Put the tokens on their way. `collect` must have been called since the last `send`."""
        assert not self._sent
        self._sent = list(entries)
        if self._sent:
            self._record.send_append(self._sent)

    def collect(self) -> list[tuple[Claim, AppendOutcome]]:
        """What became of the tokens sent last."""
        if not self._sent:
            return []
        outcomes = self._record.collect()
        sent, self._sent = self._sent, []
        return [(claim, outcome) for (claim, _), outcome in zip(sent, outcomes, strict=True)]
