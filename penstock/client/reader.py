"""Putting a token stream together from two sources: a live channel that may drop events, and the log.

No I/O: whoever drives a `StreamReader` feeds it what arrived, and reads the log when it says so.
"""

from collections.abc import Iterable

from penstock.errors import StreamDiverged
from penstock.messages import EndEvent, TokenEvent
from penstock.names import START_HASH, parse_event_id, roll

Event = TokenEvent | EndEvent
MIN_KEPT_HASHES = 1024
"""At least so many hashes are kept of what was read, to know it again: a long stream costs no more memory."""


class StreamReader:
    """One reader's place in one stream: from the beginning, or after the event id it saw last.

    Every event is given out once, in order. Each token's rolling hash is worked out again, so a stream
    that is not the one read so far raises `StreamDiverged`.
    """

    def __init__(self, after: str | None = None) -> None:
        self.is_behind = True
        """An event is missing, or may be: read the log after position `log_after` and `feed_log` it."""
        self.is_log_missing = False
        """The log last fed lacks what this reader has seen: it expired, or it is being made again."""
        self.has_met = False
        """Something was read here: a log that is missing now was lost with its server, it has not expired."""
        self.end: EndEvent | None = None
        self._first, self._hashes = 0, list[str]()
        if after is not None:
            self._first, rolled = parse_event_id(after)
            self._hashes.append(rolled)

    @property
    def num_tokens(self) -> int:
        """How many tokens this reader is past: the position it needs next."""
        return self._first + len(self._hashes)

    @property
    def log_after(self) -> int:
        """Where to read the log from: the last token seen comes first, as a proof that it is the same log."""
        return max(self.num_tokens - 2, -1)

    def should_give_up(self, *, is_last: bool) -> bool:
        """Whether a log that is missing is waited for no longer, unless there is a record: one that was met here was
        lost with its server and may be made again, until the patience is over (`is_last`).
        """
        return self.is_log_missing and (is_last or not self.has_met)

    def feed_live(self, event: Event) -> list[Event]:
        """What a live event adds: itself, or nothing. A gap before it sets `is_behind`."""
        self.has_met = True
        place, rolled = self._locate_event(event)
        if place > self.num_tokens:
            self.is_behind = True
            return []
        return self._accept_event(event, place, rolled)

    def feed_log(self, events: Iterable[Event]) -> list[Event]:
        """What a reading of the log after position `log_after` adds."""
        taken: list[Event] = []
        num_events = 0
        for event in events:
            num_events += 1
            place, rolled = self._locate_event(event)
            if place > self.num_tokens:
                raise StreamDiverged(f"the log has a hole after token {self.num_tokens - 1}")
            taken += self._accept_event(event, place, rolled)
        self.is_behind = False
        self.is_log_missing = num_events == 0 and self.num_tokens > 0
        self.has_met = self.has_met or num_events > 0
        return taken

    def _locate_event(self, event: Event) -> tuple[int, str]:
        """How many tokens come before the event, and of a token the rolling hash."""
        return (event.usage.completion_tokens, "") if isinstance(event, EndEvent) else parse_event_id(event.id)

    def _accept_event(self, event: Event, position: int, rolled: str) -> list[Event]:
        """The event if it is the next one, nothing if it was seen; it is not past the next one."""
        if self.end is not None:
            return []
        num_tokens = self.num_tokens
        if isinstance(event, EndEvent):
            if position < num_tokens:
                raise StreamDiverged(f"the stream ended after {position} of the {num_tokens} tokens seen")
            self.end = event
            return [event]
        if position < num_tokens:
            if position >= self._first and rolled != self._hashes[position - self._first]:
                raise StreamDiverged(f"token {position} is another one than was seen")
            return []
        if rolled != roll(self._hashes[-1] if self._hashes else START_HASH, event.token):
            raise StreamDiverged(f"token {position} does not follow what was seen")
        self._hashes.append(rolled)
        if len(self._hashes) == 2 * MIN_KEPT_HASHES:
            del self._hashes[:MIN_KEPT_HASHES]
            self._first += MIN_KEPT_HASHES
        return [event]
