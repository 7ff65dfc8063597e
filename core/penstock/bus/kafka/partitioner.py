"""Chooses the partition of its topic that a message goes to: one with a leader, as long as any has one."""

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.bus.contract import Outgoing
from penstock.bus.placement import JobNeed, Placer, WorkerBeat
from penstock.errors import TopicsMissing
from penstock.names import TENANT_HEADER, split_topic

ANY_PARTITION = -1
"""Lets librdkafka choose a partition by the message's key."""
UNKNOWN_TOPIC = KafkaError.UNKNOWN_TOPIC_OR_PART
LEADERS_REFRESH_S = 2.0
"""How often the leaders of a topic that is written to are looked up, on a thread: lost leaders and added partitions are
known this soon."""
LEADERS_RETRY_S = 1.0
"""How soon the leaders are looked up again if the brokers did not answer, or do not know the topic."""
LEADERS_TIMEOUT_S, MAX_LEADERS_TIMEOUT_S = 1.0, 8.0
"""How long a lookup may take: twice as long after each without an answer, as brokers may be slow. The last answer holds
meanwhile; without any, the message goes by its key.
"""
BEATS_REFRESH_S = 1.0
"""How often heartbeats are read while requests are sent."""


ReadBeats = Callable[[], list[WorkerBeat]]


@dataclass
class _TopicLeaders:
    num_partitions: int = 0
    """0 while it is not known."""
    led: tuple[int, ...] = ()
    """The partitions that had a leader at the last lookup."""
    refresh_at_s: float = 0.0
    is_missing: bool = False
    """Whether the brokers do not know the topic."""
    is_asked: bool = False
    """Whether a lookup is under way."""


class Partitioner:
    """Chooses partitions for one producer. Thread-safe."""

    def __init__(
        self,
        producer: Producer,
        read_beats: ReadBeats | None = None,
        timeout_s: float = LEADERS_TIMEOUT_S,
    ) -> None:
        """`read_beats` returns the workers' heartbeats, or raises `redis.RedisError`; it is called on a thread, once a
        second as long as requests are sent. Without it, and until it has returned some, a hash places requests.
        `timeout_s` is how long the first lookup may take.
        """
        self._producer, self._read_beats, self._timeout_s = producer, read_beats, timeout_s
        self._placer = Placer()
        self._beats_at_s = 0.0
        self._is_reading = False
        self._lock = threading.Lock()
        self._topics: dict[str, _TopicLeaders] = {}

    def choose_partition(self, message: Outgoing) -> int:
        """Return the partition for a message, or `ANY_PARTITION`. Raise `TopicsMissing` for a tenant's own topic that
        the brokers do not know.

        A message without a chain goes by its key as long as all partitions of its topic have a leader. Otherwise the
        choice is made here, as librdkafka would choose a partition without a leader too.
        """
        now_s = time.monotonic()
        with self._lock:
            topic = self._topics.setdefault(message.topic, _TopicLeaders())
            if now_s >= topic.refresh_at_s and not topic.is_asked:
                if topic.num_partitions:
                    with contextlib.suppress(RuntimeError):
                        threading.Thread(target=self._refresh_topic, args=(message.topic, topic), daemon=True).start()
                        topic.is_asked = True
                else:
                    topic.is_asked = True
                    self._note_leaders(topic, self._fetch_leaders(message.topic))
            num_partitions, led = topic.num_partitions, topic.led
            if topic.is_missing and split_topic(message.topic)[1]:
                tenant = message.headers.get(TENANT_HEADER, "default")
                raise TopicsMissing(
                    f"the data of {tenant!r} is to stay in topics of its own, and there is no {message.topic}: "
                    f"penstock topics create --tenant {tenant}"
                )
        if not num_partitions:
            return ANY_PARTITION
        if message.job is not None:
            chosen = self._choose_for_job(message.job, message.key or "", led or range(num_partitions), now_s)
            if chosen is not None:
                return chosen
        if message.chain is None:
            return (
                ANY_PARTITION
                if len(led) in (0, num_partitions)
                else led[zlib.crc32((message.key or "").encode()) % len(led)]
            )
        with self._lock:
            self._begin_reading(now_s)
            placed = self._placer.choose_partition(message.chain, led or range(num_partitions), now_s)
        if message.chain.explain is not None:
            message.chain.explain(placed.describe_choice())
        return placed.partition

    def _choose_for_job(self, job: JobNeed, key: str, partitions: Sequence[int], now_s: float) -> int | None:
        with self._lock:
            self._begin_reading(now_s)
            return self._placer.choose_job_partition(job, key, partitions, now_s)

    def _begin_reading(self, now_s: float) -> None:
        """Have heartbeats read on a thread, where that is due. The lock is held."""
        if self._read_beats is not None and now_s >= self._beats_at_s and not self._is_reading:
            # It can end when the lock is free again. Where no thread can be started the last heartbeats hold.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._refresh_beats, args=(self._read_beats,), daemon=True).start()
                self._is_reading = True

    def forget_leaders(self) -> None:
        """Look up leaders again before the next message: the topic may have been created anew with fewer partitions."""
        with self._lock:
            for name in self._topics:
                self._topics[name] = _TopicLeaders()

    def _refresh_beats(self, read_beats: ReadBeats) -> None:
        """Read heartbeats. Where Redis is away the last ones hold until they are too old."""
        beats = None
        try:
            with contextlib.suppress(redis.RedisError):
                beats = read_beats()
        finally:
            with self._lock:
                self._is_reading, self._beats_at_s = False, time.monotonic() + BEATS_REFRESH_S
                if beats is not None:
                    self._placer.note_beats(beats)

    def _refresh_topic(self, name: str, topic: _TopicLeaders) -> None:
        found = self._fetch_leaders(name)
        with self._lock:
            self._note_leaders(topic, found)

    @staticmethod
    def _note_leaders(topic: _TopicLeaders, found: dict[int, bool] | None) -> None:
        topic.is_asked, topic.is_missing = False, found == {}
        topic.refresh_at_s = time.monotonic() + (LEADERS_REFRESH_S if found else LEADERS_RETRY_S)
        if found:
            topic.num_partitions, topic.led = len(found), tuple(sorted(number for number in found if found[number]))

    def _fetch_leaders(self, topic: str) -> dict[int, bool] | None:
        """Return whether each partition has a leader: none if the brokers do not know the topic. Return None if they do
        not answer, or do not tell.
        """
        begun_s = time.monotonic()
        try:
            known = self._producer.list_topics(topic, self._timeout_s).topics.get(topic)
        except KafkaException:
            self._timeout_s = min(2 * self._timeout_s, MAX_LEADERS_TIMEOUT_S)
            return None
        self._timeout_s = max(LEADERS_TIMEOUT_S, 2 * (time.monotonic() - begun_s))
        if known and not known.partitions and known.error and known.error.code() != UNKNOWN_TOPIC:
            return None
        return {number: one.leader >= 0 for number, one in known.partitions.items()} if known else {}
