"""The events of a stream that its reader has not seen yet, with their ids."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.client.core import Event
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta
from penstock.ingest.openai.sse import ResumePoint, SseEvent
from penstock.ingest.openai.tokens import sum_usage
from penstock.messages import EndEvent, Usage


class SentEvent(NamedTuple):
    """An event and its id, which is empty if it has none."""

    id: str
    event: SseEvent


class SseCursor:
    """Turns all events of a stream, in any order of its choices, into those that are new to the reader."""

    def __init__(
        self, endpoint: ApiEndpoint[Any], meta: StreamMeta, resume_point: ResumePoint, after_number: int = -1
    ) -> None:
        """Return also no event whose sequence number is at most `after_number`."""
        self._after_number = after_number
        self._chunks, self._resume_point = endpoint.make_chunks(meta), resume_point
        self._num_choices = len(meta.request_ids)
        self._usages: dict[int, Usage] = {}

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended."""
        return len(self._usages) == self._num_choices

    @property
    def usage(self) -> Usage:
        """The usage of the choices that have ended."""
        return sum_usage(self._usages.values())

    def open_stream(self) -> list[SentEvent]:
        """Return what comes before all tokens."""
        return [
            sent
            for index in range(self._num_choices)
            for sent in self._select_new(index, self._chunks.open_choice(index))
        ]

    def add_event(self, index: int, event: Event) -> list[SentEvent]:
        """Return what an event of a choice adds. Raises the error that it ends with, and `StreamDiverged`."""
        if not isinstance(event, EndEvent):
            self._resume_point.check_token(index, event)
            sent = self._select_new(index, self._chunks.add_token(index, event))
            self._resume_point.advance_past(index, event.id)
            return sent
        self._usages[index] = event.usage
        if event.error is not None:
            raise event.error.to_exception()
        self._resume_point.check_end(index, event)
        return self._select_new(index, self._chunks.end_choice(index, event))

    def end_stream(self) -> list[SentEvent]:
        """Return what comes after the ends of all choices."""
        return [SentEvent(event.position, event) for event in self._chunks.end_stream() if self._is_later(event)]

    def _select_new(self, index: int, events: Sequence[SseEvent]) -> list[SentEvent]:
        return [
            SentEvent(event_id, event)
            for event in events
            if (event_id := self._resume_point.advance_past(index, event.position)) is not None
            and self._is_later(event)
        ]

    def _is_later(self, event: SseEvent) -> bool:
        return event.number is None or event.number > self._after_number
