"""Whether what a member is to read comes to it. Plain Python, no I/O; for one thread.

A partition that brings nothing for a while is either at its end or not read, for whatever reason, and only its leader
can say which. One that has more, is not paused, and stands still all the same shows that its member is at fault.
"""

from collections.abc import Iterable

from penstock.bus.kafka.questions import Partition

QUIET_PARTITION_S = 5.0
"""A partition that brought nothing for so long is asked about, as often."""
STALLED_PARTITION_S = 10.0
"""One that has more may stand still for so long: at two looks at least, as what is new takes a moment to come."""


class ReadProgress:
    """When each partition that is to be read last moved."""

    def __init__(self) -> None:
        self._moved_s: dict[Partition, float] = {}
        self._asked_s: dict[Partition, float] = {}
        self._num_behind: dict[Partition, int] = {}
        self._standing: dict[Partition, str] = {}

    @property
    def current_problem(self) -> str:
        """What is not read though it is there, if anything is."""
        return next(iter(self._standing.values()), "")

    def track_partitions(self, partitions: Iterable[Partition], now_s: float) -> None:
        """These are to be read now, no others: what is new among them moves from now on."""
        wanted = set(partitions)
        for partition in self._moved_s.keys() - wanted:
            for known in (self._moved_s, self._asked_s, self._num_behind, self._standing):
                known.pop(partition, None)
        for partition in wanted - self._moved_s.keys():
            self._moved_s[partition] = now_s

    def note_message(self, partition: Partition, now_s: float) -> None:
        """Something came from this partition."""
        if partition in self._moved_s:
            self._moved_s[partition] = now_s
            self._num_behind.pop(partition, None)
            self._standing.pop(partition, None)

    def take_quiet(self, now_s: float) -> list[Partition]:
        """Those to ask about now."""
        found = [
            partition
            for partition, moved_s in self._moved_s.items()
            if now_s - max(moved_s, self._asked_s.get(partition, moved_s)) >= QUIET_PARTITION_S
        ]
        self._asked_s |= dict.fromkeys(found, now_s)
        return found

    def compare_end(self, partition: Partition, position: int, end: int | None, now_s: float) -> None:
        """Note where a quiet partition ends, by its leader just now; None: no leader answers, which is an outage."""
        if partition not in self._moved_s:
            return
        if end is None or end <= position:
            self._num_behind.pop(partition, None)
            self._standing.pop(partition, None)
            return
        looks = self._num_behind[partition] = self._num_behind.get(partition, 0) + 1
        if looks >= 2 and now_s - self._moved_s[partition] >= STALLED_PARTITION_S:
            topic, number = partition
            self._standing[partition] = f"{topic} partition {number} ends at {end} and is not read beyond {position}"
