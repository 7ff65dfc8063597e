"""The lease of a batch, in Redis: one gateway works on a batch, and another goes on when that one died."""

import uuid

import redis.asyncio
from redis.exceptions import RedisError

from penstock.names import batch_lease_key
from penstock.redis.scripts import RELEASE_LEASE, RENEW_LEASE


class BatchLeases:
    """The batch leases of one process.

    They only save work. If two gateways work on one batch, after a pause of one of them, they ask for the same
    requests, write separate parts, and only one of them ends the batch.
    """

    def __init__(self, client: "redis.asyncio.Redis", lease_s: float) -> None:
        self._client, self._ms = client, round(lease_s * 1000)
        self._holder = uuid.uuid4().hex

    async def acquire_lease(self, batch_id: str) -> bool:
        """Take or renew a batch's lease. Return False if another gateway has it. Raises `RedisError` in an outage."""
        return bool(await RENEW_LEASE.run_async(self._client, [batch_lease_key(batch_id)], [self._holder, self._ms]))

    async def is_lost(self, batch_id: str) -> bool:
        """Renew a lease and return whether another gateway has it. In an outage no gateway can take it."""
        try:
            return not await self.acquire_lease(batch_id)
        except RedisError:
            return False

    async def release_lease(self, batch_id: str) -> None:
        """Give a lease back, so that another gateway can take it at once. In an outage it runs out by itself."""
        try:
            await RELEASE_LEASE.run_async(self._client, [batch_lease_key(batch_id)], [self._holder])
        except RedisError:
            return
