"""Committing the offsets of finished work, where that need not happen together with its outputs."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.bus.kafka.buffer import Commit, Partition
from penstock.bus.kafka.offsets import NO_EPOCH

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 0.05
RETRY_S = 0.5
"""How long after a commit that failed the next one is sent."""


class OffsetCommitter:
    """The commits of one consumer. All belongs to its polling thread: librdkafka's commit waits without end in another.

    At most one commit is under way, so that none overtakes another; giving partitions up sends a last one behind it. A
    commit that fails is not repeated: the next one says what is true then.
    """

    def __init__(self) -> None:
        self._under_way: deque[Sequence[Commit]] = deque()
        self._next_s = 0.0
        self._behind_s: float | None = None
        self._error = ""

    def is_due(self, now_s: float) -> bool:
        """Whether the next commit may be sent."""
        return not self._under_way and now_s >= self._next_s

    def send_commits(self, consumer: Consumer, commits: Sequence[Commit], epochs: dict[Partition, int]) -> None:
        """Send commits on their way; `note_answer` takes what becomes of them."""
        if not commits:
            return
        self._under_way.append(commits)
        self._next_s = time.monotonic() + COMMIT_INTERVAL_S
        self._behind_s = self._behind_s or time.monotonic()
        try:
            consumer.commit(offsets=to_topic_partitions(commits, epochs), asynchronous=True)
        except KafkaException as raised:
            self._note_outcome(self._under_way.pop(), raised.args[0], [])

    def note_answer(self, error: KafkaError | None, places: Iterable[TopicPartition]) -> Sequence[Commit]:
        """Note what became of the first commit under way; return which of its parts were done."""
        return self._note_outcome(self._under_way.popleft(), error, places)

    def note_nothing_to_commit(self) -> None:
        """Note that there is nothing to commit: what was refused before has gone to other members."""
        if not self._under_way:
            self._behind_s = None

    def _note_outcome(
        self, commits: Sequence[Commit], error: KafkaError | None, places: Iterable[TopicPartition]
    ) -> Sequence[Commit]:
        refused = {(place.topic, place.partition): place.error for place in places if place.error}
        if error is None and not refused:
            self._behind_s = None
            return commits
        self._error = str(error or next(iter(refused.values())))
        log.info("Kafka: offsets are committed later: %s", self._error)
        self._next_s = time.monotonic() + RETRY_S
        return [] if error is not None else [commit for commit in commits if commit[0] not in refused]

    def describe_problem(self, now_s: float, patience_s: float) -> str:
        """Why nothing was committed for so long though there was something; else empty."""
        behind_s = now_s - (self._behind_s or now_s)
        return f"Kafka: offsets were not committed for {behind_s:.0f} s: {self._error}" if behind_s > patience_s else ""


def to_topic_partitions(commits: Iterable[Commit], epochs: dict[Partition, int]) -> list[TopicPartition]:
    """Commits as the client takes them, with the leader epoch that each partition was read under last."""
    return [
        TopicPartition(*partition, offset, metadata, epochs.get(partition, NO_EPOCH))
        for partition, offset, metadata in commits
    ]
