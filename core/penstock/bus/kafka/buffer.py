"""Keeps the messages that a Kafka member has fetched, handed out and finished. Plain Python, no I/O, unlocked."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from penstock.bus.contract import Delivery
from penstock.bus.kafka.offsets import NO_EPOCH, Partition, PartitionOffsets, StartPosition
from penstock.errors import BusUnavailable
from penstock.names import CLASSES, Pipeline, PriorityClass

log = logging.getLogger(__name__)

MAX_BUFFERED_MESSAGES = 64
MAX_BUFFERED_BYTES = 32 * 2**20
"""A class with this many messages or bytes in its buffer is paused; it is read on when half of that is left."""
ROOM_S, MAX_ROOM = 0.5, 16 * MAX_BUFFERED_MESSAGES
"""A worker that takes more messages than the former in this time has room for as many as it takes: half of them last
until the next fetch, which begins up to `member.FETCH_WAIT_S` after the class is read on.
"""

MAX_DAMAGED_AT_ONCE = 100
"""How many damaged messages are settled as dead letters in one call."""

MessagePosition = tuple[Partition, int]
Commit = tuple[Partition, int, str]
"""Partition, committed offset and metadata."""


class PrefetchBuffer:
    """The partitions that are assigned to a member, and all its messages from them.

    A message is buffered, then handed out, then finished. When a partition is revoked all of its messages are
    forgotten: they belong to another member then.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._offsets: dict[Partition, PartitionOffsets] = {}
        self._buffers: dict[PriorityClass, deque[Delivery]] = {priority_class: deque() for priority_class in CLASSES}
        self._num_bytes: dict[PriorityClass, int] = dict.fromkeys(CLASSES, 0)
        self._room: dict[PriorityClass, int] = dict.fromkeys(CLASSES, MAX_BUFFERED_MESSAGES)
        self._num_taken: dict[PriorityClass, int] = dict.fromkeys(CLASSES, 0)
        """How many messages were handed out since `_taken_since_s`."""
        self._taken_since_s = time.monotonic()
        self._handed_out: dict[MessagePosition, Delivery] = {}
        self._uncommitted: set[Partition] = set()
        self._full: set[PriorityClass] = set()
        self._stretched: set[Partition] = set()
        self._damaged: list[tuple[Delivery, str]] = []
        self._fresh: set[Partition] = set()
        self._starts: dict[Partition, StartPosition] = {}
        self.commits: dict[Partition, tuple[int, str]] = {}
        """The last commit of each partition that is or was assigned: offset and metadata."""

    @property
    def partitions(self) -> list[Partition]:
        """The assigned partitions."""
        return list(self._offsets)

    @property
    def num_handed_out(self) -> int:
        """The number of deliveries that were given to the worker and are not settled."""
        return len(self._handed_out)

    @property
    def num_messages(self) -> int:
        """The number of messages that are not settled, handed out or not."""
        return len(self._handed_out) + sum(map(len, self._buffers.values()))

    def assign_partition(self, partition: Partition, start: StartPosition, epoch: int = NO_EPOCH) -> None:
        """Begin a partition at its committed offset. `epoch` is the leader epoch of that commit.

        Messages that are finished by the metadata are passed over, unless the epochs show that the log was cut since.
        """
        self._offsets[partition] = PartitionOffsets(start.offset, start.metadata, epoch, start.forgotten_end)
        self._fresh.add(partition)
        self._starts[partition], self.commits[partition] = start, (start.offset, start.metadata)
        if start.forgotten_end:
            self._uncommitted.add(partition)

    def next_offset(self, partition: Partition) -> int:
        """Return the offset at which a partition is read next."""
        return self._offsets[partition].next_offset

    def revoke_partitions(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions and all their messages."""
        gone = set(partitions)
        for partition in gone:
            self._offsets.pop(partition, None)
        self._uncommitted -= gone
        self._stretched -= gone
        self._fresh -= gone
        self._damaged = [orphan for orphan in self._damaged if orphan[0].offset[0] not in gone]
        self._handed_out = {at: held for at, held in self._handed_out.items() if at[0] not in gone}
        for priority_class, buffer in self._buffers.items():
            kept = [delivery for delivery in buffer if delivery.offset[0] not in gone]
            self._buffers[priority_class] = deque(kept)
            self._num_bytes[priority_class] = sum(len(delivery.value) for delivery in kept)

    def skip_deleted(self, partition: Partition, begin: int) -> tuple[int, int]:
        """Note where the log begins. Return from which offset on how many before it were neither read nor finished."""
        if (offsets := self._offsets.get(partition)) is None:
            return begin, 0
        first, count = offsets.next_offset, offsets.skip_deleted(begin)
        if count:
            self._uncommitted.add(partition)
        return first, count

    def add_message(self, delivery: Delivery, epoch: int = NO_EPOCH) -> None:
        """Add a fetched message that was written under a leader epoch. Raise `BusUnavailable` as `_read_from` does."""
        partition, offset = delivery.offset
        offsets = self._read_from(partition, offset)
        if offsets is None or not offsets.note_delivered(offset, epoch):
            return
        delivery = self._starts[partition].mark_answered(delivery)
        self._buffers[delivery.priority_class].append(delivery)
        self._num_bytes[delivery.priority_class] += len(delivery.value)

    def add_damaged_message(
        self, partition: Partition, batch: int, priority_class: PriorityClass, why: str, failed: str = "unpacked"
    ) -> int:
        """Add the next message of a partition, which cannot be unpacked, or what else `failed`. Return the offset at
        which the partition goes on.

        The message is in the batch that begins at the offset `batch`. It goes to the dead letters.
        """
        topic, number = partition
        offset = max(batch, self._offsets[partition].next_offset)
        if self._offsets[partition].note_delivered(offset):
            reason = f"partition {number}, offset {offset}, cannot be {failed}: {why}"
            delivery = Delivery(topic, f"{number}:{offset}", b"", None, {}, priority_class, time.time())
            self._handed_out[partition, offset] = delivery
            self._damaged.append((delivery, reason))
        return offset + 1

    def check_end(self, partition: Partition, offset: int, end: int) -> None:
        """Compare the next offset of a partition with the log's end, where something at or before the next offset was
        read: the log may have lost its tail. Then do, and raise, what `_read_from` does.
        """
        if self._offsets[partition].next_offset >= end:
            self._read_from(partition, offset)

    def reach_end(self, partition: Partition, end: int) -> None:
        """Note that the log has no more messages before `end`: what is between are markers of transactions.

        Raise `BusUnavailable` as `_read_from` does.
        """
        offsets = self._read_from(partition, end)
        if offsets is not None and offsets.skip_to(end):
            self._uncommitted.add(partition)

    def _read_from(self, partition: Partition, offset: int) -> PartitionOffsets | None:
        """Return the offsets of an assigned partition from which `offset` was read now.

        A log is read upwards. An offset below the next one shows that the log lost its tail, as may happen to a broker
        without replicas, or that the commit was beyond the log's end. The messages there are new. A partition from
        which nothing was read before begins again at that offset. Otherwise deliveries may be in work whose offsets now
        belong to other messages: raise `BusUnavailable`, so that a new member begins the partition again.
        """
        offsets = self._offsets.get(partition)
        if offsets is not None and offset < offsets.next_offset:
            topic, number = partition
            lost = f"{topic} partition {number} lost its tail: {offsets.next_offset} was reached, now it is {offset}"
            if partition not in self._fresh:
                raise BusUnavailable(f"Kafka: {lost}; it is begun anew")
            log.warning(
                "%s: reading restarts there; messages that are not in the record any more are answered again", lost
            )
            offsets = self._offsets[partition] = PartitionOffsets(offset)
        self._fresh.discard(partition)
        return offsets

    def list_damaged(self) -> list[tuple[Delivery, str]]:
        """Return some of the damaged messages, each with the reason for its dead letter.

        They are returned again until they are settled, or their partition is revoked.
        """
        return self._damaged[:MAX_DAMAGED_AT_ONCE]

    def hand_out(self, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return at most `capacity` deliveries of each class, interactive first."""
        found: list[Delivery] = []
        for priority_class in CLASSES:
            left = max(0, capacity.get(priority_class, 0))
            taken: list[Delivery] = []
            buffer = self._buffers[priority_class]
            while buffer and len(taken) < left:
                taken.append(buffer.popleft())
                self._num_bytes[priority_class] -= len(taken[-1].value)
            self._num_taken[priority_class] += len(taken)
            found += taken
        self._adapt_room(time.monotonic())
        self._handed_out |= {delivery.offset: delivery for delivery in found}
        return found

    def _adapt_room(self, now_s: float) -> None:
        """Give each class room for what was taken of it in the last `ROOM_S`."""
        passed_s = now_s - self._taken_since_s
        if passed_s >= ROOM_S:
            for priority_class, count in self._num_taken.items():
                wanted = int(count * ROOM_S / passed_s)
                self._room[priority_class] = min(max(wanted, MAX_BUFFERED_MESSAGES), MAX_ROOM)
            self._num_taken, self._taken_since_s = dict.fromkeys(CLASSES, 0), now_s

    def list_buffered(self) -> list[Delivery]:
        """Return the buffered deliveries, interactive first."""
        return [delivery for priority_class in CLASSES for delivery in self._buffers[priority_class]]

    def find_lost(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Return those of the deliveries that are no longer this member's. One that came again is another delivery."""
        return [delivery for delivery in deliveries if self._handed_out.get(delivery.offset) is not delivery]

    def finish_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """Note that those of the deliveries that are this member's are finished, and still to be committed."""
        for delivery in deliveries:
            if self._handed_out.get(delivery.offset) is delivery:
                partition, offset = delivery.offset
                self._offsets[partition].finish_offsets([offset])
                del self._handed_out[partition, offset]
                self._uncommitted.add(partition)
        self._damaged = [orphan for orphan in self._damaged if orphan[0].offset in self._handed_out]

    def build_commits(self, deliveries: Sequence[Delivery] = ()) -> list[Commit]:
        """Return the commits as they are once these deliveries are finished too. Change nothing.

        They include partitions where work was finished, or markers were passed over, since the last commit.
        """
        also: dict[Partition, set[int]] = {partition: set() for partition in self._uncommitted}
        for partition, offset in (delivery.offset for delivery in deliveries):
            also.setdefault(partition, set()).add(offset)
        return [(partition, *self._offsets[partition].build_commit(done)) for partition, done in also.items()]

    @property
    def commit_epochs(self) -> dict[Partition, int]:
        """The leader epoch of each partition's commit, or `NO_EPOCH`."""
        return {partition: offsets.commit_epoch for partition, offsets in self._offsets.items()}

    def note_committed(self, commits: Iterable[Commit]) -> None:
        """Note that commits of `build_commits` were made. Work that was finished since waits for the next commit."""
        for partition, offset, metadata in commits:
            self.commits[partition] = offset, metadata
            if partition in self._uncommitted and self._offsets[partition].build_commit() == (offset, metadata):
                self._uncommitted.discard(partition)

    @property
    def has_uncommitted(self) -> bool:
        """Whether work was finished, or markers were passed over, since the last commit."""
        return bool(self._uncommitted)

    def find_partitions_to_pause(self) -> set[Partition]:
        """Return the partitions to pause: those of classes with a full buffer, and those read far beyond a slow
        request.
        """
        for partition, offsets in self._offsets.items():
            share = offsets.window_usage
            if share >= 1:
                self._stretched.add(partition)
            elif share <= 0.5:
                self._stretched.discard(partition)
        full = self._find_full_classes()
        return {one for one in self._offsets if self._pipeline.find_class(one[0]) in full or one in self._stretched}

    def _find_full_classes(self) -> set[PriorityClass]:
        for priority_class, buffer in self._buffers.items():
            share = max(len(buffer) / self._room[priority_class], self._num_bytes[priority_class] / MAX_BUFFERED_BYTES)
            if share >= 1:
                self._full.add(priority_class)
            elif share <= 0.5:
                self._full.discard(priority_class)
        return self._full

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the parts contradict each other."""
        for offsets in self._offsets.values():
            offsets.check_integrity()
        buffered = [d.offset for d in (*self._buffers["interactive"], *self._buffers["batch"])]
        known = [*buffered, *self._handed_out]
        assert len(set(known)) == len(known), "a message is in two places"
        assert all(self._offsets[partition].is_unfinished(offset) for partition, offset in known)
        assert sum(offsets.num_unfinished for offsets in self._offsets.values()) == len(known)
