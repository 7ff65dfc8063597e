"""What `penstock doctor` finds on a real Kafka: settings that may lose requests, and transactions that nobody ends."""

import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.admin_lookups import StuckPartition, find_stuck_partitions
from penstock.bus.kafka.bus import KafkaBus, find_old_work, find_wrong_settings
from penstock.bus.lost import count_lost
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from sim.waiting import PATIENCE_S, wait_for
from tests.bus.buses import publish_messages
from tests.commands import Terminal


def set_topic_settings(bus: KafkaBus, topic: str, settings: dict[str, str]) -> None:
    """Set a topic's settings, as Kafka's own tools would, and wait until the broker has them."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient(bus.clients)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()

    def are_known() -> bool:  # a controller answers before brokers have read what it wrote
        (found,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
        known = found.result()
        return all(known[name].value == value for name, value in settings.items())

    wait_for(are_known, "the broker has them")


@pytest.fixture
def bus(kafka: str, pipeline: Pipeline) -> KafkaBus:
    made = KafkaBus(pipeline, kafka, BusSettings())
    made.create_topics()
    return made


@pytest.fixture
def servers(bus: KafkaBus, redis_url: str, pipeline: Pipeline) -> dict[str, str]:
    """Where a command finds the pipeline."""
    return {
        "PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_KAFKA": bus.bootstrap, "PENSTOCK_STREAM_URL": redis_url
    }  # fmt: skip


@pytest.mark.proof
def test_doctor_says_how_to_mend_topics_that_may_lose_requests(
    bus: KafkaBus, servers: dict[str, str], pipeline: Pipeline, terminal: Terminal
) -> None:
    assert find_wrong_settings(bus) == {}
    topic, kept = pipeline.request_topic("batch"), pipeline.job_topic("batch")
    set_topic_settings(bus, topic, {"message.timestamp.type": "CreateTime", "retention.bytes": "1000000"})
    set_topic_settings(bus, kept, {"retention.ms": "-1", "max.message.bytes": "33554432"})
    report = terminal("doctor", **servers)
    assert f"fail  topic settings      {topic}: " in report.stdout
    assert "message.timestamp.type is CreateTime" in report.stdout
    assert kept not in report.stdout, "longer and larger is as good"
    (command,) = (line for line in report.stdout.splitlines() if "kafka-configs.sh" in line)
    assert f"--bootstrap-server {bus.bootstrap} --alter --entity-type topics --entity-name {topic} " in command
    set_topic_settings(bus, topic, dict(pair.split("=") for pair in command.split("--add-config ")[1].split(",")))
    assert find_wrong_settings(bus) == {}
    assert "ok    topic settings" in terminal("doctor", **servers).stdout


def test_an_open_transaction_is_found_by_partition_and_gone_when_it_ends(
    bus: KafkaBus, servers: dict[str, str], pipeline: Pipeline, terminal: Terminal
) -> None:
    topic = pipeline.job_topic("batch")
    producer = Producer(bus.clients | {"transactional.id": pipeline.name, "transaction.timeout.ms": 60_000})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for value in ("one", "two"):
        producer.produce(topic, value, partition=2)
    assert producer.flush() == 0
    assert find_stuck_partitions(bus.clients, pipeline.all_topics(), 1.0) == [StuckPartition(topic, 2, 0, 2)]

    report = terminal("doctor", **servers, PENSTOCK_TESTING='{"bus_transaction_timeout_s": 1}')
    assert (
        f"fail  transactions        {topic} partition 2: readers wait at offset 0, the log ends at 2" in report.stdout
    )
    assert "kafka-transactions.sh" in report.stdout
    assert report.returncode == 1

    producer.commit_transaction(PATIENCE_S)
    assert find_stuck_partitions(bus.clients, pipeline.all_topics(), 1.0) == []
    assert "ok    transactions        none holds up a partition" in terminal("doctor", **servers).stdout


def test_doctor_says_what_was_lost_and_what_soon_will_be(
    bus: KafkaBus, servers: dict[str, str], redis_url: str, pipeline: Pipeline, terminal: Terminal
) -> None:
    topic = pipeline.request_topic("batch")
    publish_messages(bus, [Outgoing(topic, b"waits", "k")])
    first = terminal("doctor", **servers).stdout
    assert "oldest message" not in first
    assert "lost messages" not in first
    count_lost(redis_client(redis_url), pipeline, topic, 3)
    set_topic_settings(bus, topic, {"message.timestamp.type": "CreateTime"})
    producer = Producer(bus.clients)

    def is_old() -> bool:
        """Whether one waits for eight days; the brokers take its own time once they know the setting."""
        producer.produce(topic, "old", partition=1, timestamp=int((time.time() - 8 * 86400) * 1000))
        producer.flush()
        return find_old_work(bus) == [topic]

    wait_for(is_old, "one waits for more than half of its time")
    report = terminal("doctor", **servers).stdout
    assert f"fail  oldest message      {topic}: one waits for half of the time " in report
    assert f"note  lost messages       3 messages of {topic} were deleted" in report
