"""Counts in Redis the messages that a bus deleted before they were answered, for `penstock doctor` and the page."""

import time
from collections.abc import Mapping
from typing import Any

import redis

from penstock.names import Pipeline

LOST_KEPT_S = 7 * 86400
"""How long the counts are kept after the last loss."""


def count_lost(client: "redis.Redis", pipeline: Pipeline, lost: Mapping[str, int]) -> None:
    """Count lost messages, by topic. Raise `redis.RedisError`."""
    for topic, count in lost.items():
        client.hincrby(pipeline.lost_key, topic, count)
        client.expire(pipeline.lost_key, LOST_KEPT_S)


def describe_lost(client: "redis.Redis", pipeline: Pipeline) -> list[str]:
    """Return a sentence for each topic that lost messages within the last week. Raise `redis.RedisError`."""
    counts: Any = client.hgetall(pipeline.lost_key)
    last_s = time.time() + client.ttl(pipeline.lost_key) - LOST_KEPT_S
    last = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last_s))
    return [
        f"{int(count):,} messages of {topic.decode()} were deleted before they were answered, the last found {last}"
        for topic, count in sorted(counts.items())
    ]
