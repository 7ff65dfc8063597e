"""Server-sent events and their ids, which say where a reader of a stream is.

An id has a position for each choice, separated by commas, as the tokens of the choices arrive in any order:

    (empty)        nothing of this choice was sent
    s1, s2, …      this many events before its first token
    12-9f3c….1     this many events of a token that has several, but not its last one
    12-9f3c…       everything up to this token (`names.event_id`)
    e1, e2, …      this many events after its last token

The last id is `done`. A reader that comes back with an id gets every event after it. The usage before `done` has no
id: LiteLLM does not recognize a chunk after the finish reason as usage if there is a line before its data. So a
reader that comes back with the id of the last choice's end gets the usage, possibly again.
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
MAX_STEPS = 99_999
"""The most events of a token, or of an answer's end."""
_STEP_PATTERN = re.compile(r"([se])([1-9][0-9]{0,4})")
_TOKEN_PATTERN = re.compile(r"([^.]+)\.([1-9][0-9]{0,4})")
"""An event of a token that has further ones."""


class SseEvent(NamedTuple):
    """One server-sent event, and the position of its choice (or of all) after it, or `NO_POSITION`."""

    position: str
    data: str
    """JSON, or `[DONE]`."""
    event: str | None = None
    number: int | None = None
    """Its sequence number, where its endpoint has them."""


encode_json = json.JSONEncoder(separators=(",", ":")).encode
PLACEHOLDER = uuid.uuid4().hex
"""Marks a value to be filled in later in a `JsonTemplate`. It is random, so that no client's text contains it."""


class JsonTemplate:
    """JSON of which most is encoded once: a stream repeats the same text around each of its tokens."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Encode `data`, some of whose values are `PLACEHOLDER`."""
        self._parts = encode_json(data).split(f'"{PLACEHOLDER}"')

    def fill_in(self, *values: str | int) -> str:
        """Return the JSON with a value for each placeholder."""
        text = self._parts[0]
        for value, part in zip(values, self._parts[1:], strict=True):
            text += (encode_json(value) if isinstance(value, str) else str(value)) + part
        return text


class ResumePoint:
    """For each choice of a stream, the position that a reader has seen, and the position of what is sent."""

    def __init__(self, num_choices: int, last_event_id: str | None = None) -> None:
        """Parse the id that the reader has seen. Raises `ApiError` 400 if it cannot be an id of such a stream."""
        text = last_event_id or "," * (num_choices - 1)
        self.is_over = text == DONE_ID
        self._seen = [f"e{MAX_STEPS}"] * num_choices if self.is_over else text.split(",")
        if len(self._seen) != num_choices:
            raise _invalid_event_id(text)
        self._ranks = [_parse_position(position, text) for position in self._seen]
        self._current = list(self._seen)
        """Never before what was seen: the ids of one choice's events do not move another choice back."""
        self._is_past = [False] * num_choices
        """For each choice, whether what the reader has seen is behind: everything that follows is new then."""

    @property
    def started_choices(self) -> list[int]:
        """The choices of which the reader has seen a token or the end, so that there was a log of them."""
        return [index for index, order in enumerate(self._ranks) if order[0] > 0]

    def check_token(self, index: int, event: TokenEvent) -> None:
        """Raise `StreamDiverged` if the reader has seen another token of a choice at the position of this one."""
        kind, position, _ = self._ranks[index]
        if (
            kind == 1
            and not self._is_past[index]
            and parse_event_id(event.id)[0] == position
            and event.id != self._seen[index].partition(".")[0]
        ):
            raise StreamDiverged(f"token {position} is another one than was seen")

    def check_end(self, index: int, event: EndEvent) -> None:
        """Note the end of a choice. Raises `StreamDiverged` if the reader has seen a later token."""
        kind, position, _ = self._ranks[index]
        if kind == 1 and event.num_events <= position:
            raise StreamDiverged(f"the stream ended before token {position}, which was seen")

    def advance_past(self, index: int, position: str) -> str | None:
        """Return the id of an event at a position of a choice, or None if the reader has seen it. Positions of a
        choice come in order; the last of a token is the token's, which may have no events.
        """
        if not self._is_past[index]:
            self._is_past[index] = _parse_position(position, "") > self._ranks[index]
        if not self._is_past[index]:
            return None
        self._current[index] = position
        return ",".join(self._current)


def make_token_positions(event_id: str, count: int) -> list[str]:
    """Return the positions after each of `count` events of a token."""
    return [*(f"{event_id}.{number}" for number in range(1, count)), event_id] if count else []


def _parse_position(position: str, text: str) -> tuple[int, int, int]:
    """Return what positions of a choice are ordered by. `text` is the whole id. Raises `ApiError` 400."""
    if not position:
        return (-1, 0, 0)
    if match := _STEP_PATTERN.fullmatch(position):
        return (0 if match[1] == "s" else 2, int(match[2]), 0)
    match = _TOKEN_PATTERN.fullmatch(position)
    try:
        return (1, parse_event_id(match[1] if match else position)[0], int(match[2]) if match else MAX_STEPS + 1)
    except InvalidName:
        raise _invalid_event_id(text) from None


def _invalid_event_id(text: str) -> ApiError:
    message = f"{text[:200]!r} is not the id of an event of this stream"
    return ApiError(400, message, param="last_event_id", code="invalid_event_id")
