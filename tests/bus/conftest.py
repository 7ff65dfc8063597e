"""Buses, most of them on real servers, with the topics of a pipeline that no other test uses."""

import pytest

from penstock.bus.contract import Bus
from penstock.bus.kafka.bus import KafkaBus
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from penstock.testing.bus import MemoryBus
from tests.bus.buses import make_bus


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of the contract on each bus; on the double only what needs no processes."""
    if "bus_kind" in metafunc.fixturenames:
        kinds = ["streams", "kafka"] if "spawn" in metafunc.fixturenames else ["memory", "streams", "kafka"]
        metafunc.parametrize("bus_kind", kinds)


@pytest.fixture
def bus(request: pytest.FixtureRequest, bus_kind: str, pipeline: Pipeline) -> Bus:
    """Each bus with its topics: on real servers, and the double in memory."""
    if bus_kind == "memory":
        made: Bus = MemoryBus(pipeline)
    else:
        made = make_bus(bus_kind, pipeline, request.getfixturevalue("kafka" if bus_kind == "kafka" else "redis_url"))
    assert sorted(made.create_topics()) == sorted(pipeline.all_topics())
    return made


@pytest.fixture
def streams_bus(redis_url: str, pipeline: Pipeline) -> Bus:
    made = make_bus("streams", pipeline, redis_url)
    made.create_topics()
    return made


@pytest.fixture
def kafka_bus(kafka: str, pipeline: Pipeline) -> KafkaBus:
    """Kafka with one partition a topic, so that messages have one order."""
    made = KafkaBus(pipeline, kafka, BusSettings(partitions=1, transaction_timeout_s=30.0))
    made.create_topics()
    return made
