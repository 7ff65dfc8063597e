"""Streams over HTTP, with the tests in the workers' place: browsers, slow readers, cancelling, a gateway that stops."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.messages import Request, decode_message
from penstock.names import CLASSES, Pipeline, stream_meta_key
from sim.events import EventSource, ServerSentEvent
from sim.waiting import PATIENCE_S, wait_for
from tests.draws import mark_some
from tests.gateways import GatewayProcess, ScriptedPipeline
from tests.record.play import end, say

MODEL = "scripted"
BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}


class StreamPipeline(ScriptedPipeline):
    """A scripted pipeline behind a gateway process, as the readers of its streams see it."""

    def __init__(self, url: str, pipeline: Pipeline, folder: Path) -> None:
        super().__init__(url, pipeline, MODEL)
        self.folder = folder
        self.url = ""

    def start_gateway(self, **settings: str) -> GatewayProcess:
        return GatewayProcess(self.addresses, self.folder, settings)

    def post(self, **more: Any) -> str:
        """Make a request and return its stream's id; nobody reads it yet."""
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json=BODY | {"stream": True} | more, timeout=None
        ) as answer:
            assert answer.status_code == 200
            return answer.headers["x-request-id"]

    def source(self, stream_id: str, last_event_id: str = "") -> EventSource:
        return EventSource(f"{self.url}/v1/streams/{stream_id}", last_event_id)

    def is_read(self, request_id: str, by: int = 1) -> bool:
        """Whether so many gateways listen."""
        return self.server.pubsub_numsub(self.pipeline.live_channel(request_id))[0][1] == by

    def is_cancelled(self, request_id: str) -> bool:
        status = self.record.read_status(request_id)
        return status is not None and status.cancelled


@pytest.fixture(scope="module")
def streams(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamPipeline]:
    with StreamPipeline(redis_url, Pipeline(f"t-streams-{os.getpid()}"), tmp_path_factory.mktemp("streams")) as made:
        gateway = made.start_gateway()
        made.url = gateway.url
        yield made
        assert gateway.process.stop(PATIENCE_S) == 0


@pytest.mark.proof
def test_a_browser_reads_it_to_its_end_and_then_stops(streams: StreamPipeline) -> None:
    stream_id = streams.post()
    streams.finish(stream_id, 5)
    source = streams.source(stream_id)
    events = list(source.connect())
    assert source.answer_headers["content-type"] == "text/event-stream; charset=utf-8"
    assert source.retry_ms < 3000, "it is told to come back sooner than by itself"
    assert (events[-1].data, source.last_event_id) == ("[DONE]", "done")
    assert "".join(sent.text for sent in events) == "<0><1><2><3><4>"
    assert (list(source.connect()), source.status) == ([], 204), "it came back after the end: it stops"
    assert list(streams.source(stream_id).connect()) == events, "a new one gets all of it"


@pytest.mark.proof
def test_every_event_can_be_resumed_from(streams: StreamPipeline) -> None:
    stream_id = streams.post(n=2, stream_options={"include_usage": True})
    for choice in (1, 0):
        streams.finish(f"{stream_id}.{choice}", 3)
    events = list(streams.source(stream_id).connect())
    assert not events[-2].id, "the usage has none"
    for place, sent in enumerate(events[:-2]):
        rest = list(streams.source(stream_id, sent.id).connect())
        data = [one.data for one in events[: place + 1] + rest]
        assert sorted(data) == sorted(one.data for one in events)
        with_parameter = EventSource(f"{streams.url}/v1/streams/{stream_id}?last_event_id={sent.id}")
        assert sorted(one.data for one in with_parameter.connect()) == sorted(one.data for one in rest)
    assert events[-2].body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "last_event_id", "status", "code"),
    mark_some(
        [
            ("/v1/streams/cmpl-nowhere", "", 404, "stream_not_found"),
            ("/v1/streams/{id}", "no id", 400, "invalid_event_id"),
            ("/v1/streams/{id}", "0-0123456789abcdef,e1", 400, "invalid_event_id"),
            ("/v1/streams/{id}", "3-0123456789abcdef", 404, "stream_expired"),
        ],
        pytest.mark.proof,
    ),
)
def test_what_cannot_be_read_is_said_before_the_stream(
    streams: StreamPipeline, path: str, last_event_id: str, status: int, code: str
) -> None:
    stream_id = streams.post()
    answer = httpx.get(
        f"{streams.url}{path.format(id=stream_id)}", headers={"Last-Event-ID": last_event_id}, timeout=None
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.proof
def test_another_answer_than_was_seen_ends_the_stream_for_good(streams: StreamPipeline) -> None:
    stream_id = streams.post()
    streams.finish(stream_id, 3)
    source = streams.source(stream_id, "1-0123456789abcdef")
    (only,) = source.connect()
    assert (only.event, only.body["error"]["code"]) == ("error", "stream_diverged")
    assert (list(source.connect()), source.status) == ([], 204)


def test_an_adopted_stream_is_waited_for_though_its_reader_has_seen_more_than_workers_here(
    streams: StreamPipeline,
) -> None:
    undisturbed = streams.post()
    streams.finish(undisturbed, 5)
    ids, adopted = [event.id for event in streams.source(undisturbed).connect()], f"{undisturbed}-eu"
    card = json.loads(streams.server.get(stream_meta_key(undisturbed)) or b"{}")
    card |= {"id": adopted, "request_ids": [adopted], "is_adopted": True}
    streams.server.set(stream_meta_key(adopted), json.dumps(card))
    read = list[ServerSentEvent]()
    reading = threading.Thread(target=lambda: read.extend(streams.source(adopted, ids[2]).connect()))
    reading.start()
    wait_for(lambda: streams.is_read(adopted), "it is waited for")
    streams.finish(adopted, 5)
    reading.join(PATIENCE_S)
    assert "".join(event.text for event in read) == "<3><4>"


def test_an_adopted_stream_that_ends_before_what_was_seen_is_interrupted(streams: StreamPipeline) -> None:
    posted = streams.post()
    card = json.loads(streams.server.get(stream_meta_key(posted)) or b"{}")
    adopted = card["id"] = f"{posted}-eu"
    streams.server.set(stream_meta_key(adopted), json.dumps(card | {"request_ids": [adopted], "is_adopted": True}))
    streams.finish(adopted, 0)
    (only,) = streams.source(adopted, "15-0123456789abcdef").connect()
    assert (only.event, only.body["error"]["code"]) == ("error", "answer_interrupted")


@pytest.mark.proof
def test_slow_readers_slow_nobody_and_get_all_of_it(streams: StreamPipeline) -> None:
    count, num_slow = 12_000, 20
    stream_id = streams.post(max_tokens=count)
    with ExitStack() as exits:
        slow = [open_unread(streams, stream_id, exits) for _ in range(num_slow)]
        quick = streams.source(stream_id).connect()
        claim = streams.write(stream_id, 1)
        assert next(quick).text == "<0>"
        for first in range(1, count, 500):
            for token in range(first, min(first + 500, count)):
                streams.record.send_tokens([(claim, claim.next_event(token, f"<{token}>"))])
            assert all(streams.record.collect_outcomes())
        streams.record.finish_request(claim, end())
        assert "".join(sent.text for sent in quick) == "".join(f"<{token}>" for token in range(1, count))
        lines = exits.enter_context(slow[0].makefile("rb"))
        data: list[bytes] = []
        while not data or not data[-1].startswith(b"data: [DONE]"):
            data += [line] if (line := next(lines)).startswith(b"data: ") else []
    assert len(data) == count + 2, "all tokens, the finish reason and [DONE]: what was dropped was read again"


def open_unread(streams: StreamPipeline, stream_id: str, exits: ExitStack) -> socket.socket:
    address = httpx.URL(streams.url)
    made = exits.enter_context(socket.socket())
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((address.host, address.port))
    made.sendall(f"GET /v1/streams/{stream_id} HTTP/1.1\r\nHost: {address.netloc.decode()}\r\n\r\n".encode())
    return made


CANCELS: dict[str, Callable[[str], httpx.Response]] = {
    "post": lambda url: httpx.post(f"{url}/cancel", timeout=None),
    "delete": lambda url: httpx.delete(url, timeout=None),
}


@pytest.mark.proof
@pytest.mark.parametrize("how", CANCELS)
def test_a_stream_is_cancelled(streams: StreamPipeline, how: str) -> None:
    stream_id = streams.post(n=2)
    url = f"{streams.url}/v1/streams/{stream_id}"
    assert CANCELS[how](url).json() == {"id": stream_id, "object": "stream", "cancelled": True}
    assert streams.is_cancelled(f"{stream_id}.0")
    assert streams.is_cancelled(f"{stream_id}.1")
    for choice in (0, 1):
        streams.finish(f"{stream_id}.{choice}", 0)
    assert CANCELS[how](url).json()["cancelled"] is False, "it has ended"
    assert CANCELS[how](f"{url}x").status_code == 404


@pytest.mark.proof
@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_cancels_only_where_that_was_asked_for(streams: StreamPipeline, stream: bool, cancels: bool) -> None:
    wish = str(cancels).lower()
    headers = {"x-penstock-cancel-on-disconnect": wish, "Idempotency-Key": f"leaves-{stream}-{wish}"}
    request_id = read_and_leave(streams, headers, BODY | {"stream": stream})
    wait_for(lambda: streams.is_read(request_id, by=0), "it is left")
    if cancels:
        wait_for(lambda: streams.is_cancelled(request_id), "it is cancelled")
    else:
        assert not streams.is_cancelled(request_id)


@pytest.mark.parametrize("stream", mark_some([True, False], pytest.mark.proof))
def test_who_leaves_for_long_cancels_where_the_operator_wants_that(streams: StreamPipeline, stream: bool) -> None:
    with streams.start_gateway(GATEWAY_CANCEL_UNREAD_S="0.1") as gateway:
        request_id = read_and_leave(streams, {}, BODY | {"stream": stream}, gateway.url)
        wait_for(lambda: streams.is_cancelled(request_id), "it is cancelled")


def read_and_leave(streams: StreamPipeline, headers: dict[str, str], body: dict[str, Any], url: str = "") -> str:
    """Close the connection of a request when a gateway reads its stream; return the request's id."""
    known = {request.id for request in streams.read_requests()}
    made = httpx.Request("POST", f"{url or streams.url}/v1/completions", json=body, headers=headers)
    head = "".join(f"{name}: {value}\r\n" for name, value in made.headers.items())
    with socket.create_connection((made.url.host, made.url.port)) as connection:
        connection.sendall(f"POST {made.url.path} HTTP/1.1\r\n{head}\r\n".encode() + made.read())
        wait_for(lambda: {one.id for one in streams.read_requests()} - known, "it is accepted")
        (request_id,) = {request.id for request in streams.read_requests()} - known
        wait_for(lambda: streams.is_read(request_id), "it is read")
    return request_id


@pytest.mark.proof
def test_headers_reach_the_request(streams: StreamPipeline) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-session-affinity": "chat-7", "x-penstock-deadline-s": "60", "traceparent": trace}
    url = f"{streams.url}/v1/completions"
    with httpx.stream("POST", url, json=BODY | {"stream": True}, headers=headers, timeout=None) as answer:
        request_id = answer.headers["x-request-id"]
        assert answer.headers["location"] == f"/v1/streams/{request_id}"
    topics = {priority_class: streams.pipeline.request_topic(priority_class) for priority_class in CLASSES}
    (sent,) = (one for one in streams.bus.read_all(topics["interactive"]) if one.key == request_id)
    request = decode_message(Request, sent.value)
    assert (request.session, request.tenant, request.deadline is not None) == ("chat-7", "default", True)
    assert sent.headers["traceparent"].split("-")[1] == trace.split("-")[1]
    flex = BODY | {"stream": True, "service_tier": "flex"}
    with httpx.stream("POST", url, json=flex, timeout=None) as answer:
        request_id = answer.headers["x-request-id"]
    assert request_id in {one.key for one in streams.bus.read_all(topics["batch"])}


@pytest.mark.proof
def test_a_gateway_that_stops_sends_its_readers_elsewhere(streams: StreamPipeline) -> None:
    leaving = streams.start_gateway()
    stream_id = streams.post()
    claim = streams.write(stream_id, 1)
    source = EventSource(f"{leaving.url}/v1/streams/{stream_id}")
    events = source.connect()
    first = next(events)
    leaving.process.send_signal(signal.SIGTERM)
    (last,) = events
    assert (last.event, last.body["error"]["code"]) == ("error", "gateway_stopping")
    assert source.last_event_id == first.id, "the place in the stream stays"
    assert leaving.process.wait(PATIENCE_S) == 0
    say(streams.record, claim, [1])
    streams.record.finish_request(claim, end())
    rest = list(streams.source(stream_id, source.last_event_id).connect())
    assert "".join(sent.text for sent in [first, *rest]) == "<0><1>"
