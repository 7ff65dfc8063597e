"""One pipeline of real worker processes with a gateway, and the official SDK in front of it."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from sim.forked import ForkedStack

ENVIRONMENT = {
    "PENSTOCK_ENGINE_DTYPE": "float32",
    "PENSTOCK_ENGINE_DEVICE": "cpu",
    "PENSTOCK_ENGINE_POOL_MB": "64",
    "PENSTOCK_BATCH_LOOK_S": "0.2",
    "PENSTOCK_BATCH_LEASE_S": "0.6",
    "PENSTOCK_BATCH_MAX_LINES": "500",
    "PENSTOCK_BATCH_MAX_FILE_BYTES": "300000",
}


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and two decode workers, and a gateway."""
    directory = tmp_path_factory.mktemp("line")
    with ForkedStack(directory, pipeline="door", decode=2, gateway=find_free_port(), environment=ENVIRONMENT) as stack:
        stack.wait_until_ready(150)
        yield stack


@pytest.fixture
def base_url(line: Stack) -> str:
    """Where the gateway answers."""
    return line.gateway_url


@pytest.fixture
def sdk(base_url: str) -> Iterator[openai.OpenAI]:
    """The official client, as it comes but for its retries."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@dataclass
class Sent:
    """One server-sent event, as a browser would see it."""

    id: str = ""
    event: str = "message"
    data: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """What it says."""
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

    address: str
    """`host:port`."""
    path: str
    last_event_id: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    retry_ms: int = 3000

    def connect(self, body: dict[str, Any] | None = None, most: int | None = None) -> Iterator[Sent]:
        """One connection's events; with a `body` a POST. After `most` of them it is cut."""
        headers = dict(self.headers) | ({"Last-Event-ID": self.last_event_id} if self.last_event_id else {})
        with closing(http.client.HTTPConnection(self.address, timeout=60)) as connection:
            if body is None:
                connection.request("GET", self.path, headers=headers)
            else:
                headers["Content-Type"] = "application/json"
                connection.request("POST", self.path, json.dumps(body), headers)
            answer = connection.getresponse()
            self.status, self.answer_headers = answer.status, answer.headers
            if answer.status == 200:
                for number, sent in enumerate(self._events(answer), 1):
                    yield sent
                    if number == most:
                        return

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[Sent]:
        sent = Sent()
        for raw in answer:
            line = raw.decode().rstrip("\n")
            name, _, value = line.partition(": ")
            if not line:
                if sent.data:
                    yield sent
                sent = Sent()
            elif name == "id":
                self.last_event_id = sent.id = value
            elif name == "event":
                sent.event = value
            elif name == "data":
                sent.data += value
            elif name == "retry":
                self.retry_ms = int(value)
