"""Webhooks: tell receivers that responses and batches have ended, as OpenAI does, signed by Standard Webhooks.

    penstock:webhooks              the tenants that have had events
    penstock:webhooks:<tenant>     the tenant's events that are not delivered: their bodies, by when each is due
    penstock:webhooks-secret       some gateway can send; -url: also to tenants without a receiver of their own

    1  the response or batch has ended, and its object says so
    2  its event is written to Redis (`add_event`)     3  its mark is removed: nobody adds the event again
    4  a gateway takes the event: no other gateway tries it for `TAKEN_S`     5  the receiver answers 2xx
    6  the event is removed. After any other answer, or none: it is due again later, until the time for it is over

A crash after 1 or 2 leaves the mark, and whoever finds it adds the event, which has the same body: it is one, unless it
was delivered already and is delivered again. A crash after 4 or 5 costs another attempt when `TAKEN_S` is over; after 5
the receiver gets a second delivery. Its id is the same each time, by which receivers know it.

A gateway without the settings cannot send. It does 1 to 3 where another one can, and takes no event.

No receiver holds up another: each tenant's events are tried by a task of its own, few at once. Redis has the rest.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple, cast

import httpx2
import redis.asyncio
from redis.exceptions import RedisError

from penstock.config.settings import WebhookSettings
from penstock.errors import PenstockError, is_failure
from penstock.ingest.hosts import LOOKUP_S, find_host_addresses, is_public_address
from penstock.ingest.search_loop import SearchLoop
from penstock.ingest.tenants import KeySource
from penstock.names import WEBHOOK_MARK_KEYS, WEBHOOKS_KEY, webhook_events_key
from penstock.redis.client import log_outage, translate_outages
from penstock.redis.scripts import load_script
from penstock.telemetry import catalog
from penstock.telemetry.meters import Meters, Reading

log = logging.getLogger(__name__)

TAKE_DUE_EVENTS = load_script("penstock.ingest", "take_due_events")
LOOK_S = 1.0
"""How often a gateway looks for events that are due."""
ANSWER_S = 10.0
"""How long a receiver may take to answer."""
TAKEN_S = 2 * (LOOKUP_S + ANSWER_S)
MAX_EVENTS_AT_ONCE = 8
"""Events of a tenant that a gateway tries at once."""
MAX_TENANTS_AT_ONCE = 64
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 3600.0
RETRY_S = 3 * 86400.0
"""How long after the end of its response or batch an event is tried again: after 5 seconds at first, then after growing
waits of up to an hour."""
MARK_S = 60.0
"""How often a gateway says that it can send."""


class Receiver(NamedTuple):
    """Where a tenant's events go."""

    url: str
    secret: str
    """As the receiver has it, `whsec_…`."""

    def __repr__(self) -> str:
        """The host alone: a URL may have a secret in it, too."""
        return f"Receiver({httpx2.URL(self.url).host})"


class Webhooks:
    """The events of all tenants, and their delivery by one gateway process."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        tenants: KeySource | None,
        settings: WebhookSettings,
        meters: Meters,
        read_clock: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._tenants, self._settings, self._meters = client, tenants, settings, meters
        self._read_clock = read_clock
        self._num_waiting = 0
        self._marked_at = -MARK_S
        self._loop = SearchLoop("abandoned webhooks", self._start_deliveries, LOOK_S)
        self._delivering: dict[str, asyncio.Task[None]] = {}
        # Threads of their own: a name server that hangs holds up nothing else. There are none until one is needed.
        self._lookups = ThreadPoolExecutor(MAX_TENANTS_AT_ONCE, "webhooks")
        meters.add_source(self._read_gauges)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """The certificates by which receivers are known: made when needed, as reading them takes 50 ms."""
        return ssl.create_default_context()

    @property
    def is_on(self) -> bool:
        """Whether there can be receivers at all."""
        return bool(self._settings.secret)

    async def find_receiver(self, tenant: str) -> Receiver | None:
        """Return where a tenant's events go: its own receiver, that of all, or None. Raises `BusUnavailable`."""
        if not self.is_on:
            return None
        entry = None if self._tenants is None else await self._tenants.find_tenant(tenant)
        if entry is not None and entry.webhook_url:
            return Receiver(entry.webhook_url, derive_tenant_secret(self._settings.secret, tenant))
        return Receiver(self._settings.url, self._settings.secret) if self._settings.url else None

    async def add_event(self, tenant: str, kind: str, subject_id: str, ended_at: int) -> None:
        """Step 2: make an event due; nothing is done for a tenant without a receiver. Raises `BusUnavailable`.

        `kind` is the event's type, such as `response.completed`. Equal arguments are the same event.
        """
        if await self.find_receiver(tenant) is None and not await self._is_sent_elsewhere(tenant):
            return
        body = make_event(kind, subject_id, ended_at)
        with translate_outages():
            async with self._client.pipeline(transaction=False) as batch:
                batch.sadd(WEBHOOKS_KEY, tenant)
                batch.zadd(webhook_events_key(tenant), {body: self._read_clock()}, nx=True)
                await batch.execute()
        self._loop.search_now()

    async def _is_sent_elsewhere(self, tenant: str) -> bool:
        """Return whether a gateway with other settings can send a tenant's events. Raises `BusUnavailable`."""
        with translate_outages():
            secret, url = await self._client.mget(WEBHOOK_MARK_KEYS)
        entry = None if secret is None or self._tenants is None else await self._tenants.find_tenant(tenant)
        return secret is not None and (url is not None or (entry is not None and bool(entry.webhook_url)))

    async def _mark_settings(self) -> None:
        """Say to the other gateways, for as long as events are tried, that this one can send."""
        fingerprint, kept_s = hashlib.sha256(self._settings.secret.encode()).hexdigest()[:16], RETRY_S
        with translate_outages():
            for key, value in zip(WEBHOOK_MARK_KEYS, [fingerprint, "1" if self._settings.url else ""], strict=True):
                found = value and await self._client.set(key, value, ex=round(max(3 * MARK_S, kept_s)), get=True)
                if found and found != value.encode():
                    log.warning("webhooks: gateways of this Redis have different secrets (PENSTOCK_WEBHOOK_SECRET)")
        self._marked_at = time.monotonic()

    def start(self) -> None:
        """Start to deliver events."""
        if self.is_on:
            # It would log each URL.
            logging.getLogger("httpx2").setLevel(logging.WARNING)
            self._loop.start()

    async def close(self) -> None:
        """Stop; other gateways go on, with what is under way here after `TAKEN_S`."""
        await self._loop.close(*self._delivering.values())
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _start_deliveries(self) -> None:
        if time.monotonic() > self._marked_at + MARK_S:
            await self._mark_settings()
        with translate_outages():
            found = await cast("Any", self._client.smembers(WEBHOOKS_KEY))
            tenants: list[str] = [name.decode() for name in found]
            async with self._client.pipeline(transaction=False) as batch:
                for tenant in tenants:
                    batch.zcard(webhook_events_key(tenant))
                    batch.zcount(webhook_events_key(tenant), "-inf", self._read_clock())
                counts: list[int] = await batch.execute()
        self._num_waiting = sum(counts[::2])
        due = [tenant for tenant, count in zip(tenants, counts[1::2], strict=True) if count]
        random.shuffle(due)  # so that each gets its turn where there are more than may be tried at once
        for tenant in due:
            if tenant not in self._delivering and len(self._delivering) < MAX_TENANTS_AT_ONCE:
                self._delivering[tenant] = asyncio.create_task(self._deliver_of_tenant(tenant))

    async def _deliver_of_tenant(self, tenant: str) -> None:
        """Try the events of one tenant that are due, unless only another gateway knows where to send them."""
        try:
            if await self.find_receiver(tenant) is None and await self._is_sent_elsewhere(tenant):
                return
            while not self._loop.is_closing and (events := await self._take_due(tenant)):
                await self._try_events(tenant, events)
        except (PenstockError, RedisError) as error:
            log_outage(log, f"webhooks of {tenant}: {error}")
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("delivering webhooks of %s failed, retrying", tenant)
        finally:
            del self._delivering[tenant]

    async def _take_due(self, tenant: str) -> list[bytes]:
        """Step 4."""
        now = self._read_clock()
        args = [now, now + TAKEN_S, MAX_EVENTS_AT_ONCE]
        with translate_outages():
            return cast(
                "list[bytes]", await TAKE_DUE_EVENTS.run_async(self._client, [webhook_events_key(tenant)], args)
            )

    async def _try_events(self, tenant: str, events: Sequence[bytes]) -> None:
        try:
            receiver = await self.find_receiver(tenant)
            if receiver is None:
                raise ValueError("there is no receiver any more")
            addresses = await find_addresses(receiver.url, self._settings.allowed_hosts, self._lookups)
        except (ValueError, OSError) as error:
            for event in events:
                await self._settle_event(tenant, event, str(error))
            return

        async def try_event(event: bytes) -> None:
            await self._settle_event(tenant, event, await self._attempt_delivery(receiver, addresses, event))

        outcomes = await asyncio.gather(*map(try_event, events), return_exceptions=True)
        if failures := [outcome for outcome in outcomes if outcome is not None]:
            raise failures[0]

    async def _attempt_delivery(self, receiver: Receiver, addresses: Sequence[str], event: bytes) -> str:
        """Return what went wrong, or nothing."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await self._post_event(receiver, addresses, event)
        except TimeoutError:
            return f"no answer for {ANSWER_S:g} seconds"
        except (httpx2.HTTPError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return "" if 200 <= status < 300 else f"answered with status {status}"

    async def _post_event(self, receiver: Receiver, addresses: Sequence[str], event: bytes) -> int:
        """Return the status of the answer; of the rest of it only the headers are read."""
        url = httpx2.URL(receiver.url)
        headers = sign_event(receiver.secret, event, int(self._read_clock()))
        headers |= {"content-type": "application/json", "user-agent": "penstock", "host": url.netloc.decode()}
        # Not kept: a connection to an address would be used for another name with this address. Not by a proxy of the
        # environment, which would look the name up again.
        async with httpx2.AsyncClient(verify=self._tls, trust_env=False, timeout=ANSWER_S) as client:
            for number, address in enumerate(addresses, start=1):
                # The address that was checked: the name may have another one by now.
                target, extensions = url.copy_with(host=address), {"sni_hostname": url.host}
                try:
                    async with client.stream(
                        "POST", target, content=event, headers=headers, extensions=extensions
                    ) as answer:
                        return answer.status_code
                except httpx2.ConnectError:
                    if number == len(addresses):
                        raise
        raise AssertionError("there is an address")

    async def _settle_event(self, tenant: str, event: bytes, problem: str) -> None:
        """Step 6."""
        told: dict[str, Any] = json.loads(event)
        now = self._read_clock()
        wait_s = choose_wait(now - told["created_at"])
        outcome = "delivered" if not problem else "failed"
        if problem and now + wait_s > told["created_at"] + RETRY_S:
            outcome = "given_up"
        if outcome == "failed":
            with translate_outages():
                await self._client.zadd(webhook_events_key(tenant), {event: now + wait_s}, xx=True)
        else:
            await self._remove_event(tenant, event)
        self._meters.get_counter(catalog.WEBHOOK_ATTEMPTS, outcome).add()
        if problem:
            what = "given up" if outcome == "given_up" else f"tried again in {wait_s:.0f} s"
            log.warning("webhook of %s: %s of %s: %s; %s", tenant, told["type"], told["data"]["id"], problem, what)

    async def _remove_event(self, tenant: str, *events: bytes) -> None:
        with translate_outages():
            await self._client.zrem(webhook_events_key(tenant), *events)

    def _read_gauges(self) -> Iterator[Reading]:
        yield Reading(catalog.WEBHOOK_WAITING, (), self._num_waiting)


def make_event(kind: str, subject_id: str, ended_at: int) -> bytes:
    """Return an event's body. Equal arguments give equal bytes, and so the same id."""
    event_id = "evt_" + hashlib.sha256(f"{kind} {subject_id}".encode()).hexdigest()[:32]
    event = {"id": event_id, "object": "event", "created_at": ended_at, "type": kind, "data": {"id": subject_id}}
    return json.dumps(event).encode()


def sign_event(secret: str, event: bytes, now: int) -> dict[str, str]:
    """Return the headers by which a receiver checks an event: https://www.standardwebhooks.com."""
    event_id: str = json.loads(event)["id"]
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signature = base64.b64encode(hmac.digest(key, b"%s.%d.%s" % (event_id.encode(), now, event), "sha256")).decode()
    return {"webhook-id": event_id, "webhook-timestamp": str(now), "webhook-signature": f"v1,{signature}"}


def derive_tenant_secret(secret: str, tenant: str) -> str:
    """Return the secret of a tenant with a receiver of its own. It tells nothing of others' secrets."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return "whsec_" + base64.b64encode(hmac.digest(key, tenant.encode(), "sha256")).decode()


def choose_wait(age_s: float) -> float:
    """Return how long a failed event waits, by the time since its response or batch ended: as long again, in limits."""
    return min(max(age_s, FIRST_WAIT_S), LONGEST_WAIT_S)


def check_url(text: str, allowed_hosts: Collection[str]) -> httpx2.URL:
    """Return a receiver's URL. Raises `ValueError`, whose message has no part of it but the host."""
    try:
        url = httpx2.URL(text)
    except httpx2.InvalidURL:
        raise ValueError("this is no URL") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("the URL does not begin with https:// and a host")
    if url.userinfo:
        raise ValueError("the URL has a user or a password in it")
    if url.scheme == "http" and url.host not in allowed_hosts:
        raise ValueError(f"the URL is not https, and {url.host} is not among PENSTOCK_WEBHOOK_HOSTS")
    return url


async def find_addresses(text: str, allowed_hosts: Collection[str], executor: Executor | None = None) -> list[str]:
    """Return the addresses of a receiver's host.

    Raises `ValueError` where the URL, or one of its addresses, is refused, and `OSError` where no address is found.
    """
    url = check_url(text, allowed_hosts)
    addresses = await find_host_addresses(url.host, executor)
    private = [address for address in addresses if not is_public_address(address)]
    if private and url.host not in allowed_hosts:
        message = (
            f"{url.host} has the address {private[0]}, which is not public, and is not among PENSTOCK_WEBHOOK_HOSTS"
        )
        raise ValueError(message)
    return addresses
