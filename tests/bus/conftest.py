"""Buses on real servers, with the topics of a pipeline that no other test uses."""

import pytest

from penstock.bus.contract import Bus
from penstock.bus.kafka.bus import KafkaBus
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from tests.bus.buses import make_bus


@pytest.fixture(params=["streams", "kafka"])
def bus(request: pytest.FixtureRequest, pipeline: Pipeline) -> Bus:
    """Each bus on a real server, with its topics."""
    address = request.getfixturevalue("kafka" if request.param == "kafka" else "redis_url")
    made = make_bus(request.param, pipeline, address)
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
