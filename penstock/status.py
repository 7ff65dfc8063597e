"""What the workers of a pipeline say of themselves, from their heartbeat keys."""

import json
from typing import Any

import redis

from penstock.names import Pipeline
from penstock.settings import Addresses


def worker_status(addresses: Addresses) -> list[dict[str, Any]]:
    """The last heartbeat of each live worker, by stage and name (see `penstock.worker.Heartbeat`)."""
    pipeline = Pipeline(addresses.pipeline)
    with redis.Redis.from_url(addresses.stream_url) as client:
        keys = sorted(client.scan_iter(match=pipeline.worker_key("*", "*"), count=1000))
        values = client.mget(keys) if keys else []
    return [json.loads(value) for value in values if value is not None]
