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
from contextlib import suppress
from typing import Any, cast

import redis.asyncio

from penstock.errors import BusUnavailable
from penstock.ingest.tenants import KeySource
from penstock.names import REGION_USED_KEY, rate_key, region_settled_key
from penstock.redis.client import translate_outages
from penstock.redis.scripts import load_script

SETTLE_REGION = load_script("penstock.ingest", "bucket", "settle_region")
Used = Mapping[str, int]
"""How many `requests TENANT` and `tokens TENANT` each has used in a region, as counted since that region's Redis began.
"""


class SharedLimits:
    """What tenants have used here and elsewhere, for one gateway."""

    def __init__(self, client: "redis.asyncio.Redis", source: KeySource | None) -> None:
        self._client, self._source = client, source

    async def read_used(self) -> Used:
        """Return what tenants with limits have used in this region. Raises `BusUnavailable`."""
        return {} if self._source is None else await self._read_counts(REGION_USED_KEY)

    async def settle_region(self, region: str, used: Used) -> None:
        """Settle what a region has told. In an outage it is settled when the region tells it the next time.

        Where nothing was ever settled of a region, its counts begin as they are.
        """
        if self._source is None:
            return
        key = region_settled_key(region)
        with suppress(BusUnavailable), translate_outages():
            settled = await self._read_counts(key)
            if not settled:
                begun: dict[Any, Any] = {**used, "begun": 1}
                await cast("Any", self._client.hset(key, mapping=begun))
                return
            changed = {name.partition(" ")[2] for name, count in used.items() if settled.get(name) != count}
            for tenant in sorted(changed):
                entry = await self._source.find_tenant(tenant)
                limits = [entry.requests_per_min or 0, entry.tokens_per_min or 0]
                counts = [used.get(f"{what} {tenant}", 0) for what in ("requests", "tokens")]
                await SETTLE_REGION.run_async(self._client, [rate_key(tenant), key], [*limits, tenant, *counts])

    async def _read_counts(self, key: str) -> Used:
        with translate_outages():
            told: dict[bytes, bytes] = await cast("Any", self._client.hgetall(key))
        return {name.decode(): int(value) for name, value in told.items()}
