"""Chooses the partition of its topic that a message goes to: one with a leader, as long as any has one."""

import threading
import time
import zlib
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, Producer

from penstock.bus.affinity import AffinityPartitioner, rank_partitions
from penstock.bus.contract import Outgoing

ANY_PARTITION = -1
"""Lets librdkafka choose a partition by the message's key."""
LEADERS_REFRESH_S = 2.0
"""How often the leaders of a topic that is written to are looked up, on a thread: lost leaders and added partitions are
known this soon."""
LEADERS_RETRY_S = 1.0
"""How soon the leaders are looked up again if the brokers did not answer, or do not know the topic."""
LEADERS_TIMEOUT_S = 1.0
"""How long a lookup may take. Without an answer the last one holds; without any, the message goes by its key."""


@dataclass
class _TopicLeaders:
    spread: AffinityPartitioner = field(default_factory=AffinityPartitioner)
    num_partitions: int = 0
    """0 while it is not known."""
    led: tuple[int, ...] = ()
    """The partitions that had a leader at the last lookup."""
    refresh_at_s: float = 0.0
    is_asked: bool = False
    """Whether a lookup is under way."""


class Partitioner:
    """Chooses partitions for one producer. Thread-safe."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._lock = threading.Lock()
        self._topics: dict[str, _TopicLeaders] = {}

    def choose_partition(self, message: Outgoing) -> int:
        """Return the partition for a message, or `ANY_PARTITION`.

        A message without affinity goes by its key as long as all partitions of its topic have a leader. Otherwise the
        choice is made here, as librdkafka would choose a partition without a leader too.
        """
        now_s = time.monotonic()
        with self._lock:
            topic = self._topics.setdefault(message.topic, _TopicLeaders())
            if now_s >= topic.refresh_at_s and not topic.is_asked:
                topic.is_asked = True
                if topic.num_partitions:
                    threading.Thread(target=self._refresh_topic, args=(message.topic, topic), daemon=True).start()
                else:
                    self._note_leaders(topic, self._fetch_leaders(message.topic))
            num_partitions, led = topic.num_partitions, topic.led
        if not num_partitions:
            return ANY_PARTITION
        if message.affinity is None:
            return (
                ANY_PARTITION
                if len(led) in (0, num_partitions)
                else led[zlib.crc32((message.key or "").encode()) % len(led)]
            )
        wanted = topic.spread.choose_partition(message.affinity, num_partitions, now_s)
        if wanted in led or not led:
            return wanted
        return next(partition for partition in rank_partitions(message.affinity, num_partitions) if partition in led)

    def forget_leaders(self) -> None:
        """Look up leaders again before the next message: the topic may have been created anew with fewer partitions."""
        with self._lock:
            for name in self._topics:
                self._topics[name] = _TopicLeaders(self._topics[name].spread)

    def _refresh_topic(self, name: str, topic: _TopicLeaders) -> None:
        found = self._fetch_leaders(name)
        with self._lock:
            self._note_leaders(topic, found)

    @staticmethod
    def _note_leaders(topic: _TopicLeaders, found: dict[int, bool]) -> None:
        topic.is_asked = False
        topic.refresh_at_s = time.monotonic() + (LEADERS_REFRESH_S if found else LEADERS_RETRY_S)
        if found:
            topic.num_partitions, topic.led = len(found), tuple(sorted(number for number in found if found[number]))

    def _fetch_leaders(self, topic: str) -> dict[int, bool]:
        """Return whether each partition has a leader; empty if the brokers do not answer, or do not know the topic."""
        try:
            known = self._producer.list_topics(topic, LEADERS_TIMEOUT_S).topics[topic].partitions
        except (KafkaException, KeyError):
            return {}
        return {number: partition.leader >= 0 for number, partition in known.items()}
