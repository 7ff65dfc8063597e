"""Who works on a batch: a lease in Redis, so that any gateway goes on when the one that had it died."""

import uuid
from typing import Any, cast

import redis.asyncio
from redis.exceptions import RedisError

from penstock.names import batch_lease_key

_RENEW = """
-- Keep a lease, or take it where nobody has it (Redis lost it). KEYS: 1 lease. ARGV: 1 holder, 2 milliseconds.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = """
-- Give a lease back. KEYS: 1 lease. ARGV: 1 holder.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Leases:
    """The leases of one process.

    They spare work and decide nothing: two who work on one batch, after one of them was paused, ask for the same
    requests, write parts of their own, and one of them ends it.
    """

    def __init__(self, client: "redis.asyncio.Redis", lease_s: float) -> None:
        self._client, self._ms = client, str(round(lease_s * 1000))
        self._holder = uuid.uuid4().hex

    async def take(self, batch_id: str) -> bool:
        """Have a batch's lease, or keep it; False if another has it. Raises `RedisError` in an outage."""
        return bool(await self._eval(_RENEW, batch_id, self._holder, self._ms))

    async def lost(self, batch_id: str) -> bool:
        """Renew; whether another has it now. In an outage nobody can take it."""
        try:
            return not await self.take(batch_id)
        except RedisError:
            return False

    async def release(self, batch_id: str) -> None:
        """Let another have it at once. In an outage it runs out by itself."""
        try:
            await self._eval(_RELEASE, batch_id, self._holder)
        except RedisError:
            return

    async def _eval(self, script: str, batch_id: str, *args: str) -> Any:
        return await cast("Any", self._client.eval(script, 1, batch_lease_key(batch_id), *args))
