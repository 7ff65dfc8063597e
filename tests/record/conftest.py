"""A record on the shared server, and short ways to play a worker."""

from collections.abc import Iterator

import pytest
import redis

from penstock.config.settings import RecordSettings
from penstock.names import Pipeline
from penstock.record import Record


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as connected:
        yield connected


@pytest.fixture
def hasty(client: "redis.Redis", pipeline: Pipeline) -> Iterator[Record]:
    """The same records, with the shortest lease."""
    made = Record(client, pipeline, RecordSettings(lease_s=0.2, max_attempts=2))
    yield made
    made.close()
