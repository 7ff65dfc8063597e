"""The events of responses and batches: which there are, and what a gateway's death costs them."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.settings import BatchSettings, WebhookSettings
from penstock.errors import BusUnavailable
from penstock.ingest.batch.answer import Pipelines
from penstock.ingest.batch.batches import BatchSpec, BatchStore
from penstock.ingest.batch.objects import ObjectStorage
from penstock.ingest.batch.work import BatchWork
from penstock.ingest.tenants import Caller, make_key
from penstock.ingest.webhooks import Webhooks, derive_tenant_secret
from penstock.messages import EndEvent
from penstock.names import WEBHOOKS_KEY, stream_meta_key, webhook_events_key
from penstock.redis.client import async_redis_client
from penstock.telemetry.meters import Meters
from sim.waiting import wait_for
from tests.gateways import GatewayProcess, ScriptedPipeline
from tests.ingest.batch_files import ScriptedClient, create_batch, lines, row
from tests.ingest.webhook_receiver import HANGS, SECRET, WebhookReceiver, receive_webhooks
from tests.record.play import decode, end, say


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receive_webhooks() as made:
        yield made


class Site:
    """Gateway processes over a scripted pipeline, and a tenant with a receiver of its own."""

    def __init__(self, scripted: ScriptedPipeline, folder: Path, url: str) -> None:
        self.scripted, self._folder = scripted, folder
        self.tenant = f"t-{uuid.uuid4().hex[:12]}"
        self.secret = derive_tenant_secret(SECRET, self.tenant)
        self.key, key_id, entry = make_key(self.tenant)
        book = {"tenants": {self.tenant: {"webhook_url": url}}, "keys": {key_id: entry.model_dump()}}
        (folder / "keys.json").write_text(json.dumps(book))

    def start(self) -> GatewayProcess:
        settings = {
            "GATEWAY_KEYS": str(self._folder / "keys.json"), "BATCH_STORE": str(self._folder / "store"),
            "BATCH_LOOK_S": "0.2", "BATCH_LEASE_S": "0.6", "RECORD_KEEP_S": "10",
            "WEBHOOK_SECRET": SECRET, "WEBHOOK_HOSTS": "127.0.0.1",
        }  # fmt: skip
        return GatewayProcess(self.scripted.addresses, self._folder, settings)

    def request(self, gateway: GatewayProcess, method: str, path: str, **more: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx.request(method, f"{gateway.url}/v1/{path}", headers=headers, timeout=None, **more)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ask(self, gateway: GatewayProcess, **more: Any) -> str:
        body = {"model": self.scripted.model, "input": "In the beginning", "background": True} | more
        name: str = self.request(gateway, "POST", "responses", json=body)["id"]
        return name

    def read_metrics(self, gateway: GatewayProcess) -> str:
        return httpx.get(f"{gateway.url}/metrics", timeout=None).text

    def finish(self, name: str, ending: EndEvent) -> None:
        claim = decode(self.scripted.record, name)
        say(self.scripted.record, claim, range(3))
        self.scripted.record.finish_request(claim, ending)

    def read_waiting(self) -> list[tuple[bytes, float]]:
        """Return the tenant's events that are not delivered, and when each is due."""
        found: Any = self.scripted.server.zrange(webhook_events_key(self.tenant), 0, -1, withscores=True)
        return list(found)

    def has_mark(self, name: str) -> bool:
        return bool(self.scripted.server.hexists(self.scripted.pipeline.responses_key, name))

    def hurry(self) -> None:
        """Make what waits due at once."""
        for event, _ in self.read_waiting():
            self.scripted.server.zadd(webhook_events_key(self.tenant), {event: time.time()}, xx=True)

    def clean(self) -> None:
        self.scripted.server.srem(WEBHOOKS_KEY, self.tenant)
        self.scripted.server.delete(webhook_events_key(self.tenant))


@pytest.fixture
def site(scripted: ScriptedPipeline, receiver: WebhookReceiver, tmp_path: Path) -> Iterator[Site]:
    made = Site(scripted, tmp_path, receiver.url)
    yield made
    made.clean()


def fail(code: str) -> EndEvent:
    return EndEvent.model_validate({"finish_reason": "error", "error": {"code": code, "message": "it went wrong"}})


def test_a_response_that_is_not_in_the_background_has_no_event(site: Site, receiver: WebhookReceiver) -> None:
    body = {"model": site.scripted.model, "input": "In the beginning", "stream": True}
    headers = {"authorization": f"Bearer {site.key}"}
    with site.start() as gateway:
        with httpx.stream("POST", f"{gateway.url}/v1/responses", json=body, headers=headers, timeout=None) as stream:
            name = stream.headers["x-request-id"]
        site.finish(name, end())
        wait_for(lambda: site.scripted.server.exists(stream_meta_key(name)) and not site.has_mark(name), "it has moved")
        told = site.ask(gateway)
        site.finish(told, end())
        wait_for(lambda: receiver.posted, "the other one is told")
    assert [event.data.id for event in receiver.unwrap(site.secret)] == [told]


def test_each_end_of_a_background_response_is_told(site: Site, receiver: WebhookReceiver) -> None:
    endings = {
        "response.completed": end(), "response.incomplete": end("length"), "response.failed": fail("model_error"),
        "response.cancelled": fail("cancelled"),
    }  # fmt: skip
    with site.start() as gateway:
        names = {kind: site.ask(gateway) for kind in endings}
        for kind, ending in endings.items():
            site.finish(names[kind], ending)
        wait_for(lambda: len(receiver.posted) >= 4, "all are told")
        wait_for(lambda: not site.read_waiting(), "none waits")
        status = {name: site.request(gateway, "GET", f"responses/{name}")["status"] for name in names.values()}
        wait_for(lambda: "penstock_webhook_waiting 0" in site.read_metrics(gateway), "the next look finds none")
        metrics = site.read_metrics(gateway)
    told = {event.type: event.data.id for event in receiver.unwrap(site.secret)}
    assert told == names
    assert len(set(receiver.ids)) == len(receiver.ids) == 4
    assert {f"response.{status[name]}": name for name in names.values()} == names, "it is there to be read"
    assert 'penstock_webhook_attempts_total{outcome="delivered"} 4' in metrics
    assert SECRET[6:] not in gateway.log.read_text()
    assert "token=abc" not in gateway.log.read_text()


def test_an_event_is_told_after_its_gateway_was_killed_before_it_was_delivered(
    site: Site, receiver: WebhookReceiver
) -> None:
    receiver.default = 503
    with site.start() as gateway:
        name = site.ask(gateway)
        site.finish(name, end())
        wait_for(lambda: receiver.posted and not site.has_mark(name), "it was settled, and tried")
        gateway.process.kill()
    assert len(site.read_waiting()) == 1
    receiver.default = 200
    site.hurry()
    with site.start():
        wait_for(lambda: not site.read_waiting(), "it is delivered")
    assert {event.data.id for event in receiver.unwrap(site.secret)} == {name}
    assert len(set(receiver.ids)) == 1


def test_an_event_is_told_again_with_its_id_after_its_gateway_was_killed_while_the_receiver_hung(
    site: Site, receiver: WebhookReceiver
) -> None:
    receiver.answers = [HANGS]
    with site.start() as gateway:
        site.finish(site.ask(gateway), end())
        wait_for(lambda: receiver.posted, "it is being delivered")
        gateway.process.kill()
    site.hurry()
    with site.start():
        wait_for(lambda: not site.read_waiting(), "it is delivered")
    assert len(receiver.posted) == 2
    assert len(set(receiver.ids)) == 1
    assert len(receiver.unwrap(site.secret)) == 2


def test_batches_that_fail_or_are_cancelled_are_told(site: Site, receiver: WebhookReceiver) -> None:
    contents = {"failed": b"no JSON\n", "cancelled": lines([row(0, model=site.scripted.model)])}
    names = {}
    with site.start() as gateway:
        for kind, content in contents.items():
            form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
            asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
            asked["input_file_id"] = site.request(gateway, "POST", "files", **form)["id"]
            names[f"batch.{kind}"] = site.request(gateway, "POST", "batches", json=asked)["id"]
        site.request(gateway, "POST", f"batches/{names['batch.cancelled']}/cancel")
        wait_for(lambda: len(receiver.posted) >= 2, "both are told")
    assert {event.type: event.data.id for event in receiver.unwrap(site.secret)} == names


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStorage]:
    with contextlib.closing(ObjectStorage.open(str(tmp_path / "objects"))) as made:
        yield made


MakeWork = Callable[[BatchSpec], BatchWork]


@pytest.fixture
async def hooks(redis_url: str, receiver: WebhookReceiver) -> AsyncIterator[Webhooks]:
    settings = WebhookSettings(secret=SECRET, url=receiver.url, hosts="127.0.0.1")
    async with async_redis_client(redis_url) as client:
        made = Webhooks(client, None, settings, Meters())
        made.start()
        yield made
        await made.close()


@pytest.fixture
def make_work(objects: ObjectStorage, hooks: Webhooks) -> MakeWork:
    client = ScriptedClient()

    return lambda spec: BatchWork(objects, spec, Pipelines(client.find, 4), BatchSettings(), hooks)


@pytest.mark.parametrize("status", ["completed", "expired"])
async def test_the_end_of_a_batch_is_told_once_and_its_mark_goes_after_that(
    objects: ObjectStorage,
    hooks: Webhooks,
    make_work: MakeWork,
    receiver: WebhookReceiver,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
) -> None:
    spec = await create_batch(objects, Caller(tenant=f"t-{uuid.uuid4().hex[:12]}"), lines([row(0)]))
    if status == "expired":
        spec = spec.model_copy(update={"expires_at": 1})
    batches, add_event = BatchStore(objects), hooks.add_event

    async def fail_to_add(*_: object) -> None:
        assert await batches.has_ended(spec)
        raise BusUnavailable("Redis is away")

    monkeypatch.setattr(hooks, "add_event", fail_to_add)
    with pytest.raises(BusUnavailable):
        await make_work(spec).run()
    assert await batches.list_open_ids() == [spec.id], "somebody will go on"
    assert receiver.posted == []
    monkeypatch.setattr(hooks, "add_event", add_event)
    await make_work(spec).run()
    assert await batches.list_open_ids() == []
    while not receiver.posted:
        await asyncio.sleep(0.01)
    (event,) = receiver.unwrap()
    ended = await batches.read_state(spec)
    assert (event.type, event.data.id) == (f"batch.{status}", spec.id)
    assert event.created_at == getattr(ended, f"{status}_at")
