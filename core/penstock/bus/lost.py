"""Counts in Redis the messages that a bus deleted before they were answered, for the page and `penstock doctor`."""

from collections.abc import Mapping
from typing import Any

import redis

from penstock.names import Pipeline

LOST_KEPT_S = 7 * 86400
"""How long the counts are kept after the last loss."""


def count_lost(client: "redis.Redis", pipeline: Pipeline, topic: str, count: int) -> None:
    """Count lost messages of a topic. Raise `redis.RedisError`."""
    client.hincrby(pipeline.lost_key, topic, count)
    client.expire(pipeline.lost_key, LOST_KEPT_S)


def read_lost(client: "redis.Redis", pipeline: Pipeline) -> dict[str, int]:
    """Return how many messages of each topic were lost, the last within a week. Raise `redis.RedisError`."""
    counts: Any = client.hgetall(pipeline.lost_key)
    return {topic.decode(): int(count) for topic, count in sorted(counts.items())}


def describe_lost(lost: Mapping[str, int]) -> list[str]:
    """Return a sentence for each topic."""
    return [f"{count:,} messages of {topic} were deleted before they were answered" for topic, count in lost.items()]
