"""Reads partitions whose member died: outside the group, from its committed offsets, which stay as they are.

Where the brokers forgot them it begins as a member would, and knows which requests are among the last results.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock.bus.contract import Delivery
from penstock.bus.kafka.admin_lookups import CommittedOffsets, retry_during_election
from penstock.bus.kafka.client import (
    DAMAGED_BATCH_ERRORS,
    FETCH_LIMITS,
    DamagedBatches,
    ask_bounds,
    bus_errors,
    parse_delivery,
)
from penstock.bus.kafka.offsets import Partition, PartitionOffsets, StartPosition
from penstock.errors import BusUnavailable
from penstock.names import Pipeline, WorkerKind, find_shared_topic

log = logging.getLogger(__name__)

FIRST_MESSAGE_WAIT_S = 0.3
"""How long `read_orphans` waits for its first message."""
BOUNDS_TIMEOUT_S = 2.0
"""How long a partition's leader may take to tell where its log begins and ends."""
MAX_OFFSET = 2**63 - 1
FindStart = Callable[[TopicPartition, Callable[[Partition], tuple[int, int]]], StartPosition]


def format_partition(partition: Partition) -> str:
    """Return the name of a partition that workers use in Redis."""
    return f"{partition[0]}:{partition[1]}"


def _parse_partition(part: str) -> Partition:
    topic, _, number = part.rpartition(":")
    return topic, int(number)


class KafkaOrphanReader:
    """Implements `contract.OrphanReader`. It connects when it is first given a partition."""

    def __init__(
        self,
        pipeline: Pipeline,
        stage: WorkerKind,
        clients: Mapping[str, Any],
        find_start: FindStart,
        list_all: Callable[[], list[str]] = list,
    ) -> None:
        """`find_start` returns where a partition begins, as `PlaceKeeper.find_start` does. `list_all` returns what
        `list_partitions` does.
        """
        self._list_all, self._find_start = list_all, find_start
        self._clients, self._group = dict(clients), pipeline.consumer_group(stage)
        self._pipeline = pipeline
        self.topic = pipeline.input_topics(stage)["interactive"]
        self._consumer: Consumer | None = None
        self._offsets: dict[Partition, PartitionOffsets] = {}
        self._starts: dict[Partition, StartPosition] = {}
        self._damaged = DamagedBatches()

    def list_partitions(self) -> list[str]:
        """Return the names of all partitions; see `contract.OrphanReader.list_partitions`."""
        return list(self._list_all())

    def read_orphans(self, partitions: Sequence[str], max_messages: int) -> list[Delivery]:
        """Return unfinished messages of these partitions; see `contract.OrphanReader.read_orphans`."""
        parsed = map(_parse_partition, partitions)
        wanted = {partition for partition in parsed if find_shared_topic(partition[0]) == self.topic}
        if not wanted:
            self.close()
            return []
        with bus_errors():
            consumer = self._consumer = self._consumer or Consumer(_consumer_settings(self._clients, self._group))
            if wanted != self._offsets.keys():
                self._assign_partitions(consumer, wanted)
            return self._fetch_messages(consumer, max_messages)

    def close(self) -> None:
        """Free the connection. The next call begins again at the group's committed offsets."""
        self._offsets, self._starts = {}, {}
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _assign_partitions(self, consumer: Consumer, partitions: set[Partition]) -> None:
        fresh = partitions - self._offsets.keys()
        asked = CommittedOffsets(self._clients, self._group)
        try:
            commits = retry_during_election(partial(asked.read_offsets, fresh))
        finally:
            asked.close()
        starts = {
            one: self._find_start(TopicPartition(*one, offset, metadata or ""), partial(_guess_bounds, consumer))
            for one, (offset, metadata) in commits.items()
        }
        begun = {one: PartitionOffsets(start.offset, start.metadata) for one, start in starts.items()}
        self._starts = {one: starts.get(one) or self._starts[one] for one in partitions}
        self._offsets = {one: begun.get(one) or self._offsets[one] for one in partitions}
        consumer.assign(
            [TopicPartition(*partition, offsets.next_offset) for partition, offsets in self._offsets.items()]
        )

    def _fetch_messages(self, consumer: Consumer, max_messages: int) -> list[Delivery]:
        found: list[Delivery] = []
        until = time.monotonic() + FIRST_MESSAGE_WAIT_S
        while len(found) < max_messages:
            message = consumer.poll(0.0 if found else max(0.0, until - time.monotonic()))
            if message is None:
                break
            topic, offset, error = message.topic() or "", message.offset() or 0, message.error()
            if error is not None:
                log.debug("Kafka: %s", error.str())
                if error.code() in DAMAGED_BATCH_ERRORS:
                    self._pass_damaged(consumer, (topic, message.partition() or 0), offset)
                continue
            partition = topic, message.partition() or 0
            offsets = self._offsets.get(partition)  # None: fetched before another assignment
            if offsets is not None and offsets.note_delivered(offset):
                delivery = self._starts[partition].mark_answered(
                    parse_delivery(message, self._pipeline.find_class(topic))
                )
                found.append(replace(delivery, is_held=False))
        return found

    def _pass_damaged(self, consumer: Consumer, partition: Partition, batch: int) -> None:
        """Pass over a message that cannot be unpacked. The partition's next owner sends it to the dead letters."""
        offsets = self._offsets.get(partition)
        if offsets is not None:
            passed = self._damaged.pass_over(consumer, partition, batch, offsets.next_offset)
            if passed is not None:
                offsets.skip_to(passed + 1)


def _guess_bounds(consumer: Consumer, partition: Partition) -> tuple[int, int]:
    """Return where a partition begins and ends. Where that is not known, all of it may have been answered."""
    with contextlib.suppress(KafkaException, BusUnavailable):
        return ask_bounds(consumer, partition, BOUNDS_TIMEOUT_S)
    return 0, MAX_OFFSET


def _consumer_settings(clients: Mapping[str, Any], group: str) -> dict[str, Any]:
    return {
        **clients,
        **FETCH_LIMITS,
        "group.id": group,  # it must have one, and has the right to this; it does not join, and commits nothing
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 100,
        "fetch.error.backoff.ms": 50,
        "queued.max.messages.kbytes": 16384,
    }
