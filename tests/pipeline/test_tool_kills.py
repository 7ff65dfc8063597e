"""Decode workers are killed while they write calls of tools: a reader of the gateway sees the same bytes and calls."""

import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings
from penstock.messages import TokenEvent
from penstock.names import Pipeline
from penstock.record import TokenLog
from penstock.redis.client import redis_client
from sim.conversations import Body, make_chat_bodies
from sim.events import EventSource, ServerSentEvent
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import TOOL_MODEL
from tests.gateways import GatewayProcess
from tests.pipeline.site import worker_process

KILL_EVERY = int(os.environ.get("TEST_KILL_EVERY", "16"))
"""After so many tokens a worker is killed. With 1 that is at every token, and takes some minutes.

With drafts it is after so many steps, each of which may give several tokens.
"""
POINTS = ("decode.7.sent", "decode.7.confirmed")
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 120, "maxLength": 160}, "red": {"type": "boolean"}},
    "required": ["text", "red"],
    "additionalProperties": False,
}
LONG_CALL: Body = {
    "messages": [{"role": "user", "content": "Note what you know."}],
    "tools": [{"type": "function", "function": {"name": "note", "parameters": NOTE, "strict": True}}],
    "tool_choice": "required", "parallel_tool_calls": False, "stop": ["e", "a", '"'], "max_tokens": 300,
}  # fmt: skip
"""A call with long arguments, told in pieces: what has been told of it stays, and its stop strings do nothing."""
TYPED: Body = {"response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}}
"""With it an answer has calls, or else is JSON by the schema."""
SETTINGS = {"ENGINE_MODEL": str(TOOL_MODEL)}


class Reader:
    """A reader of one streamed answer."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, body: Body) -> None:
        self._source = EventSource(f"{url}/v1/chat/completions")
        asked = {"model": str(TOOL_MODEL), "stream": True, "max_tokens": 64, **body}
        self._events: Future[list[ServerSentEvent]] = pool.submit(lambda: [*self._source.connect(asked)])

    @property
    def is_done(self) -> bool:
        """Whether the stream has ended."""
        return self._events.done()

    @property
    def request_id(self) -> str:
        """The id of the request, once it is accepted; empty before."""
        return str(self._source.answer_headers.get("x-request-id", ""))

    def read_events(self) -> list[tuple[str, Any]]:
        """Return ids and data of all events; the data without what another request has otherwise."""
        return [(event.id, self._strip(event.data)) for event in self._events.result(PATIENCE_S)]

    def _strip(self, data: str) -> Any:
        name = self.request_id.removeprefix("chatcmpl-")
        return data if data == "[DONE]" else json.loads(data.replace(name, "")) | {"created": 0}


def list_calls(events: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the names and arguments of a stream's calls."""
    calls = dict[int, tuple[str, str]]()
    for _, body in events[:-1]:
        for call in body["choices"][0]["delta"].get("tool_calls", ()):
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = name + function.get("name", ""), arguments + function["arguments"]
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.fixture
def gateway(addresses: Addresses, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway before a prefill worker of the tool model."""
    with worker_process("prefill", addresses, tmp_path, settings=SETTINGS), GatewayProcess(addresses, tmp_path) as one:
        wait_for(lambda: httpx.get(f"{one.url}/v1/models", timeout=None).json()["data"], "the model is served")
        yield one


def test_calls_are_the_same_when_workers_are_killed_between_their_tokens(
    gateway: GatewayProcess, addresses: Addresses, tmp_path: Path
) -> None:
    for has_drafts in (False, True):  # of one pipeline: a gateway may find a model in any that was alive just now
        check_kills(gateway, addresses, tmp_path, has_drafts)


def check_kills(gateway: GatewayProcess, addresses: Addresses, tmp_path: Path, has_drafts: bool) -> None:
    """Kill decode workers, with drafts or without, and compare the answers with those of one that lives."""
    settings = SETTINGS | {"TESTING": json.dumps({"engine_speculate": has_drafts})}
    greedy, drawn = {"temperature": 0}, {"temperature": 0.4, "seed": 7}
    free, *held = make_chat_bodies(5, "kills")
    bodies = [free, held[0], held[1], held[2] | TYPED, held[3] | TYPED | {"tool_choice": "required"}, LONG_CALL]
    bodies = [body | (drawn if number % 2 else greedy) for number, body in enumerate(bodies)]
    killed_after: dict[str, set[int]] = defaultdict(set)
    with ThreadPoolExecutor(2 * len(bodies)) as pool, closing(redis_client(addresses.stream_url)) as server:
        log = TokenLog(server, Pipeline(addresses.pipeline), RecordSettings())
        with worker_process("decode", addresses, tmp_path, settings=settings):
            expected = [reader.read_events() for reader in [Reader(pool, gateway.url, body) for body in bodies]]
        readers = [Reader(pool, gateway.url, body) for body in bodies]
        wait_for(lambda: all(reader.request_id for reader in readers), "all are accepted")
        num_kills = 0
        while not all(reader.is_done for reader in readers):
            order = f"{POINTS[num_kills % len(POINTS)]}=kill@{KILL_EVERY}"
            with worker_process("decode", addresses, tmp_path, order, settings) as worker:
                wait_for(
                    lambda: not worker.is_alive() or all(reader.is_done for reader in readers),
                    "the worker is killed, or all answers end",
                    every_s=0.02,
                )
                assert worker.is_alive() or worker.returncode == -signal.SIGKILL, worker.read_log_tail()
                num_kills += not worker.is_alive()
            for reader in readers:
                killed_after[reader.request_id].add(count_tokens(log, reader.request_id))
        found = [reader.read_events() for reader in readers]
        lengths = {reader.request_id: count_tokens(log, reader.request_id) for reader in readers}
    assert found == expected
    assert [list_calls(events) for events in found] == [list_calls(events) for events in expected]
    assert sum(map(len, map(list_calls, found))) >= len(bodies) - 1  # one may answer by its schema
    assert num_kills >= (1 if has_drafts else min(lengths.values()) // KILL_EVERY)
    if KILL_EVERY == 1 and not has_drafts:  # prefill has given the first token
        assert all(killed_after[name] >= {*range(2, length)} for name, length in lengths.items())


def count_tokens(log: TokenLog, request_id: str) -> int:
    """Return how many tokens an answer has."""
    return sum(isinstance(event, TokenEvent) for event in log.read_events(request_id))
