"""A tenant's requests and tokens a minute, over all regions together.

Each region has a bucket of the whole limit, and counts what it takes from it, less what it gives back. Its peers learn
the counts with its state, each second, and take from their own buckets what was used since. So all buckets are the same
but for the last second, whatever region a tenant's requests go to, and no region has to know how many others there are.

The error: what other regions admit is known a second later, and two at most. Requests that come to several regions in
one moment can have a full bucket in each. The buckets owe that then, so over any longer time a tenant has its limit.
A region that cannot be asked counts for nothing until it answers: while regions are cut off from each other, each gives
the whole limit. What it used meanwhile is taken then, up to one more bucket.

    1  a request is admitted: bucket and count change in one script      2  a peer reads the count
    3  the peer's bucket, and what it has settled of the count, change in one script

A crash between 1 and 2 or 2 and 3 costs nothing: the count is read again. Several gateways of a region settle the same
count once.
"""

from collections.abc import Mapping
from typing import Any, cast

import redis.asyncio

from penstock.errors import BusUnavailable
from penstock.ingest.tenants import KeySource
from penstock.names import REGION_USED_KEY, rate_key, region_settled_key
from penstock.redis.client import translate_outages
from penstock.redis.scripts import load_script

SETTLE_REGION = load_script("penstock.ingest", "bucket", "settle_region")
Used = Mapping[str, tuple[int, int]]
"""By tenant, how many requests and tokens it has used in a region, as that has counted them since its Redis began."""


class SharedLimits:
    """What tenants have used here and elsewhere, for one gateway."""

    def __init__(self, client: "redis.asyncio.Redis", source: KeySource | None) -> None:
        self._client, self._source = client, source
        self._settled = dict[str, dict[str, tuple[int, int]]]()
        """By region and tenant, what this gateway has seen settled: what has not changed is not settled again."""

    async def read_used(self) -> dict[str, tuple[int, int]]:
        """Return what tenants with limits have used in this region. Raises `BusUnavailable`."""
        if self._source is None:
            return {}
        with translate_outages():
            told: dict[bytes, bytes] = await cast("Any", self._client.hgetall(REGION_USED_KEY))
        counts = {name.decode(): int(value) for name, value in told.items()}
        tenants = {name.partition(" ")[2] for name in counts}
        return {one: (counts.get(f"requests {one}", 0), counts.get(f"tokens {one}", 0)) for one in tenants}

    async def settle_region(self, region: str, used: Used) -> None:
        """Settle what a region has told. In an outage it is settled when the region tells it the next time."""
        if self._source is None:
            return
        try:
            if region not in self._settled:
                await self._begin_counts(region, used)
            settled = self._settled.setdefault(region, {})
            for tenant, counts in used.items():
                if settled.get(tenant) != counts:
                    await self._settle_tenant(region, tenant, counts)
                    settled[tenant] = counts
        except BusUnavailable:
            return

    async def _settle_tenant(self, region: str, tenant: str, counts: tuple[int, int]) -> None:
        assert self._source is not None
        entry, keys = await self._source.find_tenant(tenant), [rate_key(tenant), region_settled_key(region)]
        limits = [entry.requests_per_min or 0, entry.tokens_per_min or 0]
        with translate_outages():
            await SETTLE_REGION.run_async(self._client, keys, [*limits, tenant, *counts])

    async def _begin_counts(self, region: str, used: Used) -> None:
        """Where nothing was ever settled of a region, begin with its counts as they are."""
        key = region_settled_key(region)
        begun: dict[Any, Any] = {f"requests {one}": counts[0] for one, counts in used.items()}
        begun |= {f"tokens {one}": counts[1] for one, counts in used.items()}
        with translate_outages():
            if not await cast("Any", self._client.exists(key)):
                await cast("Any", self._client.hset(key, mapping=begun | {"begun": 1}))
