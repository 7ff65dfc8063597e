"""Streams that nobody reads: who is counted, what is cancelled, and what is not."""

import uuid
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis.asyncio

from penstock.config.settings import RecordSettings
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.streaming import unread
from penstock.ingest.streaming.stream_meta import StreamMetaStore
from penstock.ingest.streaming.unread import UnreadStreams
from penstock.names import Pipeline, stream_meta_key, stream_readers_key
from penstock.redis.servers import Sharded
from sim.waiting import wait_for
from tests.gateways import ScriptedPipeline

AT_ONCE, NEVER = 1e-9, 0.0


class Site:
    """Two gateways that look when they are told to, and what they cancelled of one stream."""

    def __init__(self, client: "redis.asyncio.Redis", pipeline: Pipeline, cancel_s: float, *, is_lost: bool) -> None:
        metas = StreamMetaStore(Sharded([""], [client]), RecordSettings(), AsyncMock())
        self.here, self.there = (UnreadStreams(client, metas, cancel_s) for _ in range(2))
        name = uuid.uuid4().hex
        self.meta = StreamMeta(
            id=name, path="/v1/completions", model="m", created=0, request_ids=[name], pipeline=pipeline.name,
            is_lost_unread=is_lost,
        )  # fmt: skip
        self.cancelled: list[str] = []

    async def look(self) -> tuple[int, int]:
        """Let both look, and return how many were cancelled and how many are unread."""

        async def cancel(meta: StreamMeta) -> None:
            self.cancelled.append(meta.id)

        for gateway in (self.here, self.there):
            await gateway.check_streams(cancel)
        assert self.here.count("another") == 0
        return len(set(self.cancelled)), self.here.count("default") + self.there.count()


@pytest.mark.parametrize(
    ("cancel_s", "is_lost", "found"), [(AT_ONCE, True, (1, 0)), (AT_ONCE, False, (0, 1)), (NEVER, True, (0, 1))]
)
@pytest.mark.parametrize("ends", [True, False])
async def test_what_is_left_is_counted_until_it_ends_and_cancelled_where_that_is_wanted(
    client: "redis.asyncio.Redis", pipeline: Pipeline, cancel_s: float, is_lost: bool, found: Any, ends: bool
) -> None:
    site = Site(client, pipeline, cancel_s, is_lost=is_lost)
    await site.here.note_left(site.meta)
    if ends:
        await client.hset(pipeline.record_key(site.meta.id), "stage", "end")
    assert await site.look() == ((0, 0) if ends else found)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ("left here, come there", (0, 0)),
        ("left here, come here", (0, 0)),
        ("come there, left here", (0, 0)),  # the other connection had not been closed yet
        ("left here, come there, left there", (1, 0)),
        ("left here, come there, left there, come here", (0, 0)),
        ("come there, left there, left here", (1, 0)),
        ("left here, lost", (0, 0)),  # Redis lost its data: who reads it is not known
    ],
)
async def test_who_came_back_or_is_there_is_read_for(
    client: "redis.asyncio.Redis", pipeline: Pipeline, steps: str, found: tuple[int, int]
) -> None:
    site = Site(client, pipeline, AT_ONCE, is_lost=True)
    for step in steps.split(", "):
        what, _, where = step.partition(" ")
        gateway = site.there if where == "there" else site.here
        if what == "lost":
            await client.delete(stream_readers_key(site.meta.id))
        else:
            await (gateway.note_left(site.meta) if what == "left" else gateway.note_reader(site.meta))
    assert await site.look() == found
    assert await site.look() == found


def test_who_gave_something_to_come_back_by_keeps_what_was_asked(
    scripted: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "LOOK_S", 0.01)
    body = {"model": scripted.model, "prompt": "x", "max_tokens": 9, "stream": True}
    asked: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
        "plain": ("completions", {}, body),
        "key": ("completions", {"Idempotency-Key": uuid.uuid4().hex}, body),
        "session": ("completions", {"x-session-affinity": "chat"}, body),
        "cache key": ("completions", {}, body | {"prompt_cache_key": "chat"}),
        "store": ("responses", {}, {"model": scripted.model, "input": "x", "stream": True}),
        "no store": ("responses", {}, {"model": scripted.model, "input": "x", "stream": True, "store": False}),
    }
    with scripted.open_gateway(gateway={"cancel_unread_s": 0.001}) as gateway, gateway.client() as http:
        names = {}
        for what, (path, headers, asking) in asked.items():
            with http.stream("POST", f"/v1/{path}", json=asking, headers=headers) as answer:
                names[what] = answer.headers["x-request-id"]
        lost = {"plain", "no store"}
        for what, name in names.items():
            meta = StreamMeta.model_validate_json(scripted.server.get(stream_meta_key(name)) or b"")
            assert meta.is_lost_unread is (what in lost), what

        def is_cancelled(what: str) -> bool:
            status = scripted.record.read_status(names[what])
            return status is not None and status.cancelled

        wait_for(lambda: all(map(is_cancelled, lost)), "who cannot come back is cancelled")
        wait_for(lambda: "penstock_gateway_unread_streams 4.0" in http.get("/metrics").text, "the others are counted")
        busy = http.post("/v1/completions", json=body, headers={"x-penstock-reject-if-busy": "0"})
        assert busy.status_code == 429
        assert "; 4 of your unfinished requests are read by nobody any more" in busy.json()["error"]["message"]
        assert not any(map(is_cancelled, names.keys() - lost))
        answer = http.send(http.build_request("GET", f"/v1/streams/{names['key']}"), stream=True)
        wait_for(lambda: "penstock_gateway_unread_streams 3.0" in http.get("/metrics").text, "one is read again")
        answer.close()
