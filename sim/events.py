"""A reader of server-sent events, as a browser is one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class ServerSentEvent:
    """One event, as a browser would see it."""

    id: str = ""
    event: str = "message"
    data: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """Its data, a JSON object."""
        found = json.loads(self.data)
        assert isinstance(found, dict)
        return found

    @property
    def text(self) -> str:
        """What it adds to the answer, of a completion."""
        return "" if self.data == "[DONE]" else "".join(choice["text"] for choice in self.body["choices"])


@dataclass
class EventSource:
    """A browser's side of server-sent events: it remembers the last id, and comes back with it.

    https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    url: str
    last_event_id: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    answer_headers: httpx.Headers = field(default_factory=httpx.Headers)
    retry_ms: int = 3000
    silence_s: float | None = None
    """How long a connection may be silent; None for ever."""

    def connect(self, body: dict[str, Any] | None = None) -> Iterator[ServerSentEvent]:
        """Yield one connection's events; with a `body` a POST. Raises `httpx.TransportError` where it breaks."""
        headers = self.headers | ({"Last-Event-ID": self.last_event_id} if self.last_event_id else {})
        method = "GET" if body is None else "POST"
        with httpx.stream(method, self.url, json=body, headers=headers, timeout=self.silence_s) as answer:
            self.status, self.answer_headers = answer.status_code, answer.headers
            if answer.status_code == 200:
                yield from self._parse_events(answer)

    def _parse_events(self, answer: httpx.Response) -> Iterator[ServerSentEvent]:
        event, rest = ServerSentEvent(), b""
        for piece in answer.iter_bytes():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                name, _, value = line.decode().partition(": ")
                if not name:
                    # Not before: a connection may break within an event.
                    self.last_event_id = event.id or self.last_event_id
                    if event.data:
                        yield event
                    event = ServerSentEvent()
                elif name == "id":
                    event.id = value
                elif name == "event":
                    event.event = value
                elif name == "data":
                    event.data += value
                elif name == "retry":
                    self.retry_ms = int(value)
