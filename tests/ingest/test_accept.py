"""From a POST to requests in the pipeline, in this process: what is refused, published, published again, and told."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import pytest
import redis

from penstock.bus.streams.bus import StreamsBus
from penstock.client.aio import AsyncClient
from penstock.client.core import make_request
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, GatewaySettings, RecordSettings
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
from penstock.messages import MAX_REQUEST_BYTES, Request, decode_message, now_s
from penstock.names import Pipeline, card_key, rate_key
from penstock.ops import lag, status
from penstock.ops.lag import LagWatch
from penstock.record import Record
from penstock.redis.client import async_redis_client, redis_client
from penstock.redis.servers import ByServer
from penstock.telemetry.meters import Meters
from penstock.worker.heartbeat import Heartbeat
from tests.record.play import end, prefill, say

PATH = "/v1/completions"
KEY = RequestHeaders(idempotency_key="k")


class Place:
    """A pipeline whose requests nobody takes, and gateways before it."""

    def __init__(self, pipeline: Pipeline, redis_url: str) -> None:
        self.pipeline, self.model = pipeline, pipeline.name
        self.server = redis.Redis.from_url(redis_url)
        self.bus = StreamsBus(pipeline, redis_url, BusSettings())
        self.bus.create_topics()
        self.record = Record(self.server, pipeline, RecordSettings(lease_s=30))
        self.addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url)
        self.caller = Caller(tenant=f"t-{uuid.uuid4().hex[:12]}")

    def published(self) -> list[Request]:
        found = self.bus.read_all(self.pipeline.request_topic("interactive"))
        return [decode_message(Request, message.value) for message in found]

    async def post(
        self, gateway: Gateway, wishes: RequestHeaders = KEY, caller: Caller | None = None, **body: Any
    ) -> StreamMeta:
        endpoint = ENDPOINTS[PATH]
        parsed = endpoint.parse_body({"model": self.model, "prompt": "hello", "max_tokens": 5} | body)
        card, _ = await accept_request(gateway, caller or self.caller, wishes, endpoint, parsed, now_s())
        return card

    def answer(self, card: StreamMeta, body: str) -> None:
        """Play the workers, for a request with that body."""
        claim = prefill(self.record, card.id, body=body)
        say(self.record, claim, [1, 2])
        self.record.finish_request(claim, end())


@pytest.fixture
def place(pipeline: Pipeline, redis_url: str) -> Iterator[Place]:
    beat = Heartbeat(redis_url, pipeline, "prefill", "nobody", 1.0)
    beat.update_status(state="ready", model=pipeline.name)
    with beat:
        made = Place(pipeline, redis_url)
        yield made
        made.record.close()
        made.server.close()


@pytest.fixture
async def gateways(place: Place) -> AsyncIterator[list[Gateway]]:
    async with AsyncExitStack() as stack:
        made = [Gateway(GatewaySettings(), place.addresses, Meters()) for _ in range(2)]
        for gateway in made:
            await gateway.open()
            stack.push_async_callback(gateway.close)
        yield made


async def test_each_post_under_one_key_costs_a_request_and_publishes_nothing_more(
    place: Place, gateways: list[Gateway]
) -> None:
    limited = Caller(tenant=place.caller.tenant, requests_per_min=3)
    cards = [await place.post(gateways[n % 2], caller=limited) for n in range(3)]
    assert len({card.id for card in cards}) == 1, "gateways agree about the id"
    for gateway in gateways:
        with pytest.raises(ApiError) as refused:
            await place.post(gateway, caller=limited)
        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert [request.id for request in place.published()] == [cards[0].id]


async def test_what_was_not_published_is_published_by_the_next_post(
    place: Place, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise BusUnavailable("no acknowledgement")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncClient, "send", refuse)
        with pytest.raises(BusUnavailable):
            await place.post(gateways[0])
    name = "cmpl-" + await gateways[0].stream_metas.derive_name(place.caller.tenant, "k")
    assert await gateways[1].get_client(place.model).cancel(name)  # which makes a record that no worker has seen
    card = await place.post(gateways[1])
    assert [request.id for request in place.published()] == [card.id] == [name]
    await place.post(gateways[0])
    assert len(place.published()) == 1


async def test_what_waits_is_published_again_once_a_minute_and_what_a_worker_has_seen_never(
    place: Place, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "REPUBLISH_AFTER_S", 0.0)
    card = await place.post(gateways[0])
    await place.post(gateways[1])
    assert len(place.published()) == 2
    prefill(place.record, card.id, body=card.bodies[0])
    await place.post(gateways[0])
    assert len(place.published()) == 2


async def test_prompts_times_n_are_bounded_before_anything_is_made_or_taken(
    place: Place, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("made")

    monkeypatch.setattr(accepting, "make_request", never)
    limited = Caller(tenant=place.caller.tenant, requests_per_min=3)
    with pytest.raises(RequestTooLarge, match="fewer choices"):
        await place.post(gateways[0], RequestHeaders(), limited, prompt="x" * (MAX_REQUEST_BYTES // 4), n=5)
    with pytest.raises(RequestTooLarge, match="fewer choices"):
        await place.post(gateways[0], RequestHeaders(), limited, prompt=[[7] * 100_000] * 20)
    assert not place.server.exists(rate_key(limited.tenant))


async def test_who_is_refused_by_the_limits_has_nothing_made(
    place: Place, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = Caller(tenant=place.caller.tenant, requests_per_min=1)
    await place.post(gateways[0], RequestHeaders(), limited)

    def never(*_: object) -> None:
        raise AssertionError("made")

    monkeypatch.setattr(accepting, "make_request", never)
    with pytest.raises(ApiError) as refused:
        await place.post(gateways[0], RequestHeaders(), limited, prompt="x" * 1_000_000, n=8)
    assert refused.value.status == 429


async def test_large_requests_are_made_beside_the_event_loop(
    place: Place, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_on_the_loop = []

    def make(prompt: Any, fields: Any) -> Request:
        try:
            made_on_the_loop.append(bool(asyncio.get_running_loop()))
        except RuntimeError:
            made_on_the_loop.append(False)
        return make_request(prompt, fields)

    monkeypatch.setattr(accepting, "make_request", make)
    await place.post(gateways[0], RequestHeaders(), prompt="x" * 200_000, n=2)
    assert made_on_the_loop == [False, False]
    assert [len(request.prompt or "") for request in place.published()] == [200_000] * 2


async def test_an_answer_to_another_body_under_the_id_is_not_told(place: Place, gateways: list[Gateway]) -> None:
    card = await place.post(gateways[0])
    place.answer(card, body="f" * 64)
    with pytest.raises(IdConflict):
        await read_answers(gateways[1], card)

    async def ended(_: object) -> None:
        pass

    sent = b"".join([frame async for frame in StreamFeed(gateways[0], card, ResumePoint(1), ended).read_frames()])
    assert b"id_conflict" in sent
    assert b'"text"' not in sent


async def test_the_answer_to_its_own_body_is_told(place: Place, gateways: list[Gateway]) -> None:
    card = await place.post(gateways[0])
    place.answer(card, body=card.bodies[0])
    (answer,) = await read_answers(gateways[1], card)
    assert answer.token_ids == [1, 2]


async def test_an_id_cannot_be_told_from_tenant_and_key(place: Place, gateways: list[Gateway]) -> None:
    mine, again = [await gateway.stream_metas.derive_name("acme", "k") for gateway in gateways]
    assert mine == again
    assert mine != await gateways[0].stream_metas.derive_name("other", "k")
    place.server.delete("penstock:gateway:secret")
    assert mine == await gateways[0].stream_metas.derive_name("acme", "k"), (
        "a gateway gives it back to a Redis that lost it"
    )
    stranger = StreamMetaStore(gateways[0].servers, RecordSettings())
    place.server.delete("penstock:gateway:secret")
    assert mine != await stranger.derive_name("acme", "k")


async def test_a_card_is_renewed_until_its_requests_have_ended(place: Place, gateways: list[Gateway]) -> None:
    keep_ms = 3600 * 1000
    card = await place.post(gateways[0])
    key = card_key(card.id)
    assert 0 < place.server.pttl(key) <= keep_ms

    async def renewed(by: Gateway) -> bool:
        place.server.pexpire(key, 60_000)
        await by.stream_metas.renew_all()
        return place.server.pttl(key) > 60_000

    assert await renewed(gateways[0])
    assert not await renewed(gateways[1]), "it has never seen it"
    await gateways[1].stream_metas.find_of_tenant(card.id, card.tenant)
    assert await renewed(gateways[1]), "it has a reader"
    place.answer(card, body=card.bodies[0])
    for gateway in gateways:
        assert await renewed(gateway), "kept as long as its records"
        assert not await renewed(gateway)


async def test_a_card_is_renewed_until_its_requests_on_all_servers_have_ended(
    place: Place, gateways: list[Gateway], redis_url: str
) -> None:
    urls = [redis_url, redis_url.rpartition("/")[0] + "/9"]
    servers = ByServer.from_urls(",".join(urls), async_redis_client)
    ids = [uuid.uuid4().hex for _ in range(64)]
    chosen = [next(name for name in ids if servers[name] is part) for part in servers.parts]
    posted = await place.post(gateways[0])
    cards = StreamMetaStore(servers, RecordSettings())
    card = await cards.put(posted.model_copy(update={"id": uuid.uuid4().hex, "request_ids": chosen}))

    async def is_renewed() -> bool:
        place.server.pexpire(card_key(card.id), 60_000)
        await cards.renew_all()
        return place.server.pttl(card_key(card.id)) > 60_000

    for url, request_id in zip(urls, chosen, strict=True):
        assert await is_renewed()
        with redis_client(url) as server:
            record = Record(server, place.pipeline, RecordSettings(lease_s=30))
            record.finish_request(prefill(record, request_id), end())
            record.close()
    assert await is_renewed(), "kept as long as its records"
    assert not await is_renewed()
    for part in servers.parts:
        await part.aclose()


async def test_a_tenants_look_at_the_pipeline_names_no_worker(place: Place, gateways: list[Gateway]) -> None:
    looks = {}
    for is_whole in (True, False):
        async with aclosing(gateways[0].broadcast.read_frames(is_whole=is_whole)) as frames:
            looks[is_whole] = json.loads((await anext(frames)).partition(b"data: ")[2])
    assert [worker["name"] for worker in looks[True]["workers"]] == ["nobody"]
    assert set(looks[False]) == {"at", "pipeline", "health", "lag", "ttft_s", "itl_s"}
    assert looks[False]["health"] == {"state": looks[True]["health"]["state"], "reasons": []}


async def test_settings_are_read_once(
    place: Place, gateways: list[Gateway], monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    client = Client(redis=redis_url, pipeline=place.model)
    monkeypatch.setenv("PENSTOCK_BUS_PARTITIONS", "not a number")
    with pytest.raises(SettingsError):
        Client(redis=redis_url, pipeline=place.model)
    with client:
        await asyncio.to_thread(client.submit, "hello")
        await asyncio.to_thread(client.lag)
    await place.post(gateways[0])
    await gateways[0].get_client(place.model).lag()
    assert len(place.published()) == 2


def test_looks_share_one_connection(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "MAX_AGE_S", 0.0)
    made = []

    def counted(url: str) -> "redis.Redis":
        made.append(url)
        return redis_client(url)

    for module in (lag, status):
        monkeypatch.setattr(module, "redis_client", counted)
    watch = LagWatch(place.addresses, BusSettings())
    for _ in range(3):
        watch.read_latest()
    watch.close()
    assert len(made) == 1
