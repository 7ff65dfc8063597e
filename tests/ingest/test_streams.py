"""Streams over HTTP, with the tests in the workers' place: browsers, slow readers, cancelling, a gateway that stops."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.messages import Request, decode_message
from penstock.names import Pipeline
from penstock.record import Claim, Record
from penstock.waiting import wait_until
from penstock.worker.heartbeat import Heartbeat
from tests.ingest.conftest import EventSource
from tests.ingest.gateways import GatewayProcess
from tests.record.play import decode as claim_decode
from tests.record.play import end, say

BODY = {"model": "scripted", "prompt": "x", "max_tokens": 100}


class Stage:
    """A gateway, and the pipeline behind it, whose workers are played."""

    def __init__(self, url: str, pipeline: Pipeline, folder: Path) -> None:
        self.addresses = Addresses(stream_url=url, pipeline=pipeline.name)
        self.server = redis.Redis.from_url(url)
        self.record = Record(self.server, pipeline, RecordSettings(lease_s=600))
        self.bus, self.pipeline, self.folder = connect_bus(self.addresses, BusSettings()), pipeline, folder
        self.bus.create_topics()
        self.gateway = self.start()
        self.address = self.gateway.address

    def start(self) -> GatewayProcess:
        """A gateway that answers."""
        return GatewayProcess(self.addresses, self.folder)

    def post(self, **more: Any) -> str:
        """A request's stream id; nobody reads it yet."""
        with httpx.stream(
            "POST", f"http://{self.address}/v1/completions", json=BODY | {"stream": True} | more
        ) as answer:
            assert answer.status_code == 200
            return answer.headers["x-request-id"]

    def requests(self) -> list[Request]:
        """Everything that was published."""
        return [
            decode_message(Request, sent.value)
            for sent in self.bus.read_all(self.pipeline.request_topic("interactive"))
        ]

    def says(self, request_id: str, count: int) -> Claim:
        """A worker takes the request and says so many tokens."""
        claim = claim_decode(self.record, request_id)
        say(self.record, claim, list(range(count)))
        return claim

    def source(self, stream_id: str, last_event_id: str = "") -> EventSource:
        """A browser."""
        return EventSource(self.address, f"/v1/streams/{stream_id}", last_event_id)

    def is_read(self, request_id: str, by: int = 1) -> bool:
        """Whether so many gateways listen."""
        return self.server.pubsub_numsub(self.pipeline.live_channel(request_id))[0][1] == by


@pytest.fixture(scope="module")
def stage(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    pipeline = Pipeline(f"t-stage-{os.getpid()}")
    with Heartbeat(redis_url, pipeline, "decode", "scripted-0", 0.5) as beat:
        beat.update_status(now=True, state="ready", model="scripted")
        made = Stage(redis_url, pipeline, tmp_path_factory.mktemp("stage"))
        yield made
        assert made.gateway.process.stop(20) == 0
        made.record.close()
        made.server.close()


def test_a_browser_reads_it_to_its_end_and_then_stops(stage: Stage) -> None:
    stream_id = stage.post()
    stage.record.finish_request(stage.says(stream_id, 5), end())
    source = stage.source(stream_id)
    events = list(source.connect())
    assert source.answer_headers["content-type"] == "text/event-stream; charset=utf-8"
    assert source.retry_ms < 3000, "it is told to come back sooner than by itself"
    assert (events[-1].data, source.last_event_id) == ("[DONE]", "done")
    assert "".join(sent.text for sent in events) == "<0><1><2><3><4>"
    assert (list(source.connect()), source.status) == ([], 204), "it came back after the end: it stops"
    assert list(stage.source(stream_id).connect()) == events, "a new one gets all of it"


def test_every_event_can_be_resumed_from(stage: Stage) -> None:
    stream_id = stage.post(n=2, stream_options={"include_usage": True})
    for choice in (1, 0):
        stage.record.finish_request(stage.says(f"{stream_id}.{choice}", 3), end())
    events = list(stage.source(stream_id).connect())
    assert not events[-2].id, "the usage has none"
    for place, sent in enumerate(events[:-2]):
        rest = list(stage.source(stream_id, sent.id).connect())
        said = [one.data for one in events[: place + 1] + rest]
        assert sorted(said) == sorted(one.data for one in events)
        with_parameter = EventSource(stage.address, f"/v1/streams/{stream_id}?last_event_id={sent.id}")
        assert sorted(one.data for one in with_parameter.connect()) == sorted(one.data for one in rest)
    assert events[-2].body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "last_event_id", "status", "code"),
    [
        ("/v1/streams/cmpl-nowhere", "", 404, "stream_not_found"),
        ("/v1/streams/{id}", "no id", 400, "invalid_event_id"),
        ("/v1/streams/{id}", "0-0123456789abcdef,e1", 400, "invalid_event_id"),
        ("/v1/streams/{id}", "3-0123456789abcdef", 404, "stream_expired"),
    ],
)
def test_what_cannot_be_read_is_said_before_the_stream(
    stage: Stage, path: str, last_event_id: str, status: int, code: str
) -> None:
    stream_id = stage.post()
    answer = httpx.get(f"http://{stage.address}{path.format(id=stream_id)}", headers={"Last-Event-ID": last_event_id})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_another_answer_than_was_seen_ends_the_stream_for_good(stage: Stage) -> None:
    stream_id = stage.post()
    stage.record.finish_request(stage.says(stream_id, 3), end())
    source = stage.source(stream_id, "1-0123456789abcdef")
    (only,) = source.connect()
    assert (only.event, only.body["error"]["code"]) == ("error", "stream_diverged")
    assert (list(source.connect()), source.status) == ([], 204)


def test_slow_readers_slow_nobody_and_get_all_of_it(stage: Stage) -> None:
    count, num_slow = 12_000, 20
    stream_id = stage.post(max_tokens=count)
    with ExitStack() as exits:
        slow = [_asks_and_reads_nothing(stage, stream_id, exits) for _ in range(num_slow)]
        quick = stage.source(stream_id).connect()
        claim = stage.says(stream_id, 1)
        assert next(quick).text == "<0>"
        for first in range(1, count, 500):
            _say_together(stage, claim, range(first, min(first + 500, count)))
        stage.record.finish_request(claim, end())
        assert "".join(sent.text for sent in quick) == "".join(f"<{token}>" for token in range(1, count))
        lines = exits.enter_context(slow[0].makefile("rb"))
        data = [line for line in _until_done(lines) if line.startswith(b"data: ")]
    assert len(data) == count + 2, "all tokens, the finish reason and [DONE]: what was dropped was read again"


def _asks_and_reads_nothing(stage: Stage, stream_id: str, exits: ExitStack) -> socket.socket:
    host, _, port = stage.address.partition(":")
    made = exits.enter_context(socket.socket())
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(60)
    made.connect((host, int(port)))
    made.sendall(f"GET /v1/streams/{stream_id} HTTP/1.1\r\nHost: {stage.address}\r\n\r\n".encode())
    return made


def _say_together(stage: Stage, claim: Claim, tokens: range) -> None:
    for token in tokens:
        stage.record.send_tokens([(claim, claim.next_event(token, f"<{token}>"))])
    assert all(stage.record.collect_outcomes())


def _until_done(lines: Any) -> Iterator[bytes]:
    for line in lines:
        yield line
        if line.startswith(b"data: [DONE]"):
            return


def _cancelled(stage: Stage, request_id: str) -> bool:
    status = stage.record.read_status(request_id)
    return status is not None and status.cancelled


def test_a_response_is_read_again_until_it_is_deleted(stage: Stage) -> None:
    asked = {"model": "scripted", "input": "hi", "stream": True}
    with httpx.stream("POST", f"http://{stage.address}/v1/responses", json=asked) as posted:
        url = f"http://{stage.address}/v1/responses/{posted.headers['x-request-id']}"
    found = httpx.get(url).json()
    assert (found["status"], found["output"]) == ("in_progress", [])
    stage.record.finish_request(stage.says(found["id"], 3), end())
    found = httpx.get(url).json()
    assert found["status"] in ("completed", "incomplete")
    assert found["output"][0]["content"][0]["text"] == "<0><1><2>"
    other = f"http://{stage.address}/v1/responses/{stage.post()}"
    assert httpx.get(other).json()["error"]["code"] == "response_not_found", "it is a completion"
    assert httpx.delete(url).json() == {"id": found["id"], "object": "response", "deleted": True}
    for gone in (url, url.replace("/responses/", "/streams/")):
        assert httpx.get(gone).status_code == 404


CANCELS: dict[str, Callable[[str], httpx.Response]] = {
    "post": lambda url: httpx.post(f"{url}/cancel"),
    "delete": httpx.delete,
}


@pytest.mark.parametrize("how", CANCELS)
def test_a_stream_is_cancelled(stage: Stage, how: str) -> None:
    stream_id = stage.post(n=2)
    url = f"http://{stage.address}/v1/streams/{stream_id}"
    assert CANCELS[how](url).json() == {"id": stream_id, "object": "stream", "cancelled": True}
    assert _cancelled(stage, f"{stream_id}.0")
    assert _cancelled(stage, f"{stream_id}.1")
    for choice in (0, 1):
        stage.record.finish_request(stage.says(f"{stream_id}.{choice}", 0), end())
    assert CANCELS[how](url).json()["cancelled"] is False, "it has ended"
    assert CANCELS[how](f"{url}x").status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_cancels_only_where_that_was_asked_for(stage: Stage, stream: bool) -> None:
    for wish in ("true", "false"):
        headers = {"x-penstock-cancel-on-disconnect": wish, "Idempotency-Key": f"leaves-{stream}-{wish}"}
        known = {request.id for request in stage.requests()}
        source = EventSource(stage.address, "/v1/completions", headers=headers)
        connection = _posted(source, BODY | {"stream": stream})
        wait_until(lambda known=known: {one.id for one in stage.requests()} - known, 20, "it is accepted")  # type: ignore[misc]
        (request_id,) = {request.id for request in stage.requests()} - known
        wait_until(lambda request_id=request_id: stage.is_read(request_id), 20, "it is read")  # type: ignore[misc]
        connection.close()
        wait_until(lambda request_id=request_id: stage.is_read(request_id, by=0), 20, "it is left")  # type: ignore[misc]
        if wish == "true":
            wait_until(lambda request_id=request_id: _cancelled(stage, request_id), 20, "it is cancelled")  # type: ignore[misc]
        else:
            assert not _cancelled(stage, request_id)


def _posted(source: EventSource, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request was made."""
    content = httpx.Request("POST", f"http://{source.address}{source.path}", json=body, headers=source.headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in content.headers.items())
    host, _, port = source.address.partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(f"POST {source.path} HTTP/1.1\r\n{head}\r\n".encode() + content.read())
    return connection


def test_headers_reach_the_request(stage: Stage) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-session-affinity": "chat-7", "x-penstock-deadline-s": "60", "traceparent": trace}
    url = f"http://{stage.address}/v1/completions"
    with httpx.stream("POST", url, json=BODY | {"stream": True}, headers=headers) as answer:
        request_id = answer.headers["x-request-id"]
        assert answer.headers["location"] == f"/v1/streams/{request_id}"
    sent = next(one for one in stage.bus.read_all(stage.pipeline.request_topic("interactive")) if one.key == request_id)
    request = decode_message(Request, sent.value)
    assert (request.session, request.tenant, request.deadline is not None) == ("chat-7", "default", True)
    assert sent.headers["traceparent"].split("-")[1] == trace.split("-")[1]
    flex = BODY | {"stream": True, "service_tier": "flex"}
    with httpx.stream("POST", url, json=flex) as answer:
        request_id = answer.headers["x-request-id"]
    assert request_id in {one.key for one in stage.bus.read_all(stage.pipeline.request_topic("batch"))}


def test_a_gateway_that_stops_sends_its_readers_elsewhere(stage: Stage) -> None:
    leaving = stage.start()
    stream_id = stage.post()
    claim = stage.says(stream_id, 1)
    source = EventSource(leaving.address, f"/v1/streams/{stream_id}")
    events = source.connect()
    first = next(events)
    leaving.process.send_signal(signal.SIGTERM)
    (told,) = events
    assert (told.event, told.body["error"]["code"]) == ("error", "gateway_stopping")
    assert source.last_event_id == first.id, "the place in the stream stays"
    assert leaving.process.wait(20) == 0
    say(stage.record, claim, [1])
    stage.record.finish_request(claim, end())
    rest = list(stage.source(stream_id, source.last_event_id).connect())
    assert "".join(sent.text for sent in [first, *rest]) == "<0><1>"
