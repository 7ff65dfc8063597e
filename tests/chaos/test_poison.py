"""What a producer does to break readers arrives as it was meant."""

from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from penstock.config.addresses import Addresses
from penstock.messages import Request
from penstock.names import Pipeline
from sim.chaos.poison import send_bomb, send_poisoned
from sim.waiting import PATIENCE_S

TOPIC = Pipeline("poison").request_topic("interactive")


@pytest.fixture
def kafka() -> Iterator[Addresses]:
    """A broker that librdkafka pretends to be."""
    owner = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 0})
    (broker,) = owner.list_topics(timeout=PATIENCE_S).brokers.values()
    yield Addresses(pipeline="poison", stream_url="redis://unused", kafka=f"{broker.host}:{broker.port}")
    owner.flush()


def first(kafka: Addresses) -> Message:
    """What a reader gets first, a message or an error."""
    consumer = Consumer({"bootstrap.servers": kafka.kafka, "group.id": "reader", "log_level": 0})
    partitions = consumer.list_topics(TOPIC, PATIENCE_S).topics[TOPIC].partitions
    consumer.assign([TopicPartition(TOPIC, number, 0) for number in partitions])
    message = consumer.poll(PATIENCE_S)
    consumer.close()
    assert message is not None
    return message


def test_a_header_that_is_no_text_arrives_with_its_request(kafka: Addresses) -> None:
    request = Request(id="header0", prompt="hello")
    send_poisoned(kafka, [request])
    message = first(kafka)
    assert (message.key(), message.value()) == (b"header0", request.encode())
    # What else there is of it may bring the client down (SystemError), and is not looked at here.


def test_a_bomb_cannot_be_unpacked(kafka: Addresses) -> None:
    send_bomb(kafka, "bomb0")
    error = first(kafka).error()
    assert error is not None
    assert error.code() == KafkaError._BAD_COMPRESSION
