"""The events of responses and batches: which there are, and what a gateway's death costs them."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.settings import BatchSettings, WebhookSettings
from penstock.errors import BusUnavailable
from penstock.ingest import webhooks
from penstock.ingest.batch.answer import Pipelines
from penstock.ingest.batch.batches import BatchStore
from penstock.ingest.batch.work import BatchWork
from penstock.ingest.gateway import kept_responses
from penstock.ingest.tenants import Caller, TenantEntry
from penstock.ingest.webhooks import Webhooks, derive_tenant_secret
from penstock.messages import EndEvent
from penstock.names import WEBHOOKS_KEY, stream_meta_key, webhook_events_key
from penstock.objects import ObjectStorage
from penstock.redis.client import async_redis_client
from penstock.telemetry.meters import Meters
from sim.waiting import wait_for
from tests.draws import mark_some
from tests.gateways import GatewayProcess, ScriptedPipeline, write_keys
from tests.ingest.batch_files import ScriptedClient, create_batch, lines, row
from tests.ingest.webhook_receiver import HANGS, SECRET, WebhookReceiver, receive_webhooks
from tests.record.play import end


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receive_webhooks() as made:
        yield made


class Site:
    """Gateways over a scripted pipeline, and a tenant with a receiver of its own. They are asked at `http`."""

    http: Any

    def __init__(self, scripted: ScriptedPipeline, folder: Path, url: str) -> None:
        self.scripted, self.server, self._folder = scripted, scripted.server, folder
        self.tenant = f"t-{uuid.uuid4().hex[:12]}"
        self.secret, self.events = derive_tenant_secret(SECRET, self.tenant), webhook_events_key(self.tenant)
        (key,) = write_keys(folder / "keys.json", self.tenant, **{self.tenant: TenantEntry(webhook_url=url)})
        self._headers = {"authorization": f"Bearer {key}"}

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run a gateway in this process, which looks often."""
        keys, store = {"keys": str(self._folder / "keys.json")}, str(self._folder / "store")
        batch, webhook = {"store": store, "look_s": 0.2, "lease_s": 0.6}, {"secret": SECRET, "hosts": "127.0.0.1"}
        settings: dict[str, Any] = {"admission": keys, "batch": batch, "webhook": webhook}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kept_responses, "EVENT_ROUND_S", 0.2)
            patch.setattr(webhooks, "LOOK_S", 0.2)
            with self.scripted.open_gateway(**settings) as gateway, gateway.client(headers=self._headers) as self.http:
                yield

    @contextlib.contextmanager
    def run_process(self) -> Iterator[GatewayProcess]:
        """Run a gateway that can be killed."""
        settings = {
            "GATEWAY_KEYS": str(self._folder / "keys.json"), "BATCH_STORE": str(self._folder / "store"),
            "RECORD_KEEP_S": "10", "WEBHOOK_SECRET": SECRET, "WEBHOOK_HOSTS": "127.0.0.1",
        }  # fmt: skip
        with (
            GatewayProcess(self.scripted.addresses, self._folder, settings) as gateway,
            httpx.Client(base_url=gateway.url, headers=self._headers, timeout=None) as self.http,
        ):
            yield gateway

    def request(self, method: str, path: str, **more: Any) -> Any:
        answer = self.http.request(method, f"/v1/{path}", **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ask(self, **more: Any) -> str:
        body = {"model": self.scripted.model, "input": "In the beginning", "background": True} | more
        return str(self.request("POST", "responses", json=body)["id"])

    def read_waiting(self) -> list[tuple[bytes, float]]:
        """Return the tenant's events that are not delivered, and when each is due."""
        found: Any = self.server.zrange(self.events, 0, -1, withscores=True)
        return list(found)

    def has_mark(self, name: str) -> bool:
        return bool(self.server.hexists(self.scripted.pipeline.responses_key, name))


@pytest.fixture
def site(scripted: ScriptedPipeline, receiver: WebhookReceiver, tmp_path: Path) -> Iterator[Site]:
    yield (made := Site(scripted, tmp_path, receiver.url))
    scripted.server.srem(WEBHOOKS_KEY, made.tenant)
    scripted.server.delete(made.events)


def fail(code: str) -> EndEvent:
    return EndEvent.model_validate({"finish_reason": "error", "error": {"code": code, "message": "it went wrong"}})


def test_a_response_that_is_not_in_the_background_has_no_event(site: Site, receiver: WebhookReceiver) -> None:
    body = {"model": site.scripted.model, "input": "In the beginning", "stream": True}
    with site.run():
        with site.http.stream("POST", "/v1/responses", json=body) as stream:
            name = stream.headers["x-request-id"]
        site.scripted.finish(name)
        wait_for(lambda: site.server.exists(stream_meta_key(name)) and not site.has_mark(name), "it has moved")
        told = site.ask()
        site.scripted.finish(told)
        wait_for(lambda: receiver.posted, "the other one is told")
    assert [event.data.id for event in receiver.unwrap(site.secret)] == [told]


@pytest.mark.proof
def test_each_end_of_a_background_response_is_told(
    site: Site, receiver: WebhookReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    endings = {
        "response.completed": end(), "response.incomplete": end("length"), "response.failed": fail("model_error"),
        "response.cancelled": fail("cancelled"),
    }  # fmt: skip
    with site.run():
        names = {kind: site.ask() for kind in endings}
        for kind, ending in endings.items():
            site.scripted.finish(names[kind], ending=ending)
        wait_for(lambda: len(receiver.posted) >= 4, "all are told")
        wait_for(lambda: not site.read_waiting(), "none waits")
        status = {name: site.request("GET", f"responses/{name}")["status"] for name in names.values()}
        wait_for(lambda: "penstock_webhook_waiting 0" in site.http.get("/metrics").text, "the next look finds none")
        assert 'penstock_webhook_attempts_total{outcome="delivered"} 4' in site.http.get("/metrics").text
    assert {event.type: event.data.id for event in receiver.unwrap(site.secret)} == names
    assert len(set(receiver.ids)) == len(receiver.ids) == 4
    assert {f"response.{status[name]}": name for name in names.values()} == names, "it is there to be read"
    assert not [word for word in (SECRET[6:], "token=abc") if word in caplog.text]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_event_is_told_again_with_its_id_after_its_gateway_was_killed(
    site: Site, receiver: WebhookReceiver, hangs: bool
) -> None:
    """It was tried in vain, or its receiver had not answered yet."""
    receiver.answers, receiver.default = [HANGS] if hangs else [], 503
    with site.run_process() as gateway:
        name = site.ask()
        site.scripted.finish(name)
        wait_for(lambda: receiver.posted and (hangs or not site.has_mark(name)), "it was settled, and tried")
        gateway.process.kill()
    assert len(site.read_waiting()) == 1
    receiver.default = 200
    for event, _ in site.read_waiting():  # all that waits is due at once
        site.server.zadd(site.events, {event: time.time()}, xx=True)
    with site.run():
        wait_for(lambda: not site.read_waiting(), "it is delivered")
    assert {event.data.id for event in receiver.unwrap(site.secret)} == {name}
    assert len(set(receiver.ids)) == 1
    assert len(receiver.posted) == 2 or not hangs


def test_batches_that_fail_or_are_cancelled_are_told(site: Site, receiver: WebhookReceiver) -> None:
    contents = {"failed": b"no JSON\n", "cancelled": lines([row(0, model=site.scripted.model)])}
    names = {}
    with site.run():
        for kind, content in contents.items():
            form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
            asked = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
            asked["input_file_id"] = site.request("POST", "files", **form)["id"]
            names[f"batch.{kind}"] = site.request("POST", "batches", json=asked)["id"]
        cancelled = site.request("POST", f"batches/{names['batch.cancelled']}/cancel")
        assert cancelled["status"] == "cancelling"
        # Each at least once, so two may be one of them twice.
        wait_for(lambda: {one.type: one.data.id for one in receiver.unwrap(site.secret)} == names, "both are told")


@pytest.fixture
async def hooks(redis_url: str, receiver: WebhookReceiver, own_marks: list[str]) -> AsyncIterator[Webhooks]:
    settings = WebhookSettings(secret=SECRET, url=receiver.url, hosts="127.0.0.1")
    async with async_redis_client(redis_url) as client:
        made = Webhooks(client, None, settings, Meters())
        made.start()
        yield made
        await made.close()


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStorage]:
    with contextlib.closing(ObjectStorage.open(str(tmp_path / "objects"))) as made:
        yield made


@pytest.mark.parametrize("status", mark_some(["completed", "expired"], pytest.mark.proof))
async def test_the_end_of_a_batch_is_told_once_and_its_mark_goes_after_that(
    hooks: Webhooks, objects: ObjectStorage, receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    spec = await create_batch(objects, Caller(tenant=f"t-{uuid.uuid4().hex[:12]}"), lines([row(0)]))
    if status == "expired":
        spec = spec.model_copy(update={"expires_at": 1})
    batches, pipelines = BatchStore(objects), Pipelines(ScriptedClient().find, 4)

    async def fail_to_add(*_: object) -> None:
        assert await batches.has_ended(spec)
        raise BusUnavailable("Redis is away")

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "add_event", fail_to_add)
        with pytest.raises(BusUnavailable):
            await BatchWork(objects, spec, pipelines, BatchSettings(), hooks).run()
    assert await batches.list_open_ids() == [spec.id], "somebody will go on"
    assert receiver.posted == []
    await BatchWork(objects, spec, pipelines, BatchSettings(), hooks).run()
    assert await batches.list_open_ids() == []
    while not receiver.posted:
        await asyncio.sleep(0.01)
    (event,) = receiver.unwrap()
    ended = await batches.read_state(spec)
    assert (event.type, event.data.id) == (f"batch.{status}", spec.id)
    assert event.created_at == getattr(ended, f"{status}_at")
