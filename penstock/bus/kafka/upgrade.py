"""Counts and moves the messages in the retry topics of an older version, on Kafka (see `penstock.bus.upgrade`)."""

from collections.abc import Iterator

from confluent_kafka import OFFSET_BEGINNING, Consumer, ConsumerGroupState, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.admin_lookups import (
    CommittedOffsets,
    count_unsettled_messages,
    retry_during_election,
)
from penstock.bus.kafka.client import BROKER_TIMEOUT_S, parse_delivery
from penstock.bus.kafka.client_factory import KafkaClientFactory
from penstock.bus.kafka.offsets import Partition, PartitionOffsets
from penstock.bus.kafka.writers import Transactions
from penstock.bus.upgrade import build_moved_message, old_workers_error
from penstock.errors import BusUnavailable
from penstock.names import CLASSES, ORIGIN_HEADER, STAGES, Stage

MAX_BATCH_MESSAGES = 100
"""How many messages are moved at a time."""


def count_old_retries(bus: KafkaClientFactory) -> int:
    """Return about how many messages are left. A message counts until both groups have settled it or passed it over."""
    partitions = _list_retry_partitions(bus)
    return (
        max((sum(_count_unsettled(bus, stage, partitions).values()) for stage in STAGES), default=0)
        if partitions
        else 0
    )


def move_old_retries(bus: KafkaClientFactory) -> int:
    """Move the messages back, each batch and its offsets in one transaction, and return how many.

    Raise `UpgradeNeeded` while a group has members, as they may hold some of the messages.
    """
    partitions = _list_retry_partitions(bus)
    if not partitions:
        return 0
    found = {stage: _count_unsettled(bus, stage, partitions) for stage in STAGES}
    behind = {stage: [one for one, count in counts.items() if count] for stage, counts in found.items()}
    for stage in STAGES if any(behind.values()) else ():
        if _has_members(bus, stage):
            raise old_workers_error(stage)
    return sum(_move_messages(bus, stage, wanted) for stage, wanted in behind.items() if wanted)


def _has_members(bus: KafkaClientFactory, stage: Stage) -> bool:
    admin = AdminClient(bus.clients)
    listed = admin.list_consumer_groups(request_timeout=BROKER_TIMEOUT_S).result(BROKER_TIMEOUT_S)
    if listed.errors:
        raise listed.errors[0]
    states = {group.group_id: group.state for group in listed.valid}
    return states.get(bus.pipeline.consumer_group(stage), ConsumerGroupState.EMPTY) is not ConsumerGroupState.EMPTY


def _list_retry_partitions(bus: KafkaClientFactory) -> list[Partition]:
    known = AdminClient(bus.clients).list_topics(timeout=BROKER_TIMEOUT_S).topics
    topics = [topic for topic in bus.pipeline.old_retry_topics() if topic in known]
    return [(topic, number) for topic in topics for number in known[topic].partitions]


def _count_unsettled(bus: KafkaClientFactory, stage: Stage, partitions: list[Partition]) -> dict[Partition, int]:
    commits = CommittedOffsets(bus.clients, bus.pipeline.consumer_group(stage))
    try:
        return retry_during_election(lambda: count_unsettled_messages(AdminClient(bus.clients), commits, partitions))
    finally:
        commits.close()


def _move_messages(bus: KafkaClientFactory, stage: Stage, partitions: list[Partition]) -> int:
    writer = Transactions(bus.clients, f"{bus.pipeline.consumer_group(stage)}.upgrade", BROKER_TIMEOUT_S)
    consumer = Consumer(
        {
            **bus.clients,
            "group.id": bus.pipeline.consumer_group(stage),
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    num_moved = 0
    try:
        for outputs, places in _read_batches(bus, stage, consumer, partitions):
            writer.run_transaction(outputs, places, consumer.consumer_group_metadata())
            num_moved += len(outputs)
    finally:
        consumer.close()
        writer.close()
    return num_moved


def _read_batches(
    bus: KafkaClientFactory, stage: Stage, consumer: Consumer, partitions: list[Partition]
) -> Iterator[tuple[list[Outgoing], list[TopicPartition]]]:
    """Yield batches of the messages that the group has not settled, with the offsets to commit with each batch."""
    pipeline = bus.pipeline
    classes = dict(zip(pipeline.old_retry_topics(), CLASSES, strict=True))
    asked = consumer.committed([TopicPartition(*partition) for partition in partitions], timeout=BROKER_TIMEOUT_S)
    for one in asked:
        if one.error:  # an open transaction may still change it; from the log's beginning all would be moved again
            raise KafkaException(one.error)
    offsets = {(one.topic, one.partition): PartitionOffsets(max(0, one.offset), one.metadata or "") for one in asked}
    consumer.assign([TopicPartition(*one, known.next_offset or OFFSET_BEGINNING) for one, known in offsets.items()])
    unread, outputs = set(partitions), list[Outgoing]()
    while unread:
        message = consumer.poll(BROKER_TIMEOUT_S)
        if message is None:
            raise BusUnavailable("Kafka: a retry topic of an older version cannot be read to its end")
        partition, error = (message.topic() or "", message.partition() or 0), message.error()
        if error is None:
            delivery = parse_delivery(message, classes[partition[0]])
            is_new = offsets[partition].note_delivered(message.offset() or 0)
            # Prefill's group moves what came from no known topic to the dead letters.
            is_jobs = delivery.headers.get(ORIGIN_HEADER) == pipeline.job_topic(delivery.klass)
            if is_new and is_jobs == (stage == "decode"):
                outputs.append(build_moved_message(pipeline, delivery))
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - that is its name
            offsets[partition].skip_to(message.offset() or 0)
            unread.discard(partition)
        elif not error.retriable():
            raise KafkaException(error)
        if len(outputs) >= MAX_BATCH_MESSAGES or not unread:
            yield outputs, [TopicPartition(*one, known.next_offset) for one, known in offsets.items()]
            outputs = []
