"""A tenant's limits over regions, each of which has buckets of its own."""

import uuid
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from penstock.config.settings import AdmissionSettings
from penstock.ingest.admission import Admission, Ticket
from penstock.ingest.errors import ApiError
from penstock.ingest.regions.limits import SharedLimits
from penstock.ingest.tenants import Caller, KeyEntry, TenantEntry
from penstock.messages import Usage
from penstock.names import REGION_USED_KEY, Pipeline, rate_key, region_settled_key
from penstock.redis.client import async_redis_client
from tests.ingest.test_admission import FixedLag

LIMITS = {"requests_per_min": 20, "tokens_per_min": 600}


class OneTenant:
    """A source in which every tenant has the limits."""

    async def find_key(self, key_id: str) -> KeyEntry | None:
        raise AssertionError(key_id)

    async def find_tenant(self, name: str) -> TenantEntry:
        return TenantEntry(**LIMITS)


class Region:
    """A gateway of a region, as far as limits go. The test lets it ask its peer."""

    def __init__(self, name: str, client: "redis.asyncio.Redis", tenant: str) -> None:
        self.name, self.client, self.tenant = name, client, tenant
        self.admission = Admission(client, FixedLag().read, AdmissionSettings(max_wait_s=10), has_peers=True)
        self.limits = SharedLimits(client, OneTenant())

    async def admit(self, num_tokens: int) -> Ticket:
        caller = Caller(self.tenant, **LIMITS)  # type: ignore[arg-type]
        return await self.admission.admit(caller, Pipeline(self.tenant), "interactive", num_tokens)

    async def ask(self, peer: "Region") -> None:
        await self.limits.settle_region(peer.name, await peer.limits.read_used())

    async def count_left(self) -> float:
        """Return the tokens of the bucket when it was changed last; it refills by ten a second."""
        return float(await self.client.hget(rate_key(self.tenant), "tokens") or 0)


@pytest.fixture
async def regions(redis_url: str) -> AsyncIterator[tuple[Region, Region]]:
    tenant = f"t-{uuid.uuid4().hex[:12]}"
    async with async_redis_client(redis_url) as here, async_redis_client(redis_url.removesuffix("/0") + "/1") as there:
        both = Region("eu", here, tenant), Region("us", there, tenant)
        for one, other in (both, both[::-1]):
            await one.client.delete(REGION_USED_KEY, region_settled_key(other.name))
            await one.ask(other)
        yield both


async def test_what_is_used_in_one_region_is_gone_in_the_other_once_it_was_told(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    ticket = await us.admit(500)
    await eu.ask(us)
    with pytest.raises(ApiError, match="over the limit of 600 tokens") as refused:
        await eu.admit(200)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    await eu.admit(90)
    left = await eu.count_left()
    assert 10 <= left < 100
    await eu.ask(us)
    again = Region("eu", eu.client, eu.tenant)  # another gateway, or this one after a restart
    await again.ask(us)
    assert await eu.count_left() < 100 + left, "it was settled once"

    await us.admission.settle(ticket, Usage(prompt_tokens=10))
    await eu.ask(us)
    await eu.admit(400)
    await us.ask(eu)
    with pytest.raises(ApiError, match="over the limit of 600 tokens"):
        await us.admit(300)
    requests = await eu.client.hget(rate_key(eu.tenant), "requests")
    assert 17 <= float(requests or 0) < 18, "three of twenty: one there and two here"


async def test_a_region_that_told_nothing_for_long_costs_a_minute_at_most(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    await eu.admit(1)
    await us.client.hset(REGION_USED_KEY, f"tokens {us.tenant}", 1_000_000)
    await eu.ask(us)
    assert await eu.count_left() == -600
    await us.client.delete(REGION_USED_KEY)  # its Redis was emptied, and counts anew
    await us.admit(1)
    await eu.ask(us)
    assert await eu.count_left() == 600


async def test_a_region_that_is_new_begins_with_counts_as_they_are(regions: tuple[Region, Region]) -> None:
    eu, us = regions
    await us.admit(500)
    await eu.client.delete(region_settled_key("us"))
    await Region("eu", eu.client, eu.tenant).ask(us)
    await eu.admit(590)
