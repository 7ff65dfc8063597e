"""Who works on a batch: a lease in Redis, so that any gateway goes on when the one that had it died."""

import uuid

import redis.asyncio
from redis.exceptions import RedisError

from penstock.names import batch_lease_key
from penstock.redis.scripts import RELEASE_LEASE, RENEW_LEASE


class BatchLeases:
    """The leases of one process.

    They spare work and decide nothing: two who work on one batch, after one of them was paused, ask for the same
    requests, write parts of their own, and one of them ends it.
    """

    def __init__(self, client: "redis.asyncio.Redis", lease_s: float) -> None:
        self._client, self._ms = client, round(lease_s * 1000)
        self._holder = uuid.uuid4().hex

    async def acquire_lease(self, batch_id: str) -> bool:
        """Have a batch's lease, or keep it; False if another has it. Raises `RedisError` in an outage."""
        return bool(await RENEW_LEASE.run_async(self._client, [batch_lease_key(batch_id)], [self._holder, self._ms]))

    async def is_lost(self, batch_id: str) -> bool:
        """Renew; whether another has it now. In an outage nobody can take it."""
        try:
            return not await self.acquire_lease(batch_id)
        except RedisError:
            return False

    async def release_lease(self, batch_id: str) -> None:
        """Let another have it at once. In an outage it runs out by itself."""
        try:
            await RELEASE_LEASE.run_async(self._client, [batch_lease_key(batch_id)], [self._holder])
        except RedisError:
            return
