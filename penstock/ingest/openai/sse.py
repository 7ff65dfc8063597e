"""Where a reader of a stream is: the ids of its server-sent events; and what they say.

An id holds a place for each choice, with commas between them, since their tokens arrive in any order:

    (nothing)      nothing of this choice was sent
    s1, s2, …      so many pieces before its first token
    12-9f3c…       everything up to this token (`names.event_id`)
    e1, e2, …      so many pieces after its last token

Then `done`: nothing is left. Whoever comes back with an id gets every piece after it. The usage before it has no id:
LiteLLM takes a chunk that comes after the finish reason for no usage if there is a line before its data. So whoever
comes back with the last choice's end gets the usage, again where it was lost after it.
"""

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.errors import InvalidName, StreamDiverged
from penstock.ingest.errors import ApiError
from penstock.messages import EndEvent, TokenEvent
from penstock.names import parse_event_id

NO_POSITION, DONE_ID = "", "done"
_STEP_PATTERN = re.compile(r"([se])([1-9])")


class SseEvent(NamedTuple):
    """One server-sent event: what it says, and the place of its choice (or of all) after it, or `NO_PLACE`."""

    position: str
    data: str
    """JSON, or `[DONE]`."""
    event: str | None = None


encode_json = json.JSONEncoder(separators=(",", ":")).encode
PLACEHOLDER = uuid.uuid4().hex
"""Stands in a `Form` where something is to be filled in; nothing that a client sends has it."""


class JsonTemplate:
    """JSON of which most is known before: a stream says the same around each of its tokens."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Some of its values are `HOLE`."""
        self._parts = encode_json(data).split(f'"{PLACEHOLDER}"')

    def fill_in(self, *values: str | int) -> str:
        """The whole, with a value for each hole."""
        text = self._parts[0]
        for value, part in zip(values, self._parts[1:], strict=True):
            text += (encode_json(value) if isinstance(value, str) else str(value)) + part
        return text


class ResumePoint:
    """The places of a stream's choices: those a reader has seen, and how far what is sent has come."""

    def __init__(self, num_choices: int, last_event_id: str | None = None) -> None:
        """Raises `ApiError` 400 for what cannot be an id of such a stream."""
        text = last_event_id or "," * (num_choices - 1)
        self.is_over = text == DONE_ID
        self._seen = ["e9"] * num_choices if self.is_over else text.split(",")
        if len(self._seen) != num_choices:
            raise _invalid_event_id(text)
        self._ranks = [_parse_position(position, text) for position in self._seen]
        self._current = list(self._seen)
        """Never before what was seen: ids of one choice's pieces do not take another choice back."""
        self._is_past = [False] * num_choices
        """Whether what was seen of a choice lies behind: all that comes is new then."""

    @property
    def started_choices(self) -> list[int]:
        """The choices of which the reader has seen a token or the end: of these there was a log."""
        return [index for index, order in enumerate(self._ranks) if order[0] > 0]

    def check_token(self, index: int, event: TokenEvent) -> None:
        """A token of a choice was read. Raises `StreamDiverged` if the reader has seen another one in its place."""
        kind, position = self._ranks[index]
        if (
            kind == 1
            and not self._is_past[index]
            and parse_event_id(event.id)[0] == position
            and event.id != self._seen[index]
        ):
            raise StreamDiverged(f"token {position} is another one than was seen")
        self._advance_choice(index, event.id)

    def check_end(self, index: int, event: EndEvent) -> None:
        """The end of a choice was read. Raises as `token`."""
        kind, position = self._ranks[index]
        if kind == 1 and event.usage.completion_tokens <= position:
            raise StreamDiverged(f"the stream ended before token {position}, which was seen")

    def advance_past(self, index: int, event: SseEvent) -> str | None:
        """The id of a choice's piece; None where the reader has it."""
        return ",".join(self._current) if self._advance_choice(index, event.position) else None

    def _advance_choice(self, index: int, position: str) -> bool:
        """Whether the place is past what the reader has seen. A choice's places come in their order."""
        if not self._is_past[index]:
            self._is_past[index] = _parse_position(position, "") > self._ranks[index]
        if self._is_past[index]:
            self._current[index] = position
        return self._is_past[index]


def _parse_position(position: str, text: str) -> tuple[int, int]:
    if not position:
        return (-1, 0)
    if match := _STEP_PATTERN.fullmatch(position):
        return (0 if match[1] == "s" else 2, int(match[2]))
    try:
        return (1, parse_event_id(position)[0])
    except InvalidName:
        raise _invalid_event_id(text) from None


def _invalid_event_id(text: str) -> ApiError:
    message = f"{text[:200]!r} is not the id of an event of this stream"
    return ApiError(400, message, param="last_event_id", code="invalid_event_id")
