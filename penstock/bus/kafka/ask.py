"""Questions to the brokers about where logs begin and end, and how far groups are."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from penstock.bus.kafka.client import BROKER_TIMEOUT_S

T = TypeVar("T")
Partition = tuple[str, int]

ELECTION_PATIENCE_S = 3.0
"""How long brokers may need to agree who leads a partition."""
ELECTION_ERRORS = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)


def retry_during_election(ask: Callable[[], T]) -> T:
    """The answer, asked for again while the brokers agree who leads. Raises `KafkaException` or `TimeoutError`."""
    until = time.monotonic() + ELECTION_PATIENCE_S
    while True:
        try:
            return ask()
        except KafkaException as raised:
            if raised.args[0].code() not in ELECTION_ERRORS or time.monotonic() > until:
                raise
        time.sleep(0.05)


def list_partitions(admin: AdminClient, topics: Iterable[str]) -> list[Partition]:
    """Return the partitions of those of the topics that exist, and ask about no others. Raises `KafkaException`."""
    found = list[Partition]()
    asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=BROKER_TIMEOUT_S)
    for topic, future in asked.items():
        try:
            found += [(topic, partition.id) for partition in future.result(BROKER_TIMEOUT_S).partitions]
        except KafkaException as raised:
            if raised.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return found


def read_log_offsets(
    admin: AdminClient, partitions: Iterable[Partition], what: OffsetSpec, level: IsolationLevel
) -> dict[Partition, int]:
    """Where the logs begin or end, for readers of that level."""
    wanted = {TopicPartition(*partition): what for partition in partitions}
    if not wanted:
        return {}
    asked: dict[TopicPartition, Future[Any]] = admin.list_offsets(
        wanted, isolation_level=level, request_timeout=BROKER_TIMEOUT_S
    )
    return {(place.topic, place.partition): future.result(BROKER_TIMEOUT_S).offset for place, future in asked.items()}


class CommittedOffsets:
    """What one group committed, asked over a connection of its own. Thread-safe.

    A consumer asks that is no member of the group, and not the admin client: in librdkafka 2.16 that one brings the
    process down if the group's coordinator moves, or is only just chosen, at this moment.
    """

    def __init__(self, clients: Mapping[str, Any], group: str) -> None:
        # Also what an open transaction may still change: readers of what is committed would wait for its end.
        settings = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_uncommitted"}
        self._consumer = Consumer({**clients, **settings})
        self._lock = threading.Lock()

    def read_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, str | None]]:
        """Offset and metadata of the last commit, the offset negative where there is none. Raises `KafkaException`."""
        wanted = [TopicPartition(*partition) for partition in partitions]
        if not wanted:
            return {}
        with self._lock:
            places = self._consumer.committed(wanted, timeout=BROKER_TIMEOUT_S)
        for place in places:
            if place.error:
                raise KafkaException(place.error)
        return {(place.topic, place.partition): (place.offset, place.metadata) for place in places}

    def close(self) -> None:
        """Free the connection."""
        self._consumer.close()
