"""What a member asks the brokers on a thread of its own, so that its poller waits for no answer."""

import logging
import threading
from collections.abc import Iterable
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.errors import BusUnavailable

log = logging.getLogger(__name__)

COMMITTED_TIMEOUT_S = 2.0
END_TIMEOUT_S = 1.0
RETRY_S = 0.05
ACCESS_ERRORS = (
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.INVALID_GROUP_ID,
)
"""Errors that do not pass by themselves."""

Partition = tuple[str, int]


class StartPosition(NamedTuple):
    """What a group committed last of a partition: where to begin it."""

    offset: int
    """Negative where nothing was committed."""
    metadata: str
    leader_epoch: int | None


class PositionLookup:
    """Looks up where partitions have to begin, and where they end.

    One thread calls `answer_requests` again and again, another one calls the other methods.

    The consumer is in no group, and reads what is committed: a commit that a dead member's open transaction may still
    change has no answer before that transaction ends.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._lock = threading.Condition()
        # An answer counts for the very question it was asked for: a partition may go and come back meanwhile.
        self._starts: dict[Partition, object] = {}
        self._ends: dict[Partition, object] = {}
        self._found_starts: dict[Partition, StartPosition] = {}
        self._found_ends: dict[Partition, int | None] = {}

    def request_starts(self, partitions: Iterable[Partition]) -> None:
        """Ask what the group committed of these, until it is known."""
        with self._lock:
            self._starts |= {partition: object() for partition in partitions}
            self._lock.notify()

    def request_ends(self, partitions: Iterable[Partition]) -> None:
        """Ask once where these end, for readers of what is committed."""
        with self._lock:
            self._ends |= {partition: object() for partition in partitions}
            self._lock.notify()

    def cancel_requests(self, partitions: Iterable[Partition]) -> None:
        """Ask no more about these, and drop what was found."""
        with self._lock:
            for partition in partitions:
                for known in (self._starts, self._ends, self._found_starts, self._found_ends):
                    known.pop(partition, None)

    def take_starts(self) -> dict[Partition, StartPosition]:
        """What was found since the last call."""
        with self._lock:
            found, self._found_starts = self._found_starts, {}
        return found

    def take_ends(self) -> dict[Partition, int | None]:
        """What was found since the last call; None where the leader did not answer, or there is none."""
        with self._lock:
            found, self._found_ends = self._found_ends, {}
        return found

    def answer_requests(self, timeout_s: float) -> None:
        """Put the next questions to the brokers; wait so long for any. Raises `BusUnavailable` if they are refused."""
        with self._lock:
            self._lock.wait_for(lambda: self._starts or self._ends, timeout_s)
            starts, ends = dict(self._starts), dict(list(self._ends.items())[:1])
        if starts and not self._ask_starts(starts):
            with self._lock:
                self._lock.wait(RETRY_S)
        for partition, question in ends.items():
            end = self._ask_end(partition)
            with self._lock:
                if self._ends.get(partition) is question:
                    del self._ends[partition]
                    self._found_ends[partition] = end

    def close(self) -> None:
        """Free the connection."""
        self._consumer.close()
        del self._consumer

    def _ask_starts(self, wanted: dict[Partition, object]) -> bool:
        """Whether all were told. One whose offsets are not stable yet holds up none of the others."""
        found = self._read_committed(list(wanted))
        if found is None and len(wanted) > 1:
            num_told = sum(self._ask_starts({partition: question}) for partition, question in wanted.items())
            return num_told == len(wanted)
        with self._lock:
            for place in found or []:
                partition = place.topic, place.partition
                if self._starts.get(partition) is wanted[partition]:
                    del self._starts[partition]
                    self._found_starts[partition] = StartPosition(
                        place.offset, place.metadata or "", place.leader_epoch
                    )
        return found is not None

    def _read_committed(self, partitions: list[Partition]) -> list[TopicPartition] | None:
        try:
            found = self._consumer.committed([TopicPartition(*one) for one in partitions], timeout=COMMITTED_TIMEOUT_S)
            error = next((place.error for place in found if place.error), None)
        except KafkaException as raised:
            error = raised.args[0]
        if error is None:
            return found
        if error.code() in ACCESS_ERRORS:
            raise BusUnavailable(f"Kafka does not tell what the group committed, check its access: {error.str()}")
        if len(partitions) == 1:
            log.warning("%s: the committed offset cannot be read yet: %s", "/".join(map(str, partitions[0])), error)
        return None

    def _ask_end(self, partition: Partition) -> int | None:
        try:
            found = self._consumer.get_watermark_offsets(TopicPartition(*partition), timeout=END_TIMEOUT_S)
        except KafkaException as error:
            log.debug("Kafka: where %s ends is not known: %s", partition, error)
            return None
        return found[1] if found else None
