"""Records on the shared server and in memory, and short ways to play a worker."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import redis

from penstock.config.settings import RecordSettings
from penstock.names import Pipeline
from penstock.record import Record
from penstock.testing.record import MemoryRecord, MemoryRecords


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses nothing but records on the double too."""
    if "record_kind" in metafunc.fixturenames:
        needs_server = {"client", "redis_url", "proxy"}.intersection(metafunc.fixturenames)
        metafunc.parametrize("record_kind", ["redis"] if needs_server else ["memory", "redis"])


@pytest.fixture
def client(redis_url: str) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(redis_url) as connected:
        yield connected


@pytest.fixture
def make_record(
    request: pytest.FixtureRequest, record_kind: str, pipeline: Pipeline, exits: ExitStack
) -> Callable[[RecordSettings], Record]:
    """Makes views of the same records, with settings of their own."""
    records = MemoryRecords()

    def make(settings: RecordSettings) -> Record:
        if record_kind == "memory":
            return MemoryRecord(records, settings)
        return exits.enter_context(closing(Record(request.getfixturevalue("client"), pipeline, settings)))

    return make


@pytest.fixture
def record(make_record: Callable[[RecordSettings], Record]) -> Record:
    """The records with a long lease, for a test that plays the workers."""
    return make_record(RecordSettings(lease_s=30))


@pytest.fixture
def hasty(make_record: Callable[[RecordSettings], Record]) -> Record:
    """The same records, with the shortest lease."""
    return make_record(RecordSettings(lease_s=0.2, max_attempts=2))
