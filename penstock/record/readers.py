"""Which parts of the topics somebody reads, and who looks after those that nobody does."""

from collections.abc import Sequence

import redis

from penstock.names import Pipeline, Stage
from penstock.record import scripts

NAMED_FOR = 1.5
UNDISPUTED_FOR = 3.0
"""Leases."""


class Readers:
    """One worker's part in it. Each method raises `redis.RedisError`. Thread-safe."""

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, stage: Stage, owner: str, lease_s: float) -> None:
        self._client, self._owner, self._lease_ms = client, owner, lease_s * 1000
        self._named, self._rescuer = pipeline.readers_key(stage), pipeline.rescuer_key(stage)

    def name(self, parts: Sequence[str]) -> None:
        """Say that these are read, for a lease and a half."""
        if parts:
            scripts.HELD.run(self._client, [self._named], [round(NAMED_FOR * self._lease_ms), *parts])

    def let_go(self, parts: Sequence[str]) -> None:
        """Nobody has to look after these: who leaves in good order has given them to others."""
        if parts:
            self._client.zrem(self._named, *parts)

    def orphans(self, limit: int) -> list[str]:
        """At most `limit` parts that nobody spoke for lately; none to any but one worker of the stage at a time."""
        found = [part.decode() for part in scripts.OVERDUE.run(self._client, [self._named], [limit, 0])]
        return found if found and self._is_mine() else []

    def _is_mine(self) -> bool:
        """Whether this worker is the one; if nobody is, it is from now on. Two that are cost double work, no more."""
        lasts_ms = round(UNDISPUTED_FOR * self._lease_ms)
        if self._client.set(self._rescuer, self._owner, nx=True, px=lasts_ms):
            return True
        is_mine = self._client.get(self._rescuer) == self._owner.encode()
        if is_mine:
            self._client.pexpire(self._rescuer, lasts_ms)
        return is_mine
