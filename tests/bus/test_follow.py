"""Following a topic, on both buses."""

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from penstock.bus.contract import Bus, FollowedMessage, Follower, Outgoing, Settlement
from penstock.bus.kafka import follower as kafka_follower
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.client import producer_settings
from penstock.bus.streams import bus as streams
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from sim.waiting import PATIENCE_S, wait_for
from tests.bus.buses import make_messages, make_settlement, publish_messages, take_deliveries

pytestmark = pytest.mark.proof


def read(follower: Follower, count: int, most: int = 500) -> list[FollowedMessage]:
    found: list[FollowedMessage] = []

    def is_there() -> bool:
        found.extend(follower.read_messages(0.2, most))
        return len(found) >= count

    wait_for(is_there, f"{count} messages")
    return found


def value_of(followed: FollowedMessage) -> bytes:
    assert followed.message is not None
    return followed.message.value


def settle(bus: Bus, pipeline: Pipeline, count: int, first: int = 0) -> None:
    publish_messages(
        bus, [Outgoing(pipeline.job_topic("batch"), b"%d" % (first + n), f"k{first + n}") for n in range(count)]
    )
    with bus.join_group("decode", "d") as member:
        member.settle([make_settlement(pipeline, delivery) for delivery in take_deliveries(member, count)])


def test_a_follower_reads_on_where_another_one_was(bus: Bus, pipeline: Pipeline) -> None:
    settle(bus, pipeline, 30)
    follower = bus.follow_topic(pipeline.results_topic, {})
    found = read(follower, 30)
    assert sorted(int(value_of(one)) for one in found) == list(range(30))
    assert all(one.message and one.message.key == f"k{one.message.value.decode()}" for one in found)
    settle(bus, pipeline, 5, first=30)
    assert sorted(int(value_of(one)) for one in read(follower, 5)) == list(range(30, 35))
    follower.close()
    counted = {one.partition: one.offset for one in found[:17]}  # of each part the last
    follower = bus.follow_topic(pipeline.results_topic, counted)
    rest = read(follower, 35 - 17, most=3)
    assert {int(value_of(one)) for one in rest} == set(range(35)) - {int(value_of(one)) for one in found[:17]}
    assert follower.read_messages(0.0) == []
    follower.close()


def test_what_a_transaction_takes_back_is_never_seen(kafka_bus: KafkaBus, pipeline: Pipeline) -> None:
    bus = kafka_bus
    producer = Producer(producer_settings(bus.clients) | {"transactional.id": f"{pipeline.name}-odd"})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for number in range(4):
        producer.produce(pipeline.results_topic, b"never", f"n{number}")
    producer.flush()
    follower = bus.follow_topic(pipeline.results_topic, {})
    assert follower.read_messages(0.5) == []
    producer.abort_transaction(PATIENCE_S)
    publish_messages(bus, make_messages(pipeline.results_topic, 4))
    assert {value_of(one) for one in read(follower, 4)} == {b"0", b"1", b"2", b"3"}
    follower.close()


@pytest.fixture
def logs(kafka_bus: KafkaBus, pipeline: Pipeline) -> KafkaBus:
    """Kafka, with 50 results in the one partition of their topic."""
    publish_messages(kafka_bus, make_messages(pipeline.results_topic, 50))
    return kafka_bus


def test_a_log_that_ends_before_the_place_is_followed_from_its_end(logs: KafkaBus, pipeline: Pipeline) -> None:
    follower = logs.follow_topic(pipeline.results_topic, {"0": "60"})
    assert read(follower, 1) == [FollowedMessage("0", "49", None)]
    publish_messages(logs, [Outgoing(pipeline.results_topic, b"new")])
    assert [(one.offset, value_of(one)) for one in read(follower, 1)] == [("50", b"new")]
    follower.close()


def test_a_log_that_begins_after_the_place_is_followed_from_its_beginning(logs: KafkaBus, pipeline: Pipeline) -> None:
    admin = AdminClient(logs.clients)
    asked = admin.delete_records([TopicPartition(pipeline.results_topic, 0, 20)])
    for future in asked.values():
        future.result()
    follower = logs.follow_topic(pipeline.results_topic, {"0": "10"})
    assert [one.offset for one in read(follower, 30)] == [str(offset) for offset in range(20, 50)]
    follower.close()


def test_partitions_that_are_added_are_followed(
    logs: KafkaBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_follower, "PARTITION_REFRESH_S", 0.1)
    follower = logs.follow_topic(pipeline.results_topic, {})
    read(follower, 50)
    admin = AdminClient(logs.clients)
    admin.create_partitions([NewPartitions(pipeline.results_topic, 2)])[pipeline.results_topic].result()
    producer = Producer(producer_settings(logs.clients))
    topic = pipeline.results_topic
    wait_for(lambda: len(producer.list_topics(topic, PATIENCE_S).topics[topic].partitions) == 2, "two")
    producer.produce(pipeline.results_topic, b"added", partition=1)
    assert producer.flush() == 0
    assert [(one.partition, value_of(one)) for one in read(follower, 1)] == [("1", b"added")]
    follower.close()


def test_what_is_not_counted_is_not_trimmed(
    streams_bus: Bus, redis_url: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.bus.streams.client.MAX_KEPT_ENTRIES", 50)
    bus = streams_bus
    client, key = redis_client(redis_url), pipeline.stream_key(pipeline.results_topic)
    client.hset(pipeline.meter_key("places"), streams.STREAM_PARTITION, "0")  # a meter has not begun

    def settle_large(count: int) -> None:
        publish_messages(bus, [Outgoing(pipeline.job_topic("batch"), b"x" * 1000) for _ in range(count)])
        with bus.join_group("decode", "d") as member:
            for delivery in take_deliveries(member, count, {"interactive": 0, "batch": count}):
                member.settle([Settlement(delivery, [Outgoing(pipeline.results_topic, delivery.value)])])

    settle_large(300)
    follower = bus.follow_topic(pipeline.results_topic, {})
    found = read(follower, 300)
    assert len(found) == 300
    client.hset(pipeline.meter_key("places"), streams.STREAM_PARTITION, found[199].offset)
    settle_large(1)
    assert 101 <= client.xlen(key) < 120  # more than what is not counted, as whole nodes are trimmed
    client.hset(pipeline.meter_key("places"), streams.STREAM_PARTITION, read(follower, 1)[-1].offset)
    settle_large(1)
    assert 50 <= client.xlen(key) < 70
    follower.close()
    client.close()
