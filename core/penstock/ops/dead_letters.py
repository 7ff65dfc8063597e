"""Dead letters: the facts about each, and the way in which one becomes a request again.

An id has one result for good, and the result of a dead request is its error. So it is sent again under a new id:
`order-17` as `order-17.retry-1`, then `order-17.retry-2`. How often that was done is kept in Redis. A letter is sent
again in this order:

    1. the message goes to its original topic, under the next id
    2. the number is stored

After a crash after 1 it is sent again with the same id and body, and answered once.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock import names
from penstock.bus.contract import Outgoing
from penstock.errors import DeadLetterError, RequestError
from penstock.messages import Job, Request, decode_message, drop_schema_prefix, extract_request_id, now_s
from penstock.names import MAX_ID_CHARS, STAGES, Pipeline, find_shared_topic
from penstock.sealing import is_sealed, open_message, read_envelope, seal_message

_RETRY_ID = re.compile(r"(?P<base>.+)\.retry-(?P<number>[1-9][0-9]{0,5})")
_OWN_HEADERS = (names.ATTEMPT_HEADER, names.ORIGIN_HEADER, names.REASON_HEADER, names.STACK_HEADER, names.BURIED_HEADER)


@dataclass(frozen=True)
class DeadLetter:
    """One message of the dead-letter topic."""

    message: Outgoing
    id: str
    """The request's id, or `#` and a hash of the message where that has none."""

    @classmethod
    def from_message(cls, message: Outgoing) -> "DeadLetter":
        """Return a message of the dead-letter topic as a letter."""
        found = extract_request_id(message.value, message.key)
        return cls(message, found or "#" + hashlib.sha256(message.value).hexdigest()[:12])

    def get_header(self, name: str) -> str:
        """Return a header's text; empty if there is none."""
        return self.message.headers.get(name, "")

    @property
    def dead_since_s(self) -> float | None:
        """The time at which it became a dead letter, in seconds since the epoch; None if no header has it."""
        text = self.get_header(names.BURIED_HEADER)
        return int(text) / 1000 if text.isascii() and text.isdecimal() and len(text) < 16 else None

    @property
    def base_id(self) -> str:
        """The id of the first attempt."""
        match = _RETRY_ID.fullmatch(self.id)
        return match["base"] if match else self.id

    @property
    def retry_number(self) -> int:
        """The number in its id: how often it was sent again before this attempt."""
        match = _RETRY_ID.fullmatch(self.id)
        return int(match["number"]) if match else 0

    def build_retry(self, pipeline: Pipeline, number: int) -> Outgoing:
        """Return the message for its original topic, as the `number`-th retry, without a deadline that has passed.

        Raises `DeadLetterError` for a message that cannot be sent again, or would be refused again.
        """
        if self.get_header(names.TRUNCATED_HEADER):
            raise DeadLetterError(f"{self.id} is only the beginning of its message: it has to be sent anew")
        origin = self.get_header(names.ORIGIN_HEADER)
        shared = find_shared_topic(origin)
        stage = next((stage for stage in STAGES if shared in pipeline.input_topics(stage).values()), None)
        if stage is None:
            raise DeadLetterError(f"{self.id} came from {origin or 'nowhere'!r}, which is no topic of requests or jobs")
        body: dict[str, Any] = _parse_body(self)
        body["id"] = _make_retry_id(self.base_id, number)
        deadline = body.get("deadline")
        if isinstance(deadline, int | float) and deadline < now_s():
            del body["deadline"]
        if stage == "decode":  # a job settles the one request it is bound to
            body["job"] = uuid.uuid4().hex
        value = json.dumps(body, ensure_ascii=False).encode()
        try:
            if stage == "prefill":
                request = decode_message(Request, value)
                value = seal_message("request", request.tenant, request.id, value, {"v": request.v})
            else:
                job = decode_message(Job, value)
                value = seal_message("job", job.tenant, job.id, value, {"v": job.v, "job": job.job})
        except RequestError as error:
            raise DeadLetterError(f"{self.id} would be refused again: {error.code}: {error}") from None
        left_out = {*_OWN_HEADERS, *([] if "deadline" in body else [names.DEADLINE_HEADER])}
        headers = {
            name: text
            for name, text in self.message.headers.items()
            if name not in left_out and not name.startswith(names.CONNECT_PREFIX)
        }
        return Outgoing(origin, value, body["id"], headers)


def _parse_body(letter: DeadLetter) -> dict[str, Any]:
    value = drop_schema_prefix(letter.message.value)
    try:
        if is_sealed(value):
            envelope = read_envelope(value)
            value = open_message(envelope, envelope["kind"])
        body = json.loads(value)
    except RequestError as error:
        raise DeadLetterError(f"{letter.id} cannot be sent again: {error.code}: {error}") from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or letter.id.startswith("#"):
        raise DeadLetterError(f"{letter.id} is not a message with an id: the sender has to send it again")
    return body


def _make_retry_id(base: str, number: int) -> str:
    """Return the id of a retry. An id that gets too long is cut, and a hash of it added."""
    suffix = f".retry-{number}"
    if len(base) + len(suffix) > MAX_ID_CHARS:
        digest = hashlib.sha256(base.encode()).hexdigest()[:12]
        base = f"{base[: MAX_ID_CHARS - len(suffix) - len(digest) - 1]}.{digest}"
    return base + suffix


def keep_newest(letters: Iterable[DeadLetter]) -> list[DeadLetter]:
    """Return the last letter of each id, the oldest first."""
    last = {letter.id: letter for letter in sort_by_age(letters)}
    return sort_by_age(last.values())


def sort_by_age(letters: Iterable[DeadLetter]) -> list[DeadLetter]:
    """Return the letters, the oldest first. Letters of unknown age come before all others."""
    return sorted(letters, key=lambda letter: letter.dead_since_s or 0.0)
