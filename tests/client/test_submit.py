"""Submitting: what is sent, and what is refused before it is sent."""

import hashlib
import time
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from opentelemetry import trace

from penstock.bus.contract import Bus
from penstock.client import Client
from penstock.client.core import RequestFields
from penstock.errors import IdConflict, InvalidRequest, RequestLost, RequestTooLarge, StreamTimeout
from penstock.messages import MAX_REQUEST_BYTES, Picture, Request, Sampling, compute_body_hash, decode_message
from penstock.names import CLASS_HEADER, DEADLINE_HEADER, TENANT_HEADER, VERSION_HEADER, Pipeline, picture_key
from penstock.record import Record
from tests.record.play import end, prefill, say
from tests.test_pictures import JPEG, PNG


@pytest.mark.proof
def test_a_caller_may_give_every_field_of_a_request() -> None:
    of_request = Request.model_fields.keys() - {"v", "prompt", "sampling"}
    assert RequestFields.__annotations__.keys() == of_request | Sampling.model_fields.keys() | {"response_format"}


@pytest.mark.proof
def test_a_request_is_published_under_its_id(client: Client, bus: Bus, pipeline: Pipeline) -> None:
    deadline = time.time() + 60
    request_id = client.submit(
        messages=[{"role": "user", "content": "hello"}], tenant="t1", priority_class="batch", deadline=deadline,
        max_tokens=9, stop=("\n",), seed=4,
    )  # fmt: skip
    (message,) = bus.read_all(pipeline.request_topic("batch"))
    request = decode_message(Request, message.value)
    assert message.key == request.id == request_id
    assert (request.priority_class, request.tenant, request.deadline) == ("batch", "t1", deadline)
    assert (request.sampling.max_tokens, request.sampling.stop, request.sampling.seed) == (9, ["\n"], 4)
    assert request.messages is not None
    assert request.messages[0].content == "hello"
    assert {name: message.headers[name] for name in (VERSION_HEADER, TENANT_HEADER, CLASS_HEADER, DEADLINE_HEADER)} == {
        VERSION_HEADER: "1", TENANT_HEADER: "t1", CLASS_HEADER: "batch", DEADLINE_HEADER: str(deadline),
    }  # fmt: skip
    assert bus.read_all(pipeline.request_topic("interactive")) == []


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"prompt": ""}, {"prompt": "a", "token_ids": [1]}, {"prompt": "a", "temperature": -1.0},
        {"prompt": "a", "temperature": float("nan")}, {"prompt": "a", "colour": "red"},
        {"prompt": "a", "id": "with a space"}, {"prompt": "a", "max_tokens": "many"},
        {"prompt": "a", "stop": [object()]}, {"prompt": "\ud800"}, {"prompt": "a", "priority_class": "urgent"},
    ],
)  # fmt: skip
def test_what_is_not_a_request_is_refused_before_it_is_sent(
    client: Client, bus: Bus, pipeline: Pipeline, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        cast(Any, client).submit(**fields)
    assert bus.read_all(pipeline.request_topic("interactive")) == []


def test_a_request_may_not_be_larger_than_a_message(client: Client) -> None:
    with pytest.raises(RequestTooLarge):
        client.submit("x" * MAX_REQUEST_BYTES)


@pytest.mark.proof
def test_an_id_that_is_known_for_another_body_is_refused(
    client: Client, bus: Bus, pipeline: Pipeline, record: Record
) -> None:
    client.submit("one", id="r1")
    (message,) = bus.read_all(pipeline.request_topic("interactive"))
    prefill(record, "r1", body=compute_body_hash(decode_message(Request, message.value)))
    assert client.submit("one", id="r1", deadline=time.time() + 5) == "r1"
    with pytest.raises(IdConflict):
        client.submit("two", id="r1")


@pytest.mark.proof
def test_a_request_whose_message_is_deleted_unread_is_lost_and_not_late(
    client: Client, server: "redis.Redis", bus: Bus, record: Record, pipeline: Pipeline
) -> None:
    """One that a worker has seen is late, and so is one of which this client knows nothing."""
    lost, taken, waiting = (client.submit("hello") for _ in range(3))
    prefill(record, taken)
    key: str = pipeline.stream_key(pipeline.request_topic("interactive"))
    entries: Any = server.xrange(key, count=2)
    server.xdel(key, *(entry_id for entry_id, _ in entries))
    with pytest.raises(RequestLost, match=lost):
        client.result(lost, timeout_s=0.1)
    for late in (taken, waiting, "another"):
        with pytest.raises(StreamTimeout):
            client.result(late, timeout_s=0.1)


def test_generating_is_submitting_and_streaming(client: Client, bus: Bus, record: Record) -> None:
    claim = prefill(record, "r1", body="")
    say(record, claim, [1, 2])
    record.finish_request(claim, end())
    assert "".join(event.text for event in client.generate("hello", id="r1")) == "<1><2>"


@pytest.mark.proof
def test_a_request_carries_on_the_callers_trace(redis_url: str, bus: Bus, pipeline: Pipeline) -> None:
    caller = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=True, trace_flags=trace.TraceFlags(1))
    with Client(redis=redis_url, pipeline=pipeline.name) as client, trace.use_span(trace.NonRecordingSpan(caller)):
        client.submit("hello")
    (message,) = bus.read_all(pipeline.request_topic("interactive"))
    assert trace.format_trace_id(caller.trace_id) in message.headers["traceparent"]


@pytest.mark.parametrize("redis_max_kb", [1024, 0])
def test_a_picture_is_stored_and_a_request_names_it(
    client: Client, bus: Bus, pipeline: Pipeline, server: "redis.Redis", tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, redis_max_kb: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("PENSTOCK_PICTURE_REDIS_MAX_KB", str(redis_max_kb))
    monkeypatch.setenv("PENSTOCK_BATCH_STORE", str(tmp_path))
    digest, file = hashlib.sha256(PNG).hexdigest(), tmp_path / "a.png"
    file.write_bytes(PNG)
    server.delete(picture_key(digest))
    picture = client.put_picture(file, "low")
    assert picture == Picture(digest=digest, num_bytes=len(PNG), width=64, height=32, detail="low")
    kept = server.get(picture_key(digest)) if redis_max_kb else (tmp_path / "pictures" / digest).read_bytes()
    assert kept == PNG
    client.submit(messages=[{"role": "user", "content": ["What is this?", picture, client.put_picture(JPEG)]}])
    (message,) = bus.read_all(pipeline.request_topic("interactive"))
    request = decode_message(Request, message.value)
    assert [one.digest for one in request.pictures] == [digest, hashlib.sha256(JPEG).hexdigest()]
    for wrong, why in ((b"hello", "PNG, JPEG, WebP or GIF"), (bytes(8 * 2**20 + 1), "may have 8,388,608")):
        with pytest.raises(InvalidRequest, match=why):
            client.put_picture(wrong)


async def test_a_client_puts_a_picture_where_a_loop_runs(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PICTURE_REDIS_MAX_KB", "0")
    monkeypatch.setenv("PENSTOCK_BATCH_STORE", str(tmp_path))
    with Client(redis=redis_url) as client:
        assert (tmp_path / "pictures" / client.put_picture(PNG).digest).read_bytes() == PNG
