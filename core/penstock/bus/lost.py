"""Counts in Redis the messages that a bus deleted before they were read, for `penstock doctor` and the page."""

import time
from collections.abc import Mapping
from typing import Any

import redis

from penstock.names import Pipeline
from penstock.redis.client import execute_pipeline

LOST_KEPT_S = 7 * 86400
"""How long the counts are kept after the last loss."""


def count_lost(client: "redis.Redis", pipeline: Pipeline, lost: Mapping[str, int]) -> None:
    """Count lost messages, by topic. Raise `redis.RedisError`."""
    if not lost:
        return
    with client.pipeline(transaction=False) as batch:
        for topic, count in lost.items():
            batch.hincrby(pipeline.lost_key, topic, count)
        batch.expire(pipeline.lost_key, LOST_KEPT_S)
        execute_pipeline(batch)


def describe_lost(client: "redis.Redis", pipeline: Pipeline) -> list[str]:
    """Return a sentence for each topic that lost messages within the last week. Raise `redis.RedisError`."""
    counts: Any = client.hgetall(pipeline.lost_key)
    left_s = client.ttl(pipeline.lost_key)
    last = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() - max(0, LOST_KEPT_S - left_s)))
    return [
        f"{int(count):,} messages of {topic.decode()} were deleted before they were answered, the last found {last}"
        for topic, count in sorted(counts.items())
    ]
