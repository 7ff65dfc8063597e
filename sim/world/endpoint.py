"""Servers with OpenAI's API that misbehave, in place of the connections of an endpoint worker.

A prompt says what its answer is: that to `count 3|` is ` 0 1 2`, and behind `count 3| 0` it goes on with ` 1`. Another
word than `count` says what is wrong with each answer to it. A chat that begins with `call` is answered by a call, in
pieces. What is wrong with any answer is drawn.
"""

import email.message
import json
import random
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.grammar.tools import CALL_CLOSE, CALL_OPEN
from sim.world.runtime import SimEvent, World

REFUSED = {"refuse": "invalid_request", "abort": "model_error", "filter": "model_error", "break": "model_error"}
"""Words of prompts whose answers are errors, and the codes of these. That to `refuse 403 3|` always has the status."""
KEY_STATUSES = (401, 407, 429, 503)
"""What a server says to all for a while whose key was changed, or that is busy: it is not to be counted."""
REFUSALS = [status for status in (*range(300, 309), *range(400, 600)) if status not in (413, *KEY_STATUSES)]
"""A status for each client: three that are refused alike by right wait for a good one, which may never come."""
ERROR = {"error": {"message": "half of a pair: \ud83d", "code": None}}
WRONG_LINES = (
    b"data: {\n", b"data: [1]\n", b'data: {"choices": 5}\n', b'data: {"choices": [5]}\n', b"\xff\xfe\n",
    b'data: {"error": {"message": "\\ud800", "code": 500}}\n', b"data: " + b"[" * 5000 + b"\n",
)  # fmt: skip
HARMLESS_LINES = (
    b": comment\n", b"\n", b"event: x\n", b'data: {"choices": []}\n', b'data: {"usage": 5}\n',
    b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": -1}}\n', b"\xff: x\n",
    b'data: {"usage": {"prompt_tokens": 1, "completion_tokens": 1' + b"0" * 400 + b"}}\n",
    b'data: {"choices": [{"text": 5, "finish_reason": null, "stop_reason": "\\ud800"}]}\n',
)  # fmt: skip
STATUSES = (429, 500, 502, 503, 404, 301, 401)
WAITS = ("2", "nan", "-5", "0.5", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "")
FAULTS = (
    "status", "cut", "silence", "line", "harmless", "harmless", "harmless", "type", "slow", "away", "no end", "closed",
)  # fmt: skip
SILENCE_S = 5.0


def make_text(prompt: str) -> str:
    """Return the whole text of the answer to a prompt."""
    if prompt.startswith("call"):
        return f'{CALL_OPEN}{{"name": "f", "arguments": {make_arguments(prompt)}}}{CALL_CLOSE}'
    return "".join(f" {number}" for number in range(int(prompt.rsplit(maxsplit=1)[-1].rstrip("|"))))


def make_arguments(prompt: str) -> str:
    """Return the arguments of the call that answers a chat."""
    return json.dumps({"text": make_text(prompt.replace("call", "count"))})


@dataclass
class EndpointServers:
    """The servers, and how much of what they do is wrong."""

    world: World
    chance: random.Random
    faults: float
    """The share of answers with which something is wrong."""
    away_until_s: float = 0.0
    closed_until_s: float = 0.0
    """Until when all questions are refused, with `closed_status`."""
    closed_status: int = 401

    def open_connection(self, url: str, timeout_s: float) -> "EndpointConnection":
        """Return a connection to one of them."""
        return EndpointConnection(self, timeout_s)

    def draw_fault(self) -> str:
        """Return what is wrong with an answer; empty for nothing."""
        if self.chance.random() >= self.faults:
            return ""
        return self.chance.choice(FAULTS)


class EndpointConnection:
    """`http.client.HTTPConnection`, its socket, and its response."""

    def __init__(self, servers: EndpointServers, timeout_s: float) -> None:
        self._servers, self._timeout_s = servers, timeout_s
        self._shut = SimEvent(servers.world)
        self.sock = self
        self.status = 200
        self.headers = email.message.Message()
        self._pieces: Iterator[bytes] = iter(())

    # The connection and its socket.

    def connect(self) -> None:
        """Connect. Raises `OSError` while the server is away."""
        self._wait(0.001)
        if self._servers.world.now_s < self._servers.away_until_s:
            raise ConnectionRefusedError("refused")

    def settimeout(self, seconds: float) -> None:
        """Set how long a read may wait."""
        self._timeout_s = seconds

    def shutdown(self, how: int) -> None:
        """End all reads."""
        assert how == socket.SHUT_RDWR
        self._shut.set()

    def close(self) -> None:
        """Close it."""
        self._shut.set()

    def request(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Ask."""
        chance, asked, fault = self._servers.chance, json.loads(body), self._servers.draw_fault()
        words, _, text = (asked.get("prompt") or asked["messages"][-1]["content"]).partition("|")
        kind = words.split()[0]
        if fault == "away":
            self._servers.away_until_s = self._servers.world.now_s + chance.uniform(0.5, 10.0)
            raise ConnectionResetError("reset")
        self.headers["Content-Type"] = "application/json" if fault == "type" else "text/event-stream"
        if fault == "closed":
            self._servers.closed_until_s = self._servers.world.now_s + chance.uniform(0.5, 60.0)
            self._servers.closed_status = chance.choice(KEY_STATUSES)
        is_closed = self._servers.world.now_s < self._servers.closed_until_s
        if is_closed or fault == "status" or kind == "refuse":
            refused = int(words.split()[1]) if kind == "refuse" else chance.choice(STATUSES)
            self.status = self._servers.closed_status if is_closed else refused
            if wait := chance.choice(WAITS):
                self.headers["Retry-After"] = wait
            self._pieces = iter([json.dumps(ERROR).encode()])
            return
        whole = make_arguments(words) if kind == "call" else make_text(words)
        self._pieces = self._write_answer(kind, whole[len(text) :], fault)

    def getresponse(self) -> "EndpointConnection":
        """Return the response."""
        self._wait(0.01)
        return self

    # The response.

    def read(self, size: int) -> bytes:
        """Return the whole body."""
        return b"".join(self._pieces)[:size]

    def read1(self, size: int) -> bytes:
        """Return the next bytes; none at the end."""
        return next(self._pieces, b"")

    def _write_answer(self, kind: str, text: str, fault: str) -> Iterator[bytes]:
        chance = self._servers.chance
        wrong_at = chance.randrange(len(text) + 1) if fault else -1
        place, end = 0, {"refuse": "", "abort": "abort", "filter": "content_filter"}.get(kind, "stop")
        while True:
            self._wait(2.0 if fault == "slow" else 0.02)
            size = chance.randint(1, 6)
            if place <= wrong_at < place + size:
                yield from self._do_wrong(fault)
                if fault in ("cut", "line"):
                    return
            if place >= len(text):
                break
            if kind == "break" and place:
                yield b'data: {"error": "broken"}\n\n'
                return
            yield _make_line(text[place : place + size], None, is_call=kind == "call")
            place += size
        if fault != "no end":
            line = _make_line("", end)
            cut = chance.randrange(len(line))
            yield line[:cut]
            yield line[cut:] + b"data: [DONE]\n\n"

    def _do_wrong(self, fault: str) -> Iterator[bytes]:
        chance = self._servers.chance
        if fault == "silence":
            self._wait(self._timeout_s)
            raise TimeoutError("timed out")
        if fault == "line":
            yield chance.choice(WRONG_LINES)
        if fault == "harmless":
            yield chance.choice(HARMLESS_LINES)
        if fault == "cut" and chance.random() < 0.5:
            raise ConnectionResetError("reset")

    def _wait(self, mean_s: float) -> None:
        """Let time pass. Raises `OSError` where the connection was closed meanwhile."""
        if self._shut.wait(self._servers.chance.expovariate(1 / mean_s)):
            raise ConnectionAbortedError("closed")


def _make_line(text: str, reason: str | None, *, is_call: bool = False) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
    if is_call:
        call = {"index": 0, "function": {"name": "f", "arguments": text}}
        choice["delta"] = {"tool_calls": [call]}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
