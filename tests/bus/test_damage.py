"""Messages that a client can write and ours cannot read: they stop nobody, and are found in the dead letters."""

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Consumer, Producer

from penstock.bus.contract import MAX_MESSAGE_BYTES, Bus, Delivery, FollowedMessage, Outgoing, Settlement
from penstock.bus.dead_letters import build_dead_letter
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.orphans import KafkaOrphanReader
from penstock.names import ORIGIN_HEADER, REASON_HEADER, Pipeline
from penstock.worker.delivery_queue import deserialize_delivery, serialize_delivery
from sim.waiting import PATIENCE_S, wait_for
from tests.bus.buses import (
    CAPACITY,
    begin_with_first,
    list_values,
    make_settlement,
    publish_messages,
    take_deliveries,
)

NUM_GOOD = 40
"""Messages after which the interpreter has replaced the code that reads headers by its faster form."""
BYTES = b"\xff\xfe215"
"""No UTF-8."""


class RawProducer:
    """librdkafka without the Python client, which makes text of the names of headers."""

    TOPIC, VALUE, HEADER = (ctypes.c_int(kind) for kind in (1, 4, 9))
    END = ctypes.c_int(0)

    def __init__(self, address: str) -> None:
        (path,) = Path(confluent_kafka.__file__).parent.parent.glob("confluent_kafka.libs/librdkafka*.so*")
        self._library = ctypes.CDLL(str(path))
        for name in ("rd_kafka_conf_new", "rd_kafka_new"):
            getattr(self._library, name).restype = ctypes.c_void_p
        conf, self._why = ctypes.c_void_p(self._library.rd_kafka_conf_new()), ctypes.create_string_buffer(512)
        self._library.rd_kafka_conf_set(conf, b"bootstrap.servers", address.encode(), self._why, ctypes.c_size_t(512))
        made = self._library.rd_kafka_new(0, conf, self._why, ctypes.c_size_t(512))
        self._producer = ctypes.c_void_p(made)

    def produce(self, topic: str, value: bytes, header_names: list[bytes]) -> None:
        words = [self.TOPIC, topic.encode(), self.VALUE, value, ctypes.c_size_t(len(value))]
        for name in header_names:
            words += [self.HEADER, name, b"x", ctypes.c_ssize_t(1)]
        assert self._library.rd_kafka_producev(self._producer, *words, self.END) == 0
        assert self._library.rd_kafka_flush(self._producer, round(1000 * PATIENCE_S)) == 0

    def close(self) -> None:
        self._library.rd_kafka_destroy(self._producer)


@pytest.fixture
def raw(kafka: str, exits: contextlib.ExitStack) -> RawProducer:
    return exits.enter_context(contextlib.closing(RawProducer(kafka)))


def test_header_names_that_are_no_text_stop_nobody(kafka_bus: KafkaBus, raw: RawProducer, pipeline: Pipeline) -> None:
    """Neither a member, nor who reads for a dead one, nor who follows or reads all, when many were read before it."""
    topic = pipeline.request_topic("interactive")
    publish_messages(kafka_bus, [Outgoing(topic, b"good", "k", {"a": "b"})] * NUM_GOOD)
    raw.produce(topic, b"bad", [b"\xff\xfe", b"good", b"\xff"])
    orphans = KafkaOrphanReader(pipeline, "prefill", kafka_bus.clients, begin_with_first)
    found: list[Delivery] = []
    while len(found) <= NUM_GOOD:
        found += orphans.read_orphans([f"{topic}:0"], 10)
    orphans.close()
    follower = kafka_bus.follow_topic(topic, {})
    followed: list[Outgoing] = []
    while len(followed) <= NUM_GOOD:
        followed += [one.message for one in follower.read_messages(1.0) if one.message is not None]
    follower.close()
    with kafka_bus.join_group("prefill", "a") as member:
        taken = take_deliveries(member, NUM_GOOD + 1)
        member.settle([make_settlement(pipeline, delivery) for delivery in taken])
    for messages in (found, taken, followed, kafka_bus.read_all(topic)):
        assert [(m.value, m.headers) for m in messages] == [(b"good", {"a": "b"})] * NUM_GOOD + [(b"bad", {})]


def test_bytes_in_key_and_headers_come_back_as_they_were(bus: Bus, pipeline: Pipeline) -> None:
    """In a dead letter, and in the message that a claim keeps."""
    sent = Outgoing(
        pipeline.request_topic("batch"), b"", BYTES.decode(errors="surrogateescape"), {"h": "\udcff\udcfe1"}
    )
    publish_messages(bus, [sent])
    with bus.join_group("prefill", "a") as member:
        (taken,) = take_deliveries(member, 1)
        kept = deserialize_delivery(serialize_delivery(taken, "default", "r"))
        assert (kept.key, kept.headers) == (taken.key, taken.headers)
        member.settle([Settlement(taken, [build_dead_letter(pipeline, taken, "unreadable")])])
    (letter,) = bus.read_all(pipeline.dead_letter_topic)
    assert letter.key == sent.key
    assert letter.headers["h"] == sent.headers["h"]
    if isinstance(bus, KafkaBus):
        consumer = Consumer(bus.clients | {"group.id": f"{pipeline.dead_letter_topic}.tool"})
        consumer.assign([confluent_kafka.TopicPartition(pipeline.dead_letter_topic, number, 0) for number in range(2)])
        (message,) = consumer.consume(1, PATIENCE_S)
        consumer.close()
        assert message.key() == BYTES
        assert dict(message.headers() or [])["h"] == b"\xff\xfe1"


class LateCommit(Consumer):
    """Has a transaction committed when it has read all that was before it."""

    transaction: Producer

    def get_watermark_offsets(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cached"):
            self.transaction.commit_transaction(PATIENCE_S)
        return super().get_watermark_offsets(*args, **kwargs)


def test_all_of_a_topic_is_what_is_being_committed_too(
    kafka_bus: KafkaBus, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who committed may read before the brokers let readers see it."""
    publish_messages(kafka_bus, [Outgoing(pipeline.results_topic, b"1")])
    producer = Producer(kafka_bus.clients | {"transactional.id": pipeline.name})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    producer.produce(pipeline.results_topic, b"2")
    producer.flush()
    monkeypatch.setattr(LateCommit, "transaction", producer, raising=False)
    monkeypatch.setattr("penstock.bus.kafka.follower.Consumer", LateCommit)
    assert list_values(kafka_bus.read_all(pipeline.results_topic)) == [b"1", b"2"]


def publish_around_damage(kafka_bus: KafkaBus, topic: str) -> None:
    """Publish a message, a batch of three that is 3 KB on the wire and more than the client unpacks, and a message."""
    publish_messages(kafka_bus, [Outgoing(topic, b"before")])
    packed = {"compression.codec": "zstd", "linger.ms": 60_000, "message.max.bytes": 10**8, "batch.size": 10**8}
    producer = Producer(kafka_bus.clients | packed)
    for value in (b"beside", b"a" * 70_000_000, b"beside"):
        producer.produce(topic, value)
    assert producer.flush() == 0
    publish_messages(kafka_bus, [Outgoing(topic, b"behind")])


def test_a_batch_that_cannot_be_unpacked_is_buried_and_passed(kafka_bus: KafkaBus, pipeline: Pipeline) -> None:
    """By a member, and by the reader for a dead one. Messages in a batch with one that is too large go with it."""
    topic = pipeline.request_topic("interactive")
    publish_around_damage(kafka_bus, topic)
    with contextlib.closing(KafkaOrphanReader(pipeline, "prefill", kafka_bus.clients, begin_with_first)) as orphans:
        found = orphans.read_orphans([f"{topic}:0"], 10)
        while len(found) < 2:
            found += orphans.read_orphans([f"{topic}:0"], 10)
    assert [delivery.value for delivery in found] == [b"before", b"behind"]
    with kafka_bus.join_group("prefill", "a") as member:
        taken = take_deliveries(member, 2)
        assert [delivery.value for delivery in taken] == [b"before", b"behind"]
        member.poll(0.0, CAPACITY)
        letters = kafka_bus.read_all(pipeline.dead_letter_topic)
        assert [(letter.value, letter.headers[ORIGIN_HEADER]) for letter in letters] == [(b"", topic)] * 3
        reasons = [letter.headers[REASON_HEADER] for letter in letters]
        assert all(f"partition 0, offset {number}, cannot be" in why for number, why in enumerate(reasons, 1))
        member.settle([make_settlement(pipeline, delivery) for delivery in taken])
    wait_for(lambda: not kafka_bus.count_unsettled()[topic], "the group is behind them")
    with kafka_bus.join_group("prefill", "b") as member:
        assert member.poll(0.5, CAPACITY) == []
    assert len(kafka_bus.read_all(pipeline.dead_letter_topic)) == 3


def test_who_follows_or_reads_all_passes_a_batch_that_cannot_be_unpacked(
    kafka_bus: KafkaBus, pipeline: Pipeline
) -> None:
    """The meter of usage and the runner of batches follow the results."""
    publish_around_damage(kafka_bus, pipeline.results_topic)
    with contextlib.closing(kafka_bus.follow_topic(pipeline.results_topic, {})) as follower:
        found: list[FollowedMessage] = []

        def has_read() -> bool:
            found.extend(follower.read_messages(0.5))
            return len(found) > 1

        wait_for(has_read, "both messages")
    assert [(one.offset, one.message and one.message.value) for one in found] == [("0", b"before"), ("4", b"behind")]
    assert list_values(kafka_bus.read_all(pipeline.results_topic)) == [b"before", b"behind"]


def test_of_what_a_compression_hid_no_more_is_kept_than_a_message_may_have(
    kafka_bus: KafkaBus, pipeline: Pipeline
) -> None:
    topic = pipeline.request_topic("interactive")
    producer = Producer(kafka_bus.clients | {"compression.codec": "gzip", "message.max.bytes": 10**8})
    producer.produce(topic, b"a" * 40_000_000)
    assert producer.flush() == 0
    with kafka_bus.join_group("prefill", "a") as member:
        (delivery,) = take_deliveries(member, 1)
        assert len(delivery.value) == MAX_MESSAGE_BYTES
