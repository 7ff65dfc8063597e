"""A client of gateways: it asks, reads on at any gateway where its connection is lost, and tells what it saw."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.messages import Request
from penstock.names import parse_event_id
from sim.chaos.checker import Entry
from sim.world.gateways import Connection, Gateways, parse_frames, read_error
from sim.world.runtime import World
from sim.world.ways import Place

PATIENCE_S = 60.0
"""How long a client waits for the next bytes before it tries another gateway."""
PAUSES_S = (0.2, 2.0)
PASSING_CODES = ("unavailable", "gateway_stopping", "timeout", "overloaded", "model_not_found", "region_away")
"""Errors after which a client tries again."""


@dataclass(eq=False)
class HttpClient:
    """A client with one request."""

    world: World
    gateways: Gateways
    chance: random.Random
    note: Callable[[Entry], None]
    note_submitted: Callable[[Request, list[str]], None]
    note_accepted: Callable[[str], None]
    fail: Callable[[str], None]
    is_injected: Callable[[str], bool]
    """Says whether an error of this message comes from an injected exception."""
    id: str = ""
    """The id of the answer, when it was told."""
    num_lost: int = 0
    """How many requests without a key may have been accepted, of which no id was told."""
    _last: str = ""
    """The id of the last event."""
    _position: int = -1
    """The position of the last token."""
    _text: str = ""
    _finish: str | None = None
    _count: int | None = None
    _max_tokens: int = 0

    def ask(self, request: Request, may: list[str], key: str | None) -> None:
        """Send a request until it is accepted, under a key if there is one, and read the answer to its end.

        It is cancelled in the middle where that may be its end.
        """
        self._max_tokens, seed = request.sampling.max_tokens, self.chance.randrange(1000)
        body = make_body(request, seed) | {"service_tier": "flex" if request.priority_class == "batch" else "default"}
        is_streamed = bool(may) or self.chance.random() < 0.7
        if is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {} if key is None else {"idempotency-key": key}
        while True:
            connection = self._connect("POST", "/v1/completions", headers, json.dumps(body).encode())
            start = None if connection is None else connection.read_start(PATIENCE_S)
            self.num_lost += key is None and connection is not None and (start is None or start[0] != 200)
            if connection is None or start is None:
                self._rest()
                continue
            status, told = start
            if status == 200:
                if self.id != told["x-request-id"]:
                    self.id = told["x-request-id"]
                    self.note_submitted(name_request(request, self.id, seed), may)
                    self.note_accepted(self.id)
                if is_streamed:
                    self._read_stream(connection, cancels=bool(may))
                    return
            content = self._read_whole(connection)
            if content is None or (status != 200 and self._is_passing(status, content)):
                self.world.sleep(self.chance.uniform(0.0, 20.0) if status == 404 else 0.0)
                self._rest()
                continue
            if status != 200:
                self.num_lost += key is not None
                if not self.is_injected(json.loads(content)["error"]["message"]):
                    self.fail(f"a gateway answers {status}: {content.decode()[:200]}")
                return
            answer = json.loads(content)
            self._text, self._finish = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
            self._count = answer["usage"]["completion_tokens"]
            self._note_end()
            return

    def fetch(
        self, method: str, path: str, headers: Mapping[str, str] = MappingProxyType({}), body: bytes = b"", *,
        is_there: Callable[[Place], bool] = lambda _: True, is_json: bool = True,
    ) -> Any:  # fmt: skip
        """Return the answer to a request, which is sent to one gateway after the other until one answers it.

        Only a gateway is asked of which `is_there` says that it can be, and that is the same process afterwards.
        """
        while True:
            place = self.chance.choice(self.gateways.places)
            process = place.process
            if is_there(place) and place.process is process:
                connection = self.gateways.connect(place, method, path, headers, body)
                start = None if connection is None else connection.read_start(PATIENCE_S)
                content = None if connection is None or start is None else self._read_whole(connection)
                if start is not None and content is not None and start[0] == 200:
                    return json.loads(content) if is_json else content
                if start is not None and content is not None and not self._is_passing(start[0], content):
                    self.fail(f"{method} {path}: {start[0]} {content.decode()[:200]}")
            self._rest()

    def _is_passing(self, status: int, content: bytes) -> bool:
        return status in (404, 429, 503, 504) and read_error(content) in PASSING_CODES

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

    def _read_stream(self, connection: Connection | None, *, cancels: bool) -> None:
        """Read the answer to its end, over as many connections as it takes."""
        leave_after = self.chance.randrange(24 if cancels else 100)
        while True:
            if connection is not None and self._read_connection(connection, leave_after):
                return
            leave_after = self.chance.randrange(100)
            self._rest()
            if cancels:
                self.fetch("DELETE", f"/v1/streams/{self.id}")
                cancels = False
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
        if error is None and (self._finish is None or self._count != self._max_tokens):
            self.fail(f"{self.id}: an answer is over with {self._finish} and {self._count} tokens")
        self.note(
            {"what": "end", "id": self.id, "reader": "http", "finish": self._finish, "count": None, "error": error,
             "text": self._text, "calls": []}
        )  # fmt: skip


def make_body(request: Request, seed: int) -> dict[str, Any]:
    """Return a request as a body of `/v1/completions`."""
    return {
        "model": "formula", "prompt": request.token_ids, "max_tokens": request.sampling.max_tokens, "temperature": 0,
        "ignore_eos": True, "seed": seed,
    }  # fmt: skip


def name_request(request: Request, request_id: str, seed: int) -> Request:
    """Return the request that a gateway makes of its body."""
    sampling = request.sampling.model_copy(update={"seed": seed})
    return request.model_copy(update={"id": request_id, "sampling": sampling})
