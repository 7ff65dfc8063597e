"""Follows a topic on Kafka, or reads it to its end: read_committed, from offsets that the caller keeps, in no group."""

import contextlib
import logging
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.bus.contract import MAX_FOLLOWED_MESSAGES, FollowedMessage, Outgoing
from penstock.bus.kafka.admin_lookups import retry_during_election
from penstock.bus.kafka.client import (
    BROKER_TIMEOUT_S,
    DAMAGED_BATCH_ERRORS,
    FETCH_LIMITS,
    DamagedBatches,
    bus_errors,
    parse_headers,
    parse_key,
)
from penstock.bus.kafka.offsets import Partition
from penstock.errors import BusUnavailable
from penstock.names import find_shared_topic, split_topic

log = logging.getLogger(__name__)

PARTITION_REFRESH_S = 5.0
"""How often the follower looks for partitions that were added to the topic."""
OPEN_TRANSACTION_WAIT_S = 3.0
"""How long `read_topic` waits for transactions that are open in the topic."""


class KafkaFollower:
    """Reads every partition of the topic and of tenants' own ones beside it, also those that are added later.

    The partitions of a tenant's own topic are named by what its name has behind the topic's, and the number.
    """

    def __init__(self, clients: Mapping[str, Any], topic: str, after: Mapping[str, str]) -> None:
        self._topic = topic
        self._after = {self._parse_name(name): int(offset) for name, offset in after.items()}
        """The last offset of each partition that was returned or passed over; -1 before the first."""
        self._assigned, self._at_end = set[Partition](), set[Partition]()
        self._damaged = DamagedBatches()
        self._looked_at = time.monotonic()
        # Offsets may be out of range on either side of the log: `_move_into_log` decides where to go on.
        more = {"auto.offset.reset": "error", "enable.partition.eof": True, "queued.max.messages.kbytes": 16384}
        self._consumer = _open_consumer(clients, f"{topic}.follower", more)
        try:
            with bus_errors():
                self._assign_new()
        except BaseException:
            self._consumer.close()
            raise

    def read_messages(self, timeout_s: float, max_messages: int = MAX_FOLLOWED_MESSAGES) -> list[FollowedMessage]:
        """Return the next messages; see `contract.Follower.read_messages`."""
        found: list[FollowedMessage] = []
        with bus_errors():
            if time.monotonic() > self._looked_at + PARTITION_REFRESH_S:
                self._assign_new()
            first = self._consumer.poll(timeout_s)
            for message in () if first is None else (first, *self._consumer.consume(max_messages - 1, 0)):
                error, offset = message.error(), message.offset() or 0
                partition = message.topic() or "", message.partition() or 0
                if error is None:
                    found.append(FollowedMessage(_name_partition(partition), str(offset), _parse_message(message)))
                    self._after[partition] = offset
                    self._at_end.discard(partition)
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - that is its name
                    self._at_end.add(partition)
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - that is its name
                    if self._move_into_log(partition):
                        found.append(FollowedMessage(_name_partition(partition), str(self._after[partition]), None))
                elif error.code() in DAMAGED_BATCH_ERRORS:
                    self._pass_damaged(partition, offset)
                elif not error.retriable():
                    raise KafkaException(error)
        return found

    @property
    def is_at_end(self) -> bool:
        """Whether all that was committed in each partition was returned, when the brokers said so last."""
        return self._at_end == self._assigned

    def close(self) -> None:
        """Free the connections."""
        self._consumer.close()

    def _parse_name(self, name: str) -> Partition:
        own, _, number = name.rpartition(":")
        return self._topic + own, int(number)

    def _assign_new(self) -> None:
        """Begin to read the partitions of the topics that are not read yet."""
        known = self._consumer.list_topics(timeout=BROKER_TIMEOUT_S).topics
        mine = [one for name, one in known.items() if find_shared_topic(name) == self._topic and one.error is None]
        if self._topic not in known:  # this one tells why
            mine += [self._consumer.list_topics(self._topic, BROKER_TIMEOUT_S).topics[self._topic]]
        for one in mine:
            if one.error is not None:
                raise BusUnavailable(f"Kafka: topic {one.topic}: {one.error.str()}")
        self._looked_at = time.monotonic()
        fresh = sorted({(str(one.topic), number) for one in mine for number in one.partitions} - self._assigned)
        if fresh:
            self._consumer.incremental_assign([self._next_offset(partition) for partition in fresh])
            self._assigned.update(fresh)

    def _next_offset(self, partition: Partition) -> TopicPartition:
        return TopicPartition(*partition, self._after[partition] + 1 if partition in self._after else OFFSET_BEGINNING)

    def _pass_damaged(self, partition: Partition, batch: int) -> None:
        """Pass over a message that cannot be unpacked: no worker wrote it, and those behind it would wait for ever."""
        passed = self._damaged.pass_over(self._consumer, partition, batch, self._next_offset(partition).offset)
        if passed is not None:
            log.warning("Kafka: skipped offset %d of %s partition %d: it cannot be unpacked", passed, *partition)
            self._after[partition] = passed

    def _move_into_log(self, partition: Partition) -> bool:
        """Go on with a partition whose log does not have the next offset. Return whether the log ends before it.

        A log that ends before the next offset lost its tail, and all that is left of it was read. A log that begins
        after it has deleted old messages, and all that is left is unread.
        """
        low, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), BROKER_TIMEOUT_S)
        wanted = self._next_offset(partition).offset
        is_shorter = wanted > high
        if is_shorter:
            log.warning("%s, partition %d: the log ends at %d, before %d: its end was lost, and what was written since "
                        "may be passed over", *partition, high, wanted)  # fmt: skip
        self._after[partition] = min(max(wanted, low), high) - 1
        self._consumer.incremental_unassign([TopicPartition(*partition)])
        self._consumer.incremental_assign([self._next_offset(partition)])
        return is_shorter


def _open_consumer(clients: Mapping[str, Any], group: str, more: Mapping[str, Any]) -> Consumer:
    """Return a consumer of committed messages. It must have a group; nothing is committed under it."""
    settings = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_committed"}
    return Consumer({**clients, **FETCH_LIMITS, **settings, **more})


def _open_tool(clients: Mapping[str, Any], topic: str, more: Mapping[str, Any]) -> Consumer:
    """Return a consumer for one reading of a topic."""
    return _open_consumer(clients, f"{topic}.tool-{uuid.uuid4().hex}", {"fetch.wait.max.ms": 50, **more})


def _parse_message(message: Message) -> Outgoing:
    return Outgoing(message.topic() or "", message.value() or b"", parse_key(message), parse_headers(message))


def _name_partition(partition: Partition) -> str:
    own = split_topic(partition[0])[1]
    return f"{own}:{partition[1]}" if own else str(partition[1])


MAX_READ_OVER = 100
"""So many messages between two wanted ones are read over; behind more, reading begins anew."""


class PlacedMessage(NamedTuple):
    """A message at a known place of its topic."""

    message: Outgoing
    timestamp_s: float


def read_places(
    clients: Mapping[str, Any], topic: str, places: Sequence[tuple[int, int]]
) -> Iterator[PlacedMessage | None]:
    """Yield the message at each place (partition, offset), None where it was deleted. Places that ascend are read
    fastest. Raise `BusUnavailable`.
    """
    with contextlib.closing(_open_tool(clients, topic, {"auto.offset.reset": "error"})) as reader, bus_errors():
        at = (-1, 0)
        for number, wanted in places:
            if at[0] != number or not at[1] <= wanted <= at[1] + MAX_READ_OVER:
                reader.assign([TopicPartition(topic, number, wanted)])
            message = _read_until(reader, wanted)
            at = (-1, 0) if message is None else (number, (message.offset() or 0) + 1)
            if message is None or message.offset() != wanted:
                yield None
                at = (-1, 0)
            else:
                yield PlacedMessage(_parse_message(message), message.timestamp()[1] / 1000)


def _read_until(reader: Consumer, wanted: int) -> Message | None:
    """Return the first message that is not before an offset; None where the log begins behind it."""
    until = time.monotonic() + BROKER_TIMEOUT_S
    while time.monotonic() < until:
        message = reader.poll(1.0)
        if message is None:
            continue
        error = message.error()
        if error is None:
            if (message.offset() or 0) >= wanted:
                return message
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:  # noqa: SLF001 - that is its name
            return None
        elif not error.retriable():
            raise KafkaException(error)
    raise BusUnavailable(f"Kafka: offset {wanted} cannot be read")


def read_topic(clients: Mapping[str, Any], topic: str, last: int = sys.maxsize) -> list[Outgoing]:
    """Return every committed message in a topic that can be unpacked, partition by partition; with `last` those of so
    many offsets at the end of each partition. Raise `BusUnavailable`.

    A producer knows that its transaction is committed before readers see the messages. So this reads to the end of
    the log, and waits up to `OPEN_TRANSACTION_WAIT_S` for transactions that are still open there.
    """
    more = {"auto.offset.reset": "earliest", "enable.partition.eof": True}
    with contextlib.closing(_open_tool(clients, topic, more)) as reader, bus_errors():
        numbers = reader.list_topics(topic, BROKER_TIMEOUT_S).topics[topic].partitions
        places = [TopicPartition(topic, number) for number in numbers]
        for place in places:
            low, high = retry_during_election(partial(reader.get_watermark_offsets, place, BROKER_TIMEOUT_S))
            place.offset = max(low, high - last)
        reader.assign(places)
        return _read_to_end(reader, topic, set(numbers))


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
            found.append(_parse_message(message))
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
