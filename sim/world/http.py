"""A client of gateways: it asks, reads on at any gateway where its connection is lost, and tells what it saw."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.names import parse_event_id
from sim.chaos.checker import Entry
from sim.world.gateways import Connection, Gateways, parse_frames, read_error
from sim.world.runtime import World

PATIENCE_S = 60.0
"""How long a client waits for the next bytes before it tries another gateway."""
PAUSES_S = (0.2, 2.0)
PASSING_CODES = ("unavailable", "gateway_stopping", "timeout", "overloaded")
"""Errors after which a client tries again."""


@dataclass(eq=False)
class HttpClient:
    """A client with one request."""

    world: World
    gateways: Gateways
    chance: random.Random
    note: Callable[[Entry], None]
    note_accepted: Callable[[str], None]
    fail: Callable[[str], None]
    max_tokens: int
    may_cancel: bool = False
    """Whether it cancels its request in the middle."""
    id: str = ""
    """The id of the answer, when it was told."""
    _last: str = ""
    """The id of the last event."""
    _position: int = -1
    """The position of the last token."""
    _text: str = ""
    _finish: str | None = None
    _count: int | None = None

    def ask(self, body: dict[str, Any], key: str | None) -> None:
        """Send a request until it is accepted, under a key if there is one, and read the answer to its end."""
        headers = {} if key is None else {"idempotency-key": key}
        while True:
            connection = self._connect("POST", "/v1/completions", headers, json.dumps(body).encode())
            start = None if connection is None else connection.read_start(PATIENCE_S)
            if connection is None or start is None:
                self._rest()
                continue
            status, told = start
            if status == 200:
                self.id = told["x-request-id"]
                self.note_accepted(self.id)
                if body["stream"]:
                    self._read_stream(connection)
                    return
            content = self._read_whole(connection)
            if content is None or (status != 200 and self._is_passing(status, content)):
                self._rest()
                continue
            if status != 200:
                self.fail(f"a gateway answers {status}: {content.decode()[:200]}")
                return
            answer = json.loads(content)
            self._text, self._finish = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
            self._count = answer["usage"]["completion_tokens"]
            self._note_end()
            return

    def cancel(self) -> None:
        """Cancel the request, at any gateway."""
        while True:
            connection = self._connect("DELETE", f"/v1/streams/{self.id}", {})
            start = None if connection is None else connection.read_start(PATIENCE_S)
            if start is not None and start[0] == 200:
                return
            self._rest()

    def _is_passing(self, status: int, content: bytes) -> bool:
        return status in (429, 503) and read_error(content) in PASSING_CODES

    def _connect(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Connection | None:
        return self.gateways.connect(self.chance.choice(self.gateways.places), method, path, headers, body)

    def _rest(self) -> None:
        self.world.sleep(self.chance.uniform(*PAUSES_S))

    def _read_whole(self, connection: Connection) -> bytes | None:
        content = b""
        for chunk in connection.read_chunks(PATIENCE_S):
            if chunk is None:
                return None
            content += chunk
        return content

    def _read_stream(self, connection: Connection | None) -> None:
        """Read the answer to its end, over as many connections as it takes."""
        leave_after = self.chance.randrange(100)
        cancel_after = self.chance.randrange(24) if self.may_cancel else None
        while True:
            if connection is not None and self._read_connection(connection, leave_after):
                return
            leave_after = self.chance.randrange(100)
            self._rest()
            if cancel_after is not None:
                self.cancel()
                cancel_after = None
            headers = {"last-event-id": self._last} if self._last else {}
            connection = self._connect("GET", f"/v1/streams/{self.id}", headers)
            start = None if connection is None else connection.read_start(PATIENCE_S)
            if connection is None or start is None:
                connection = None
            elif start[0] == 204:
                self.fail(f"{self.id}: a stream is over after {self._last!r}, which was not its end")
                return
            elif start[0] != 200:
                content = self._read_whole(connection)
                if content is not None and not self._is_passing(start[0], content):
                    self.note({"what": "failed", "id": self.id, "reader": "http", "error": read_error(content),
                               "story": content.decode()[:200]})  # fmt: skip
                    return
                connection = None

    def _read_connection(self, connection: Connection, leave_after: int) -> bool:
        """Read what comes over a connection. Return whether that was the end; leave after some pieces."""
        buffer = b""
        for chunk in connection.read_chunks(PATIENCE_S):
            if chunk is None:
                connection.leave()
                return False
            events, buffer = parse_frames(buffer + chunk)
            for event in events:
                if event.get("event") == "error":
                    code = json.loads(event["data"])["error"]["code"]
                    if code in PASSING_CODES:
                        return False
                    self._note_end(code)
                    return True
                if self._add_event(event):
                    return True
                leave_after -= 1
                if leave_after < 0:
                    connection.leave()
                    return False
        return False

    def _add_event(self, event: dict[str, str]) -> bool:
        """Add an event; return whether it was the last."""
        if "data" not in event:
            return False
        self._last = event.get("id", self._last)
        if event["data"] == "[DONE]":
            self._note_end()
            return True
        chunk = json.loads(event["data"])
        if chunk["usage"] is not None:
            self._count = chunk["usage"]["completion_tokens"]
            return False
        choice = chunk["choices"][0]
        if "-" in event.get("id", ""):
            position = parse_event_id(self._last)[0]
            if position <= self._position or self._finish is not None:
                self.fail(f"{self.id}: event {self._last} came after that of token {self._position}")
            self._position = position
        self._text += choice["text"]
        self._finish = choice["finish_reason"] or self._finish
        return False

    def _note_end(self, error: str | None = None) -> None:
        if error is None and (self._finish is None or self._count != self.max_tokens):
            self.fail(f"{self.id}: an answer is over with {self._finish} and {self._count} tokens")
        self.note(
            {"what": "end", "id": self.id, "reader": "http", "finish": self._finish, "count": None, "error": error,
             "text": self._text, "calls": []}
        )  # fmt: skip
