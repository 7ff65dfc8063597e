"""From a POST to requests in the pipeline, in this process: what is refused, published, published again, and told."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest
import redis

from penstock.client.aio import AsyncClient
from penstock.client.core import make_request
from penstock.client.sync import Client
from penstock.config.settings import BusSettings, GatewayProcessSettings, RecordSettings, load_group
from penstock.errors import BusUnavailable, IdConflict, RequestTooLarge, SettingsError
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway import accept as accepting
from penstock.ingest.gateway.accept import RequestHeaders, accept_request
from penstock.ingest.gateway.sse import StreamFeed
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.gateway.stream_meta import StreamMetaStore
from penstock.ingest.gateway.streaming import read_answers
from penstock.ingest.openai import ENDPOINTS
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.openai.sse import ResumePoint
from penstock.ingest.tenants import Caller
from penstock.messages import MAX_REQUEST_BYTES, Request, now_s
from penstock.names import rate_key, stream_meta_key
from penstock.ops import lag, status
from penstock.ops.lag import LagWatch
from penstock.record import Record
from penstock.redis.client import async_redis_client, redis_client
from penstock.redis.servers import Sharded
from penstock.telemetry.meters import Meters
from tests.gateways import ScriptedPipeline
from tests.record.play import end, prefill, say

KEY, NO_KEY = RequestHeaders(idempotency_key="k"), RequestHeaders()


@pytest.fixture
async def gateways(scripted: ScriptedPipeline) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        made = [Gateway(load_group(GatewayProcessSettings), scripted.addresses, Meters()) for _ in range(2)]
        for gateway in made:
            await gateway.open()
            stack.push_async_callback(gateway.close)
        yield made


@pytest.fixture
def caller() -> Caller:
    return Caller(tenant=f"t-{uuid.uuid4().hex[:12]}")


async def post(gateway: Gateway, caller: Caller, headers: RequestHeaders = KEY, **body: Any) -> StreamMeta:
    endpoint = ENDPOINTS["/v1/completions"]
    parsed = endpoint.parse_body({"model": gateway.addresses.pipeline, "prompt": "hello", "max_tokens": 5} | body)
    meta, _ = await accept_request(gateway, caller, headers, endpoint, parsed, now_s())
    return meta


def answer(scripted: ScriptedPipeline, meta: StreamMeta, body: str) -> None:
    """Play the workers, for a request with that body."""
    claim = prefill(scripted.record, meta.id, body=body)
    say(scripted.record, claim, [1, 2])
    scripted.record.finish_request(claim, end())


def refuse_to_make(*_: object) -> None:
    raise AssertionError("a request was made")


async def test_each_post_under_one_key_costs_a_request_and_publishes_nothing_more(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller
) -> None:
    limited = replace(caller, requests_per_min=3)
    metas = [await post(gateways[n % 2], limited) for n in range(3)]
    assert len({meta.id for meta in metas}) == 1, "gateways agree about the id"
    for gateway in gateways:
        with pytest.raises(ApiError) as refused:
            await post(gateway, limited)
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert [request.id for request in scripted.read_requests()] == [metas[0].id]


async def test_what_was_not_published_is_published_by_the_next_post(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise BusUnavailable("no acknowledgement")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncClient, "send", refuse)
        with pytest.raises(BusUnavailable):
            await post(gateways[0], caller)
    name = "cmpl-" + await gateways[0].stream_metas.derive_name(caller.tenant, "k")
    assert await gateways[1].get_client(scripted.model).cancel(name)  # which makes a record that no worker has seen
    meta = await post(gateways[1], caller)
    assert [request.id for request in scripted.read_requests()] == [meta.id] == [name]
    await post(gateways[0], caller)
    assert len(scripted.read_requests()) == 1


async def test_what_waits_is_published_again_once_a_minute_and_what_a_worker_has_seen_never(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "REPUBLISH_AFTER_S", 0.0)
    meta = await post(gateways[0], caller)
    await post(gateways[1], caller)
    assert len(scripted.read_requests()) == 2
    prefill(scripted.record, meta.id, body=meta.bodies[0])
    await post(gateways[0], caller)
    assert len(scripted.read_requests()) == 2


async def test_prompts_times_n_are_bounded_before_anything_is_made_or_taken(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "make_request", refuse_to_make)
    limited = replace(caller, requests_per_min=3)
    with pytest.raises(RequestTooLarge, match="fewer choices"):
        await post(gateways[0], limited, NO_KEY, prompt="x" * (MAX_REQUEST_BYTES // 4), n=5)
    with pytest.raises(RequestTooLarge, match="fewer choices"):
        await post(gateways[0], limited, NO_KEY, prompt=[[7] * 100_000] * 20)
    assert not scripted.server.exists(rate_key(limited.tenant))


async def test_who_is_refused_by_the_limits_has_nothing_made(
    gateways: list[Gateway], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = replace(caller, requests_per_min=1)
    await post(gateways[0], limited, NO_KEY)
    monkeypatch.setattr(accepting, "make_request", refuse_to_make)
    with pytest.raises(ApiError) as refused:
        await post(gateways[0], limited, NO_KEY, prompt="x" * 1_000_000, n=8)
    assert refused.value.status == 429


async def test_large_requests_are_made_beside_the_event_loop(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_on_the_loop = []

    def make(prompt: Any, fields: Any) -> Request:
        try:
            made_on_the_loop.append(bool(asyncio.get_running_loop()))
        except RuntimeError:
            made_on_the_loop.append(False)
        return make_request(prompt, fields)

    monkeypatch.setattr(accepting, "make_request", make)
    await post(gateways[0], caller, NO_KEY, prompt="x" * 200_000, n=2)
    assert made_on_the_loop == [False, False]
    assert [len(request.prompt or "") for request in scripted.read_requests()] == [200_000] * 2


async def test_an_answer_is_told_to_its_own_body_alone(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller
) -> None:
    other = await post(gateways[0], caller)
    answer(scripted, other, body="f" * 64)
    with pytest.raises(IdConflict):
        await read_answers(gateways[1], other)

    async def ended(_: object) -> None:
        pass

    sent = b"".join([frame async for frame in StreamFeed(gateways[0], other, ResumePoint(1), ended).read_frames()])
    assert b"id_conflict" in sent
    assert b'"text"' not in sent

    own = await post(gateways[0], caller, NO_KEY)
    answer(scripted, own, body=own.bodies[0])
    (found,) = await read_answers(gateways[1], own)
    assert found.token_ids == [1, 2]


async def test_an_id_cannot_be_told_from_tenant_and_key(scripted: ScriptedPipeline, gateways: list[Gateway]) -> None:
    mine, again = [await gateway.stream_metas.derive_name("acme", "k") for gateway in gateways]
    assert mine == again
    assert mine != await gateways[0].stream_metas.derive_name("other", "k")
    scripted.server.delete("penstock:gateway:secret")
    kept = await gateways[0].stream_metas.derive_name("acme", "k")
    assert mine == kept, "a gateway gives the secret back to a Redis that lost it"
    stranger = StreamMetaStore(gateways[0].servers, RecordSettings())
    scripted.server.delete("penstock:gateway:secret")
    assert mine != await stranger.derive_name("acme", "k")


async def is_renewed(scripted: ScriptedPipeline, metas: StreamMetaStore, meta: StreamMeta) -> bool:
    """Whether a store that renews what it holds gives a stream's metadata more time."""
    scripted.server.pexpire(stream_meta_key(meta.id), 60_000)
    await metas.renew_all()
    return scripted.server.pttl(stream_meta_key(meta.id)) > 60_000


async def test_metadata_is_renewed_until_its_requests_have_ended(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller
) -> None:
    meta = await post(gateways[0], caller)
    assert 0 < scripted.server.pttl(stream_meta_key(meta.id)) <= 3600 * 1000
    first, second = (gateway.stream_metas for gateway in gateways)
    assert await is_renewed(scripted, first, meta)
    assert not await is_renewed(scripted, second, meta), "it has never seen it"
    await second.find_of_tenant(meta.id, meta.tenant)
    assert await is_renewed(scripted, second, meta), "it has a reader"
    answer(scripted, meta, body=meta.bodies[0])
    for metas in (first, second):
        assert await is_renewed(scripted, metas, meta), "kept as long as its records"
        assert not await is_renewed(scripted, metas, meta)


async def test_metadata_is_renewed_until_its_requests_on_all_servers_have_ended(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller, redis_url: str
) -> None:
    urls = [redis_url, redis_url.rpartition("/")[0] + "/9"]
    servers = Sharded.from_urls(",".join(urls), async_redis_client)
    ids = [uuid.uuid4().hex for _ in range(64)]
    chosen = [next(name for name in ids if servers[name] is part) for part in servers.parts]
    posted = await post(gateways[0], caller)
    metas = StreamMetaStore(servers, RecordSettings())
    meta = await metas.put(posted.model_copy(update={"id": uuid.uuid4().hex, "request_ids": chosen}))
    for url, request_id in zip(urls, chosen, strict=True):
        assert await is_renewed(scripted, metas, meta)
        with redis_client(url) as server:
            record = Record(server, scripted.pipeline, RecordSettings(lease_s=30))
            record.finish_request(prefill(record, request_id), end())
            record.close()
    assert await is_renewed(scripted, metas, meta), "kept as long as its records"
    assert not await is_renewed(scripted, metas, meta)
    for part in servers.parts:
        await part.aclose()


async def test_what_a_tenant_sees_of_the_pipeline_names_no_worker(gateways: list[Gateway]) -> None:
    seen = {}
    for is_whole in (True, False):
        async with aclosing(gateways[0].broadcast.read_frames(is_whole=is_whole)) as frames:
            seen[is_whole] = json.loads((await anext(frames)).partition(b"data: ")[2])
    assert [worker["name"] for worker in seen[True]["workers"]] == ["nobody"]
    assert set(seen[False]) == {"at", "pipeline", "health", "lag", "ttft_s", "itl_s"}
    assert seen[False]["health"] == {"state": seen[True]["health"]["state"], "reasons": []}


async def test_settings_are_read_once(
    scripted: ScriptedPipeline, gateways: list[Gateway], caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(scripted.addresses)
    monkeypatch.setenv("PENSTOCK_BUS_PARTITIONS", "not a number")
    with pytest.raises(SettingsError):
        Client(scripted.addresses)
    with client:
        await asyncio.to_thread(client.submit, "hello")
        await asyncio.to_thread(client.lag)
    await post(gateways[0], caller)
    await gateways[0].get_client(scripted.model).lag()
    assert len(scripted.read_requests()) == 2


def test_all_lags_are_read_by_one_connection(scripted: ScriptedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "MAX_AGE_S", 0.0)
    made = []

    def count_client(url: str) -> "redis.Redis":
        made.append(url)
        return redis_client(url)

    for module in (lag, status):
        monkeypatch.setattr(module, "redis_client", count_client)
    watch = LagWatch(scripted.addresses, BusSettings())
    for _ in range(3):
        watch.read_latest()
    watch.close()
    assert len(made) == 1
