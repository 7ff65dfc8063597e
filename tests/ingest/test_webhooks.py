"""The delivery of events to webhooks: signatures, waits, which hosts are allowed, what one receiver costs others."""

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import redis.asyncio

from penstock.config.settings import WebhookSettings
from penstock.ingest import webhooks as module
from penstock.ingest.tenants import KeyEntry, TenantEntry
from penstock.ingest.webhooks import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    RETRY_S,
    TAKEN_S,
    Receiver,
    Webhooks,
    derive_tenant_secret,
    find_addresses,
    make_event,
    sign_event,
)
from penstock.local.processes import find_free_port
from penstock.names import WEBHOOKS_KEY, webhook_events_key
from penstock.redis.client import async_redis_client
from penstock.telemetry import catalog
from penstock.telemetry.meters import Meters
from tests.commands import Terminal
from tests.ingest.webhook_receiver import ENDLESS, HANGS, REDIRECTS, SECRET, WebhookReceiver, receive_webhooks
from tests.security.certificates import Authority

TYPES = [
    *(f"response.{status}" for status in ("completed", "failed", "incomplete", "cancelled")),
    *(f"batch.{status}" for status in ("completed", "failed", "expired", "cancelled")),
]


class Tenants:
    """Tenants whose entries a test writes."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}

    async def find_key(self, key_id: str) -> KeyEntry | None:
        """Nobody asks."""

    async def find_tenant(self, name: str) -> TenantEntry:
        return TenantEntry(webhook_url=self.urls.get(name, ""))


class Sender:
    """Gateways' webhooks over one Redis, and a clock that a test sets."""

    def __init__(self, client: "redis.asyncio.Redis", stack: AsyncExitStack, marks: list[str]) -> None:
        self.marks = marks
        self.client, self._stack, self._hooks = client, stack, list[Webhooks]()
        self.tenants, self.meters = Tenants(), Meters()
        self.tenant = self.add_tenant()
        self.now = 1_800_000_000.0

    def add_tenant(self, url: str = "") -> str:
        tenant = f"t-{uuid.uuid4().hex[:12]}"
        self.tenants.urls[tenant] = url
        return tenant

    def receive(self, *args: Any, answers: Sequence[int] = (), default: int = 200, **kwargs: Any) -> WebhookReceiver:
        """Return a receiver that ends with the test, and what it answers."""
        made = self._stack.enter_context(receive_webhooks(*args, **kwargs))
        made.answers, made.default = list(answers), default
        return made

    def open(self, url: str = "", **settings: Any) -> Webhooks:
        """Return the webhooks of one gateway; `url` is that of all tenants."""
        given = {"secret": SECRET, "url": url, "hosts": "127.0.0.1,localhost", **settings}
        made = Webhooks(self.client, self.tenants, WebhookSettings(**given), self.meters, lambda: self.now)
        self._stack.push_async_callback(made.close)
        self._hooks.append(made)
        return made

    async def add(self, *ids: str, tenant: str = "", by: int = -1) -> None:
        """Let a gateway, the last that was opened, add the ends of responses."""
        for subject_id in ids or ("resp_1",):
            await self._hooks[by].add_event(tenant or self.tenant, "response.completed", subject_id, int(self.now))

    async def deliver(self, *gateways: Webhooks) -> None:
        """Let gateways, by default the last, try what is due, at once, until they have done so."""
        gateways = gateways or (self._hooks[-1],)
        for hooks in gateways:
            await hooks._start_deliveries()
        await asyncio.gather(*(task for hooks in gateways for task in hooks._delivering.values()))

    async def read_due(self, tenant: str = "") -> dict[bytes, float]:
        """Return the events that wait, and when each is due."""
        found: Any = await self.client.zrange(webhook_events_key(tenant or self.tenant), 0, -1, withscores=True)
        return dict(found)

    def count(self, outcome: str) -> float:
        return self.meters.get_counter(catalog.WEBHOOK_ATTEMPTS, outcome).read()

    async def clean(self) -> None:
        for tenant in self.tenants.urls:
            await self.client.srem(WEBHOOKS_KEY, tenant)
            await self.client.delete(webhook_events_key(tenant))
        await self.client.delete(*self.marks)


@pytest.fixture
async def sender(redis_url: str, own_marks: list[str]) -> AsyncIterator[Sender]:
    async with async_redis_client(redis_url) as client, AsyncExitStack() as stack:
        made = Sender(client, stack, own_marks)
        yield made
        await made.clean()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The addresses of names, for webhooks alone."""
    found: dict[str, list[str]] = {}

    def look_up(host: str, *_: object, **__: object) -> list[Any]:
        if host not in found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return found


@pytest.mark.proof
@pytest.mark.parametrize("kind", TYPES)
def test_the_sdk_reads_each_event_and_refuses_one_that_was_changed(kind: str) -> None:
    body = make_event(kind, "an-id", 1_800_000_000)
    assert body == make_event(kind, "an-id", 1_800_000_000)
    with openai.OpenAI(api_key="none") as sdk:
        headers = sign_event(SECRET, body, int(time.time()))
        event = sdk.webhooks.unwrap(body, headers, secret=SECRET)
        assert (event.type, event.data.id, event.object) == (kind, "an-id", "event")  # type: ignore[union-attr]
        assert (event.created_at, event.id) == (1_800_000_000, headers["webhook-id"])
        for changed, secret in [
            (body.replace(b"an-id", b"no-id"), SECRET), (body, derive_tenant_secret(SECRET, "acme")),
        ]:  # fmt: skip
            with pytest.raises(openai.InvalidWebhookSignatureError):
                sdk.webhooks.unwrap(changed, headers, secret=secret)


def test_ids_and_secrets_differ() -> None:
    ids = {sign_event(SECRET, make_event(kind, name, 1), 1)["webhook-id"] for kind in TYPES for name in ("a", "b")}
    assert len(ids) == 2 * len(TYPES)
    secrets = {SECRET, *(derive_tenant_secret(SECRET, tenant) for tenant in ("a", "b"))}
    assert len(secrets) == 3
    assert all(WebhookSettings(secret=secret) for secret in secrets)


@pytest.mark.proof
async def test_an_event_is_delivered_once_where_its_receiver_accepts_it(sender: Sender) -> None:
    receiver = sender.receive()
    one, other = (sender.open(receiver.url) for _ in range(2))
    await sender.add(*(f"resp_{number}" for number in range(50)), by=0)
    await sender.add("resp_7")  # the same event
    await sender.deliver(one, other)
    assert len(set(receiver.ids)) == len(receiver.ids)
    assert len(receiver.ids) == sender.count("delivered") == 50
    assert await sender.read_due() == {}
    assert {headers["content-type"] for headers, _ in receiver.posted} == {"application/json"}


@pytest.mark.proof
async def test_an_event_is_tried_after_growing_waits_until_its_time_is_over(sender: Sender) -> None:
    receiver = sender.receive(default=503)
    sender.open(receiver.url)
    await sender.add()
    ended, waits = sender.now, list[float]()
    while due := await sender.read_due():
        (at,) = due.values()
        if at > sender.now:
            await sender.deliver()
            assert len(receiver.posted) == len(waits) + 1, "it is not tried before its time"
            waits.append(at - sender.now)
            sender.now = at
        await sender.deliver()
    assert waits[:5] == [FIRST_WAIT_S, FIRST_WAIT_S, 10, 20, 40]
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_WAIT_S
    assert ended + RETRY_S - 3600 < sender.now <= ended + RETRY_S
    assert len(set(receiver.ids)) == 1
    assert len({headers["webhook-timestamp"] for headers, _ in receiver.posted}) == len(receiver.posted)
    assert (sender.count("failed"), sender.count("given_up"), sender.count("delivered")) == (len(waits), 1, 0)


@pytest.mark.parametrize("has_own_url", [False, True])
async def test_a_gateway_that_cannot_send_leaves_events_to_one_that_can(
    sender: Sender, caplog: pytest.LogCaptureFixture, has_own_url: bool
) -> None:
    """It has no secret, or no URL. Where no gateway has them there are no events."""
    receiver = sender.receive()
    tenant = sender.add_tenant(receiver.url if has_own_url else "")
    blind = [sender.open(secret=""), *([] if has_own_url else [sender.open()])]
    for by in range(len(blind)):
        await sender.add("resp_0", by=by, tenant=tenant)
    assert await sender.read_due(tenant) == {}
    able = sender.open("" if has_own_url else receiver.url)
    await sender.deliver()
    for by in range(len(blind)):
        await sender.add(f"resp_{by}", by=by, tenant=tenant)
    if not has_own_url:
        await sender.deliver(blind[1])
    assert (len(await sender.read_due(tenant)), len(receiver.posted)) == (len(blind), 0)
    await sender.deliver(able)
    assert len(set(receiver.ids)) == len(receiver.ids) == len(blind)
    assert sender.count("failed") == 0

    assert "different secrets" not in caplog.text
    await sender.deliver(sender.open(receiver.url, secret=derive_tenant_secret(SECRET, "another")))
    assert "different secrets (PENSTOCK_WEBHOOK_SECRET)" in caplog.text


async def test_what_fails_at_first_is_delivered_later_and_the_body_of_an_answer_is_not_read(sender: Sender) -> None:
    receiver = sender.receive(answers=[500, REDIRECTS, 404, ENDLESS])
    sender.open(receiver.url)
    await sender.add()
    for _ in range(4):
        await sender.deliver()
        sender.now += LONGEST_WAIT_S
    assert (len(receiver.posted), sender.count("delivered")) == (4, 1)
    assert set(receiver.paths) == {"/hook?token=abc"}, "a redirect is not followed"
    assert await sender.read_due() == {}


async def test_a_receiver_that_is_away_gets_its_events_when_it_is_back(sender: Sender) -> None:
    port = find_free_port()
    sender.open(f"http://127.0.0.1:{port}/hook")
    await sender.add()
    await sender.deliver()
    assert sender.count("failed") == 1
    sender.now += FIRST_WAIT_S
    receiver = sender.receive(port)
    await sender.deliver()
    assert len(receiver.posted) == 1


@pytest.mark.proof
async def test_one_that_hangs_delays_only_its_own_events(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 600.0)  # on a slow machine no try ends before the other tenant's do
    hanging, quick, ids = sender.receive(default=HANGS), sender.receive(), [f"resp_{number}" for number in range(30)]
    slow, other = sender.add_tenant(hanging.url), sender.add_tenant(quick.url)
    hooks = sender.open()
    await sender.add(*ids, tenant=slow)
    await hooks._start_deliveries()
    while len(hanging.posted) < module.MAX_EVENTS_AT_ONCE:
        await asyncio.sleep(0.01)
    await sender.add(*ids, tenant=other)
    await hooks._start_deliveries()
    await hooks._delivering[other]
    assert len(quick.posted) == 30
    assert len(hanging.posted) == module.MAX_EVENTS_AT_ONCE, "few are tried at once"
    assert slow in hooks._delivering


async def test_no_answer_for_too_long_is_a_failure(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = sender.receive(default=HANGS)
    sender.open(receiver.url)
    await sender.add()
    with monkeypatch.context() as hurried:
        hurried.setattr(module, "ANSWER_S", 0.1)
        await sender.deliver()
    assert sender.count("failed") == 1
    receiver.default = 200
    sender.now += FIRST_WAIT_S
    await sender.deliver()
    assert sender.count("delivered") == 1


async def test_what_a_dead_gateway_had_taken_is_tried_by_another(sender: Sender) -> None:
    receiver = sender.receive(answers=[HANGS])
    dying, other = (sender.open(receiver.url) for _ in range(2))
    await sender.add()
    await dying._start_deliveries()
    while not receiver.posted:
        await asyncio.sleep(0.01)
    await dying.close()
    await sender.deliver(other)
    assert len(receiver.posted) == 1, "it is taken"
    sender.now += TAKEN_S
    await sender.deliver(other)
    assert len(receiver.posted) == 2
    assert len(set(receiver.ids)) == 1
    assert await sender.read_due() == {}


async def test_tenants_without_a_receiver_have_no_events(sender: Sender) -> None:
    for secret in (SECRET, ""):
        sender.open(secret=secret)
        await sender.add()
    assert not await sender.client.sismember(WEBHOOKS_KEY, sender.tenant)
    assert await sender.read_due() == {}


@pytest.mark.proof
async def test_a_tenants_own_receiver_comes_before_that_of_all(sender: Sender) -> None:
    of_all, own = sender.receive(), sender.receive()
    tenant = sender.add_tenant(own.url)
    hooks = sender.open(of_all.url)
    await sender.add("resp_1")
    await sender.add("resp_2", tenant=tenant)
    await sender.deliver()
    assert [b'"resp_1"' in body for _, body in of_all.posted] == [True]
    ((headers, body),) = own.posted
    signed = sign_event(derive_tenant_secret(SECRET, tenant), body, int(sender.now))
    assert b'"resp_2"' in body
    assert headers["webhook-signature"] == signed["webhook-signature"]
    sender.tenants.urls[tenant] = ""
    await sender.client.delete(*sender.marks)  # days later no gateway has the URL any more
    hooks = sender.open()
    await hooks._client.zadd(webhook_events_key(tenant), {body: sender.now})
    await sender.deliver()
    assert sender.count("failed") == 1, "it waits where its receiver is gone"


async def test_neither_urls_nor_secrets_are_logged(sender: Sender, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    receiver = sender.receive(answers=[500])
    hooks = sender.open(receiver.url)
    hooks.start()
    await sender.add()
    while not sender.count("failed"):
        await asyncio.sleep(0.01)
    shown = caplog.text + repr(await hooks.find_receiver(sender.tenant)) + repr(hooks._settings)
    shown += repr(TenantEntry(webhook_url=receiver.url)) + repr(Receiver(receiver.url, SECRET))
    assert "status 500" in shown
    assert "127.0.0.1" in shown
    assert not [word for word in ("token=abc", SECRET, SECRET[6:]) if word in shown]


NOT_PUBLIC = [
    "224.0.0.1", "100.64.0.1", "0.0.0.0", "192.0.2.1", "fe80::1%eth0", "fc00::1", "2002:0a00:0001::", "ff02::1",
]  # fmt: skip
REFUSED = [
    ("http://example.com/", "not https"), ("ftp://example.com/", "does not begin"), ("example.com", "does not begin"),
    ("https:///hook", "does not begin"), ("https://user:word@example.com/", "password"),
    ("https://127.0.0.1/", "not public"), ("https://10.1.2.3/", "not public"),
    ("https://169.254.169.254/", "not public"), ("https://[::1]/", "not public"),
    ("https://[::ffff:10.1.2.3]/", "not public"), ("https://2130706433/", "not public"),
    ("https://private.test/", "not public"), ("https://mixed.test/", "not public"), ("https://0/", "not public"),
    *((f"https://{number}.test/", "not public") for number in range(len(NOT_PUBLIC))),
]  # fmt: skip


@pytest.mark.parametrize(("url", "why"), REFUSED)
async def test_what_is_not_https_to_a_public_address_is_refused(
    sender: Sender, url: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        known = {"private.test": ["192.168.0.1"], "mixed.test": ["8.8.8.8", "192.168.0.1"]}
        known |= {f"{number}.test": [address] for number, address in enumerate(NOT_PUBLIC)}
        if host not in known:
            return list(real(host, *args, **kwargs))
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(ValueError, match=why):
        await find_addresses(url, frozenset())
    sender.open(url, hosts="")
    await sender.add()
    await sender.deliver()
    assert sender.count("failed") == 1
    assert len(await sender.read_due()) == 1, "it waits for a better URL"


async def test_hosts_that_are_named_are_allowed(names: dict[str, list[str]]) -> None:
    names |= {"inner.test": ["10.0.0.1", "10.0.0.2"], "public.test": ["8.8.8.8", "2606:4700::1111"]}
    hosts = WebhookSettings(hosts=" Inner.test, other").allowed_hosts
    assert await find_addresses("http://INNER.test:81/", hosts) == ["10.0.0.1", "10.0.0.2"]
    assert await find_addresses("https://public.test/", hosts) == names["public.test"]
    with pytest.raises(OSError, match=r"unknown\.test has no address"):
        await find_addresses("https://unknown.test/", hosts)


@pytest.mark.proof
async def test_the_address_that_was_checked_is_used(sender: Sender, names: dict[str, list[str]]) -> None:
    """The name is not looked up again. Of several addresses the first that answers is taken."""
    receiver = sender.receive()
    names["hooks.test"] = ["127.0.0.2", "127.0.0.1"]
    sender.open(f"http://hooks.test:{receiver.server_port}/", hosts="hooks.test")
    await sender.add()
    await sender.deliver()
    assert [headers["host"] for headers, _ in receiver.posted] == [f"hooks.test:{receiver.server_port}"]


@pytest.mark.parametrize("host", ["127.0.0.1", "hooks.test"])
async def test_certificates_are_checked_by_the_name(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: dict[str, list[str]], host: str
) -> None:
    """The certificate is one for 127.0.0.1: also where that is the address of another name, it is not that name's."""
    names |= {"hooks.test": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]}
    authority = Authority(tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    receiver = sender.receive(certificate=authority.sign("holder"))
    sender.open(f"https://{host}:{receiver.server_port}/", hosts=host)
    await sender.add()
    await sender.deliver()
    outcome = "delivered" if host == "127.0.0.1" else "failed"
    assert (sender.count(outcome), len(receiver.posted)) == (1, int(outcome == "delivered"))


@pytest.mark.parametrize(
    "settings",
    [{"url": "https://example.com"}, {"secret": "word"}, {"secret": "whsec_"}, {"secret": "whsec_dG9vIHNob3J0"}],
)
def test_settings_without_a_good_secret_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="PENSTOCK_WEBHOOK_SECRET"):
        WebhookSettings(**settings)


@pytest.mark.proof
def test_doctor_says_why_a_url_is_refused(terminal: Terminal) -> None:
    given = {"PENSTOCK_WEBHOOK_SECRET": SECRET, "PENSTOCK_WEBHOOK_URL": "https://127.0.0.1/secret-path"}
    refused = terminal("doctor", **given)
    assert "events are not sent: 127.0.0.1 has the address 127.0.0.1, which is not public" in refused.stdout
    assert "PENSTOCK_WEBHOOK_HOSTS" in refused.stdout
    assert "secret-path" not in refused.stdout
    allowed = terminal("doctor", **given, PENSTOCK_WEBHOOK_HOSTS="127.0.0.1")
    assert "events go to 127.0.0.1" in allowed.stdout


@pytest.mark.proof
def test_a_tenants_url_is_set_and_its_secret_printed(terminal: Terminal, tmp_path: Path) -> None:
    given = {"PENSTOCK_GATEWAY_KEYS": str(tmp_path / "keys.json")}
    url = "https://hooks.example.com/acme"
    with_secret = given | {"PENSTOCK_WEBHOOK_SECRET": SECRET}
    done = terminal("keys", "tenant", "acme", "--webhook-url", url, **with_secret)
    assert done.stdout.strip() == derive_tenant_secret(SECRET, "acme")
    assert f'"webhook_url": "{url}"' in (tmp_path / "keys.json").read_text()
    assert terminal("keys", "tenant", "acme", "--weight", "2", **given).returncode == 0
    assert f'"webhook_url": "{url}"' in (tmp_path / "keys.json").read_text()
    assert terminal("keys", "tenant", "acme", "--webhook-url", "http://10.0.0.1/", **with_secret).returncode != 0
    assert terminal("keys", "tenant", "acme", "--webhook-url", url, **given).returncode != 0
    assert terminal("keys", "tenant", "acme", "--webhook-url", "", **given).returncode == 0
    assert "webhook_url" not in (tmp_path / "keys.json").read_text()
