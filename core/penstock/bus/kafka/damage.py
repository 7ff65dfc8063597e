"""Messages of a Kafka member that cannot be unpacked or fetched: it passes over them, and they become dead letters."""

import logging
from collections.abc import Iterable

from confluent_kafka import Consumer, TopicPartition

from penstock.bus.contract import Settlement
from penstock.bus.dead_letters import build_dead_letter
from penstock.bus.kafka.client import DamagedBatches
from penstock.bus.kafka.offsets import Partition
from penstock.bus.kafka.settling import MemberSettling
from penstock.bus.kafka.shared import SharedState
from penstock.errors import DeliveryLost
from penstock.names import Pipeline

log = logging.getLogger(__name__)


class DamagedMessages:
    """The damaged messages of one member. The poller passes over them; the caller's thread buries them."""

    def __init__(self, shared: SharedState, pipeline: Pipeline) -> None:
        self._shared, self._pipeline = shared, pipeline
        self._state, self._holdings, self._batches = shared.changed, shared.holdings, DamagedBatches()
        self._passing: dict[Partition, int] = {}
        """Partitions that are read on behind a message that could not be fetched, with its offset."""

    def forget_partitions(self, gone: Iterable[Partition]) -> None:
        """Forget partitions that go to another member, which finds their damaged messages again."""
        for partition in gone:
            self._passing.pop(partition, None)

    def pass_damaged(self, consumer: Consumer, partition: Partition, batch: int, why: str) -> None:
        """Pass over a message that cannot be unpacked, once that was tried a few times. It becomes a dead letter."""
        if not self._batches.note_attempt(partition, batch):
            return
        with self._state:
            if partition not in self._holdings.partitions:
                return
            _, end = consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
            if end >= 0:
                self._holdings.check_end(partition, batch, end)
            offset = self._holdings.add_damaged_message(partition, batch, self._pipeline.find_class(partition[0]), why)
            self._shared.notify_poll()
        consumer.seek(TopicPartition(*partition, offset))

    def pass_unfetched(self, consumer: Consumer, partition: Partition, offset: int) -> bool:
        """Read a partition on behind a message that could not be fetched.

        It becomes a dead letter when the partition brings something from behind it. If it does not, the message is not
        at fault: nothing is passed over, and this member is made anew. Return whether the partition is read on.
        """
        if partition in self._passing:
            return False
        log.warning("Kafka: skipped offset %d of %s partition %d: it could not be fetched", offset, *partition)
        self._passing[partition] = offset
        consumer.seek(TopicPartition(*partition, offset + 1))
        return True

    def note_read(self, partition: Partition, offset: int) -> None:
        """Make a dead letter of the message that was passed over, as the partition brought something behind it."""
        unfetched = self._passing.get(partition)
        if unfetched is None:
            return
        del self._passing[partition]
        if offset > unfetched:
            with self._state:
                if partition in self._holdings.partitions and self._holdings.next_offset(partition) == unfetched:
                    why, priority_class = "it took too long to fetch", self._pipeline.find_class(partition[0])
                    self._holdings.add_damaged_message(partition, unfetched, priority_class, why, "fetched")
                    self._shared.notify_poll()

    def bury_damaged(self, settling: MemberSettling) -> None:
        """Settle damaged messages as dead letters."""
        with self._state:
            damaged = self._holdings.list_damaged()
        letters = [
            Settlement(delivery, [build_dead_letter(self._pipeline, delivery, reason)]) for delivery, reason in damaged
        ]
        while letters:
            try:
                settling.settle(letters)
                return
            except DeliveryLost as gone:  # the partition's new owner finds them again
                letters = [letter for letter in letters if letter.delivery not in gone.deliveries]
