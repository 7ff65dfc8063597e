"""What the controller tells: how many workers of each kind there should be, and why. One of many tells it."""

import json
from typing import Any

import redis

from penstock.names import Pipeline
from penstock.redis.scripts import RENEW_LEASE

LEASE_MS, TOLD_MS = 15_000, 60_000
"""For how long a controller is the one that decides without another look, and for how long its decision is told."""
Json = dict[str, Any]


class ScalingLease:
    """One controller's part in the election: who holds the lease decides."""

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, holder: str) -> None:
        self._client, self._pipeline, self._holder = client, pipeline, holder

    def acquire_lease(self) -> bool:
        """Take or renew the lease. Return False if another controller has it. Raises `redis.RedisError`."""
        return bool(RENEW_LEASE.run(self._client, [self._pipeline.autoscale_lease_key], [self._holder, LEASE_MS]))

    def publish_decision(self, told: Json) -> bool:
        """Tell a decision. Return False, and tell nothing, if another controller decides by now."""
        keys = [self._pipeline.autoscale_lease_key, self._pipeline.autoscale_key]
        return bool(RENEW_LEASE.run(self._client, keys, [self._holder, LEASE_MS, json.dumps(told), TOLD_MS]))


def read_scaling(client: "redis.Redis", pipeline: Pipeline) -> Json | None:
    """Return the last decision; None where no controller has told one within a minute."""
    found: Any = client.get(pipeline.autoscale_key)
    return None if found is None else json.loads(found)
