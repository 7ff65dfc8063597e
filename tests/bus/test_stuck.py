"""A transaction that nobody ends, on a real Kafka."""

import pytest
from confluent_kafka import Producer

from penstock.bus.kafka.admin_lookups import StuckPartition, find_stuck_partitions
from penstock.bus.kafka.bus import KafkaBus
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from tests.commands import Terminal

pytestmark = pytest.mark.timeout(120)


def test_an_open_transaction_is_found_by_partition_and_gone_when_it_ends(
    kafka: str, redis_url: str, pipeline: Pipeline, terminal: Terminal
) -> None:
    bus = KafkaBus(pipeline, kafka, BusSettings())
    bus.create_topics()
    topic = pipeline.job_topic("batch")
    producer = Producer(
        {
            "bootstrap.servers": kafka,
            "transactional.id": pipeline.name,
            "transaction.timeout.ms": 60_000,
            "log_level": 0,
        }
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in ("one", "two"):
        producer.produce(topic, value, partition=2)
    assert producer.flush(30) == 0
    assert find_stuck_partitions(bus.clients, pipeline.all_topics(), 1.0) == [StuckPartition(topic, 2, 0, 2)]

    servers = {"PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_KAFKA": kafka, "PENSTOCK_STREAM_URL": redis_url}
    said = terminal("doctor", **servers, PENSTOCK_BUS_TRANSACTION_TIMEOUT_S="1")
    assert f"fail  transactions        {topic} partition 2: readers wait at offset 0, the log ends at 2" in said.stdout
    assert "kafka-transactions.sh" in said.stdout
    assert said.returncode == 1

    producer.commit_transaction(30)
    assert find_stuck_partitions(bus.clients, pipeline.all_topics(), 1.0) == []
    assert "ok    transactions        none holds up a partition" in terminal("doctor", **servers).stdout
