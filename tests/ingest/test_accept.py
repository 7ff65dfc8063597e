"""From a POST to requests in the pipeline, in this process: what is refused, published, published again, and told."""

import asyncio
import json
import threading
import uuid
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import redis
from fastapi import FastAPI

from penstock.client.aio import AsyncClient
from penstock.client.sync import Client
from penstock.config.settings import BusSettings, RecordSettings
from penstock.errors import BusUnavailable, IdConflict, RequestTooLarge, SettingsError
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway import accept as accepting
from penstock.ingest.gateway.accept import RequestHeaders, accept_request
from penstock.ingest.gateway.fallback import choose_pipeline
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.models import ServedModel
from penstock.ingest.openai import ENDPOINTS
from penstock.ingest.openai.endpoint import StreamMeta, SubmitArgs, build_request
from penstock.ingest.openai.sse import ResumePoint
from penstock.ingest.streaming import broadcast as broadcasting
from penstock.ingest.streaming.answers import read_answers
from penstock.ingest.streaming.broadcast import LiveBroadcast
from penstock.ingest.streaming.sse import StreamFeed
from penstock.ingest.streaming.stream_meta import StreamMetaStore
from penstock.ingest.tenants import Caller
from penstock.messages import MAX_REQUEST_BYTES, EndEvent, Request, Usage, now_s
from penstock.names import CLASSES, Pipeline, rate_key, stream_meta_key
from penstock.ops import lag, status
from penstock.ops.lag import LagWatch, PipelineLag
from penstock.ops.live import LiveWatch
from penstock.record import Record
from penstock.redis.client import async_redis_client, redis_client
from penstock.redis.servers import Sharded
from sim.waiting import PATIENCE_S
from tests.draws import mark_some
from tests.gateways import ScriptedPipeline
from tests.record.play import end, prefill, say

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY, NO_KEY = RequestHeaders(idempotency_key="k"), RequestHeaders()


@dataclass
class Site:
    """Two gateways over a scripted pipeline, and a caller."""

    scripted: ScriptedPipeline
    gateways: list[Gateway]
    patch: pytest.MonkeyPatch
    caller: Caller = field(default_factory=lambda: Caller(tenant=f"t-{uuid.uuid4().hex[:12]}"))

    def __post_init__(self) -> None:
        self.server, self.record = self.scripted.server, self.scripted.record
        self.metas = [gateway.stream_metas for gateway in self.gateways]

    def list_published(self) -> list[str]:
        return [request.id for request in self.scripted.read_requests()]

    async def post(self, number: int, headers: RequestHeaders = KEY, **body: Any) -> StreamMeta:
        endpoint = ENDPOINTS["/v1/completions"]
        parsed = endpoint.parse_body({"model": self.scripted.model, "prompt": "hello", "max_tokens": 5} | body)
        meta, *_ = await accept_request(self.gateways[number], self.caller, headers, endpoint, parsed, now_s())
        return meta

    async def refuse(self, number: int, headers: RequestHeaders = KEY, **body: Any) -> ApiError:
        with pytest.raises(ApiError) as refused:
            await self.post(number, headers, **body)
        return refused.value

    def answer(self, meta: StreamMeta, body: str) -> None:
        """Play the workers, for a request with that body."""
        claim = prefill(self.record, meta.id, body=body)
        say(self.record, claim, [1, 2])
        self.record.finish_request(claim, end())

    async def is_renewed(self, metas: StreamMetaStore, meta: StreamMeta) -> bool:
        """Whether a store that renews what it holds gives a stream's metadata more time."""
        self.server.pexpire(stream_meta_key(meta.id), 60_000)
        await metas.renew_all()
        return self.server.pttl(stream_meta_key(meta.id)) > 60_000


@pytest.fixture
def site(scripted: ScriptedPipeline, gateways: list[FastAPI], monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(scripted, [app.state.gateway for app in gateways], monkeypatch)


def refuse_to_make(*_: object) -> None:
    raise AssertionError("a request was made")


@pytest.mark.proof
async def test_each_post_under_one_key_costs_a_request_and_publishes_nothing_more(site: Site) -> None:
    site.caller = replace(site.caller, requests_per_min=3)
    metas = [await site.post(n % 2) for n in range(3)]
    assert len({meta.id for meta in metas}) == 1, "gateways agree about the id"
    for number in range(2):
        error = await site.refuse(number)
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert site.list_published() == [metas[0].id]


async def test_what_was_not_published_is_published_by_the_next_post(site: Site) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise BusUnavailable("no acknowledgement")

    with site.patch.context() as patch:
        patch.setattr(AsyncClient, "send", refuse)
        with pytest.raises(BusUnavailable):
            await site.post(0)
    name = "cmpl-" + await site.metas[0].derive_name(site.caller.tenant, "k")
    client = site.gateways[1].get_client(site.scripted.model)
    assert await client.cancel(name)  # which makes a record that no worker has seen
    for number in (1, 0):
        assert (await site.post(number)).id == name
        assert site.list_published() == [name]


async def test_what_waits_is_published_again_once_a_minute_and_what_a_worker_has_seen_never(site: Site) -> None:
    site.patch.setattr(accepting, "REPUBLISH_AFTER_S", 0.0)
    meta = await site.post(0)
    await site.post(1)
    assert len(site.list_published()) == 2
    prefill(site.record, meta.id, body=meta.bodies[0])
    await site.post(0)
    assert len(site.list_published()) == 2


@pytest.mark.parametrize("body", [{"prompt": "x" * (MAX_REQUEST_BYTES // 4), "n": 5}, {"prompt": [[7] * 100_000] * 20}])
async def test_prompts_times_n_are_bounded_before_anything_is_made_or_taken(site: Site, body: dict[str, Any]) -> None:
    site.patch.setattr(accepting, "build_request", refuse_to_make)
    site.caller = replace(site.caller, requests_per_min=3)
    with pytest.raises(RequestTooLarge, match="fewer choices"):
        await site.post(0, NO_KEY, **body)
    assert not site.server.exists(rate_key(site.caller.tenant))


async def test_what_its_topic_does_not_take_costs_nothing(site: Site) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RequestTooLarge("the brokers take less")

    site.caller = replace(site.caller, tokens_per_min=10)
    with site.patch.context() as patch:
        patch.setattr(AsyncClient, "send", refuse)
        with pytest.raises(RequestTooLarge):
            await site.post(0, NO_KEY)
    await site.post(0, NO_KEY)


async def test_the_key_of_what_is_too_large_is_free_and_what_was_written_of_it_is_paid_for(site: Site) -> None:
    send = AsyncClient.send

    async def refuse_long(client: AsyncClient, encoded: Any, *args: Any, **named: Any) -> str:
        if "long" in (encoded.request.prompt or ""):
            raise RequestTooLarge("the brokers take less")
        return await send(client, encoded, *args, **named)

    site.patch.setattr(AsyncClient, "send", refuse_long)
    site.patch.setattr(site.gateways[0].admission, "settle", settle := AsyncMock())
    for prompt in ("long", ["hello", "long"]):
        with pytest.raises(RequestTooLarge):
            await site.post(0, KEY, prompt=prompt)
        assert await site.metas[1].find_meta("cmpl-" + await site.metas[0].derive_name(site.caller.tenant, "k")) is None
    (written,) = site.scripted.read_requests()
    meta = await site.post(1, KEY, prompt=["hello", "short"])
    assert site.list_published() == [written.id, *meta.request_ids]
    for request_id, body in zip(meta.request_ids, meta.bodies, strict=True):
        claim = prefill(site.record, request_id, body=body)
        say(site.record, claim, [1, 2])
        site.record.finish_request(claim, end().model_copy(update={"usage": Usage(completion_tokens=2)}))
    assert [answer.token_ids for answer in await read_answers(site.gateways[1], meta)] == [[1, 2]] * 2
    while settle.await_count < 2:
        await asyncio.sleep(0.01)
    assert [call.args[1].completion_tokens for call in settle.await_args_list] == [0, 2]


async def test_who_is_refused_by_the_limits_has_nothing_made(site: Site) -> None:
    site.caller = replace(site.caller, requests_per_min=1)
    await site.post(0, NO_KEY)
    site.patch.setattr(accepting, "build_request", refuse_to_make)
    assert (await site.refuse(0, NO_KEY, prompt="x" * 1_000_000, n=8)).status == 429


async def test_large_requests_are_made_beside_the_event_loop(site: Site) -> None:
    loops = list[object]()

    def make(args: SubmitArgs) -> Request:
        loops.append(asyncio._get_running_loop())
        return build_request(args)

    site.patch.setattr(accepting, "build_request", make)
    await site.post(0, NO_KEY, prompt="x" * 200_000, n=2)
    assert loops == [None, None]
    assert [len(request.prompt or "") for request in site.scripted.read_requests()] == [200_000] * 2


async def test_an_answer_is_told_to_its_own_body_alone(site: Site) -> None:
    other = await site.post(0)
    site.answer(other, body="f" * 64)
    with pytest.raises(IdConflict):
        await read_answers(site.gateways[1], other)

    async def ended(_: object) -> None:
        pass

    feed = StreamFeed(site.gateways[0], other, ResumePoint(1), ended)
    sent = b"".join([frame async for frame in feed.read_frames()])
    assert (b"id_conflict" in sent, b'"text"' in sent) == (True, False)

    own = await site.post(0, NO_KEY)
    site.answer(own, body=own.bodies[0])
    (found,) = await read_answers(site.gateways[1], own)
    assert found.token_ids == [1, 2]


async def test_an_id_cannot_be_told_from_tenant_and_key(site: Site) -> None:
    mine, again = [await metas.derive_name("acme", "k") for metas in site.metas]
    assert mine == again
    assert mine != await site.metas[0].derive_name("other", "k")
    site.server.delete("penstock:gateway:secret")
    assert mine == await site.metas[0].derive_name("acme", "k"), "it gives the secret back to a Redis that lost it"
    stranger = StreamMetaStore(site.gateways[0].servers, RecordSettings(), site.gateways[0]._end_lost)
    site.server.delete("penstock:gateway:secret")
    assert mine != await stranger.derive_name("acme", "k")


async def test_metadata_is_renewed_until_its_requests_have_ended(site: Site) -> None:
    meta = await site.post(0)
    assert 0 < site.server.pttl(stream_meta_key(meta.id)) <= 3600 * 1000
    first, second = site.metas
    assert await site.is_renewed(first, meta)
    assert not await site.is_renewed(second, meta), "it has never seen it"
    await second.find_of_tenant(meta.id, meta.tenant)
    assert await site.is_renewed(second, meta), "it has a reader"
    site.answer(meta, body=meta.bodies[0])
    for metas in site.metas:
        assert await site.is_renewed(metas, meta), "kept as long as its records"
        assert not await site.is_renewed(metas, meta)


async def test_a_request_whose_record_may_have_expired_does_not_count_as_lost(site: Site) -> None:
    meta = await site.post(0, KEY)
    old = meta.model_copy(update={"published": now_s() - 3601, "places": {meta.id: "gone@0-1"}})
    site.server.set(stream_meta_key(meta.id), old.model_dump_json())
    second = site.metas[1]
    await second.find_of_tenant(meta.id, meta.tenant)
    await second.renew_all()
    assert site.record.read_status(meta.id) is None


@pytest.mark.parametrize("headers", mark_some([KEY, NO_KEY], pytest.mark.proof))
async def test_a_request_whose_message_is_deleted_unread_ends_with_its_error(
    site: Site, headers: RequestHeaders
) -> None:
    """By the gateway that took it, or by another one that has a reader of it. Not one that a worker has seen."""
    lost, taken = await site.post(0, headers), await site.post(0, NO_KEY)
    prefill(site.record, taken.id, body=taken.bodies[0])
    first, second = site.metas
    await first.renew_all()
    assert site.record.read_status(lost.id) is None, "it waits"
    site.server.delete(site.scripted.pipeline.stream_key(site.scripted.pipeline.request_topic("interactive")))
    if headers is NO_KEY:
        site.patch.setattr(first, "_end_lost", AsyncMock(side_effect=BusUnavailable("this one is away")))
        await first.renew_all()
        await second.find_of_tenant(lost.id, lost.tenant)
        first = second
    await first.renew_all()
    (stream,) = site.gateways[1].read_events(lost)
    (ended,) = [event async for events in stream for event in events]
    assert isinstance(ended, EndEvent)
    assert ended.error is not None
    assert ended.error.code == "request_lost"
    assert site.record.read_log(taken.id) == []
    claim = prefill(site.record, lost.id, body=lost.bodies[0])
    assert claim.is_ended, "a worker that has it after all finds the end"


async def test_metadata_is_renewed_until_its_requests_on_all_servers_have_ended(site: Site, redis_url: str) -> None:
    urls = [redis_url, redis_url.rpartition("/")[0] + "/9"]
    servers = Sharded.from_urls(",".join(urls), async_redis_client)
    ids = [uuid.uuid4().hex for _ in range(64)]
    chosen = [next(name for name in ids if servers[name] is part) for part in servers.parts]
    posted = await site.post(0)
    metas = StreamMetaStore(servers, RecordSettings(), site.gateways[0]._end_lost)
    meta = await metas.put(posted.model_copy(update={"id": uuid.uuid4().hex, "request_ids": chosen}))
    for url, request_id in zip(urls, chosen, strict=True):
        assert await site.is_renewed(metas, meta)
        with redis_client(url) as server, closing(Record(server, site.scripted.pipeline, RecordSettings())) as record:
            record.finish_request(prefill(record, request_id), end())
    assert await site.is_renewed(metas, meta), "kept as long as its records"
    assert not await site.is_renewed(metas, meta)
    for part in servers.parts:
        await part.aclose()


def lag_of(wait_s: float | None, *, is_served: bool = True) -> PipelineLag:
    return PipelineLag({}, dict.fromkeys(CLASSES, wait_s), None, dict.fromkeys(CLASSES), is_served)


AWAY = lag_of(None, is_served=False)


@pytest.mark.parametrize(
    ("own", "endpoints", "args", "falls_back"),
    [
        (AWAY, lag_of(None), {}, True),
        (lag_of(4.1), lag_of(3.9), {}, True),
        (lag_of(3.9), lag_of(0.0), {}, False),
        (lag_of(None), lag_of(0.0), {}, False),
        (None, lag_of(0.0), {}, False),
        (AWAY, AWAY, {}, False),
        (AWAY, None, {}, False),
        (AWAY, lag_of(4.1), {}, False),
        (AWAY, lag_of(0.0), {"priority_class": "batch"}, False),
        (AWAY, lag_of(0.0), {"token_ids": [1]}, False),
        (AWAY, lag_of(0.0), {"logprobs": 1}, False),
        (AWAY, lag_of(0.0), {"prompt_logprobs": 0}, False),
        (AWAY, lag_of(0.0), {"logprobs": 1, "messages": []}, True),
    ],
)
async def test_endpoints_answer_where_own_workers_cannot_in_time_and_they_can(
    site: Site, own: PipelineLag | None, endpoints: PipelineLag | None, args: SubmitArgs, falls_back: bool
) -> None:
    gateway, name = site.gateways[0], site.scripted.model
    other = ServedModel(name, name, f"{name}-endpoints", 0.0, is_endpoint=True)
    site.patch.setattr(gateway.models, "find_fallback", lambda _: other)
    lags = {Pipeline(name): own, Pipeline(other.pipeline): endpoints}
    site.patch.setattr(gateway.admission.lag_cache, "get_lag", AsyncMock(side_effect=lags.get))
    served = await gateway.models.find_model(name)
    for caller in (site.caller, replace(site.caller, fallback=True)):
        chosen = await choose_pipeline(gateway, caller, served, [args], None, has_pictures=False)
        assert chosen is (other if falls_back and caller.fallback else served)
        assert await choose_pipeline(gateway, caller, served, [args], None, has_pictures=True) is served


async def test_a_post_that_joins_stays_with_the_pipeline_that_was_chosen(site: Site) -> None:
    """Whatever would be chosen now, and whatever gateway it comes to: the request is published in one pipeline."""
    name = site.scripted.model
    url = site.scripted.addresses.stream_url
    with ScriptedPipeline(url, Pipeline(f"{name}-endpoints"), name, kind="endpoint") as endpoints:
        site.caller = replace(site.caller, fallback=True)
        lags = {site.scripted.pipeline: AWAY, endpoints.pipeline: lag_of(0.0)}
        for gateway in site.gateways:
            site.patch.setattr(gateway.admission.lag_cache, "get_lag", AsyncMock(side_effect=lags.get))
            await gateway.models.read_names()
        first = await site.post(0)
        assert first.pipeline == endpoints.pipeline.name
        lags[site.scripted.pipeline] = lag_of(0.0)
        assert (await site.post(1)).pipeline == endpoints.pipeline.name
        site.patch.setattr(accepting, "REPUBLISH_AFTER_S", -1.0)
        await site.post(1)
        assert {request.id for request in endpoints.read_requests()} == {first.id}
        assert site.list_published() == []


async def test_what_a_tenant_sees_of_the_pipeline_names_no_worker(site: Site) -> None:
    seen, broadcast = {}, LiveBroadcast(site.gateways[0].metrics.watch_pipeline(site.scripted.pipeline.name))
    for is_whole in (True, False):
        async with aclosing(broadcast.read_frames(is_whole=is_whole)) as frames:
            seen[is_whole] = json.loads((await anext(frames)).partition(b"data: ")[2])
    broadcast.stop()
    assert [worker["name"] for worker in seen[True]["workers"]] == ["nobody"]
    assert set(seen[False]) == {"at", "pipeline", "health", "lag", "ttft_s", "itl_s", "text_s"}
    assert seen[False]["health"] == {"state": seen[True]["health"]["state"], "reasons": []}


async def test_a_look_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page counts on it: a gateway from which nothing comes is away."""
    monkeypatch.setattr(broadcasting, "KEEP_ALIVE_S", 0.01)
    has_ended = threading.Event()

    class SlowWatch:
        def read_latest(self) -> dict[str, object]:
            assert has_ended.wait(PATIENCE_S)
            return {"health": {"state": "ok"}}

    live = LiveBroadcast(cast(LiveWatch, SlowWatch()))
    async with aclosing(live.read_frames(is_whole=False)) as frames:
        assert (await anext(frames)).startswith(b": ")
        has_ended.set()
        while (frame := await anext(frames)).startswith(b": "):
            pass
        assert frame.startswith(b"event: look")


async def test_settings_are_read_once(site: Site) -> None:
    client = Client(site.scripted.addresses)
    site.patch.setenv("PENSTOCK_BUS_PARTITIONS", "not a number")
    with pytest.raises(SettingsError):
        Client(site.scripted.addresses)
    with client:
        await asyncio.to_thread(client.submit, "hello")
        await asyncio.to_thread(client.lag)
    await site.post(0)
    await site.gateways[0].get_client(site.scripted.model).lag()
    assert len(site.list_published()) == 2


async def test_all_lags_are_read_by_one_connection(site: Site) -> None:
    site.patch.setattr(lag, "MAX_AGE_S", 0.0)
    made = list[str]()

    def count_client(url: str) -> "redis.Redis":
        made.append(url)
        return redis_client(url)

    for module in (lag, status):
        site.patch.setattr(module, "redis_client", count_client)
    watch = LagWatch(site.scripted.addresses, BusSettings())
    for _ in range(3):
        watch.read_latest()
    watch.close()
    assert len(made) == 1


async def test_a_key_whose_answer_is_forgotten_does_not_run_again(site: Site) -> None:
    """A client that comes back after a night with the same key is told so."""
    site.patch.setattr(site.record, "_settings", RecordSettings(lease_s=600, remember_days=7))
    for gateway in site.gateways:
        for log in gateway.get_client(site.scripted.model)._logs.parts:
            site.patch.setattr(log, "_remember_days", 7)
    meta = await site.post(0)
    claim = prefill(site.record, meta.id, body=meta.bodies[0])
    site.record.finish_request(claim, end(), "place-1")
    site.scripted.forget(meta.id)
    error = await site.refuse(1)
    assert (error.status, error.code) == (410, "idempotency_key_used")
    assert site.list_published() == [meta.id]
    assert await site.post(1, RequestHeaders(idempotency_key="another"))
