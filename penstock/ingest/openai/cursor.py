"""What a reader is still to be told of a stream: its pieces with their ids, after the place it has come to."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.client.core import Event
from penstock.ingest.openai.endpoint import Card, Endpoint
from penstock.ingest.openai.sse import Piece, Places
from penstock.ingest.openai.tokens import total
from penstock.messages import EndEvent, Usage


class Told(NamedTuple):
    """A piece and the id of its event, empty where it has none."""

    id: str
    piece: Piece


class Telling:
    """Told all events from the beginning, in any order of the choices, it tells those that are new to the reader."""

    def __init__(self, endpoint: Endpoint[Any], card: Card, places: Places) -> None:
        self._chunks, self._places = endpoint.chunks(card), places
        self._num_choices = len(card.request_ids)
        self._usages: dict[int, Usage] = {}

    @property
    def has_ended(self) -> bool:
        """Whether all choices have."""
        return len(self._usages) == self._num_choices

    @property
    def usage(self) -> Usage:
        """What the choices that have ended used together."""
        return total(self._usages.values())

    def open(self) -> list[Told]:
        """What comes before all events."""
        return [told for index in range(self._num_choices) for told in self._new(index, self._chunks.open(index))]

    def event(self, index: int, event: Event) -> list[Told]:
        """What the next event of a choice adds. Raises its error if it ends with one, and `StreamDiverged`."""
        if not isinstance(event, EndEvent):
            self._places.token(index, event)
            return self._new(index, self._chunks.token(index, event))
        self._usages[index] = event.usage
        if event.error is not None:
            raise event.error.to_exception()
        self._places.end(index, event)
        return self._new(index, self._chunks.end(index, event))

    def close(self) -> list[Told]:
        """What comes after all events."""
        return [Told(piece.place, piece) for piece in self._chunks.close()]

    def _new(self, index: int, pieces: Sequence[Piece]) -> list[Told]:
        return [Told(at, piece) for piece in pieces if (at := self._places.pass_(index, piece)) is not None]
