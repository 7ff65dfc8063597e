"""Reads a topic to its end, outside any group."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.client import (
    BROKER_TIMEOUT_S,
    DAMAGED_BATCH_ERRORS,
    FETCH_LIMITS,
    DamagedBatches,
    bus_errors,
    parse_headers,
    parse_key,
)
from penstock.errors import BusUnavailable

OPEN_TRANSACTION_WAIT_S = 3.0
"""How long a read waits for transactions that are open in the topic."""


def read_topic(clients: Mapping[str, Any], topic: str, last: int = 0) -> list[Outgoing]:
    """Return every committed message in a topic that can be unpacked, partition by partition; with `last` only those
    of so many offsets at the end of each.

    A producer knows that its transaction is committed before readers see the messages. So this reads to the end of the
    log, and waits up to `OPEN_TRANSACTION_WAIT_S` for transactions that are still open there. Raise `BusUnavailable`.
    """
    reader = Consumer(
        dict(clients)
        | FETCH_LIMITS
        | {
            "group.id": f"{topic}.tool-{uuid.uuid4().hex}",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
        }
    )
    try:
        with bus_errors():
            begins = dict.fromkeys(reader.list_topics(topic, BROKER_TIMEOUT_S).topics[topic].partitions, 0)
            for number in begins if last else ():
                _, end = reader.get_watermark_offsets(TopicPartition(topic, number), BROKER_TIMEOUT_S)
                begins[number] = max(0, end - last)
            reader.assign(
                [TopicPartition(topic, number, begin or OFFSET_BEGINNING) for number, begin in begins.items()]
            )
            return _read_to_end(reader, topic, set(begins))
    finally:
        reader.close()


def _read_to_end(reader: Consumer, topic: str, unread: set[int]) -> list[Outgoing]:
    """Return the messages of the `unread` partitions, up to their ends as known when reading first reached them."""
    found: list[Outgoing] = []
    ends: dict[int, int] = {}  # the log's end, of partitions with an open transaction
    damaged = DamagedBatches()
    until = time.monotonic() + BROKER_TIMEOUT_S
    while (unread or ends) and time.monotonic() < until:
        message = reader.poll(0.1 if ends else 1.0)
        if message is None:
            continue
        error, number, offset, had_more = message.error(), message.partition() or 0, message.offset() or 0, bool(unread)
        if error is None:
            found.append(Outgoing(topic, message.value() or b"", parse_key(message), parse_headers(message)))
        elif error.code() in DAMAGED_BATCH_ERRORS:
            damaged.pass_over(reader, (topic, number), offset)
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - that is its name
            if number in unread:
                unread.discard(number)
                ends[number] = reader.get_watermark_offsets(TopicPartition(topic, number), cached=True)[1]
        elif not error.retriable():
            raise KafkaException(error)
        ends = {one: end for one, end in ends.items() if one != number or end > offset}
        if had_more:
            until = time.monotonic() + (BROKER_TIMEOUT_S if unread else OPEN_TRANSACTION_WAIT_S)
    if unread:
        raise BusUnavailable(f"Kafka: {topic} cannot be read to its end")
    return found
