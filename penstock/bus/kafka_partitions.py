"""Which partition of its topic a message with an affinity is put in."""

import threading
import time
from dataclasses import dataclass, field

from confluent_kafka import KafkaException, Producer

from penstock.affinity import Spread
from penstock.bus.contract import Outgoing

ANY = -1
"""librdkafka chooses, by the message's key."""
REFRESH_S = 30.0
"""How often the brokers are asked for the number of partitions: one that was added is used this soon."""
RETRY_S = 1.0
"""The same while they have not said it, or do not know the topic."""
ANSWER_S = 1.0
"""How long they may take. Without an answer the last number holds; without any, the message goes by its key."""


@dataclass
class _Topic:
    spread: Spread = field(default_factory=Spread)
    num_partitions: int = 0
    """0: not known."""
    refresh_at_s: float = 0.0


class Partitions:
    """Chooses partitions for one producer. Thread-safe."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._lock = threading.Lock()
        self._topics: dict[str, _Topic] = {}

    def choose(self, message: Outgoing) -> int:
        """The partition for a message; `ANY` for one without affinity."""
        if message.affinity is None:
            return ANY
        now_s = time.monotonic()
        with self._lock:
            topic = self._topics.setdefault(message.topic, _Topic())
            if now_s >= topic.refresh_at_s:
                topic.num_partitions = self._ask(message.topic) or topic.num_partitions
                topic.refresh_at_s = time.monotonic() + (REFRESH_S if topic.num_partitions else RETRY_S)
            num_partitions = topic.num_partitions
        return topic.spread.partition(message.affinity, num_partitions, now_s) if num_partitions else ANY

    def forget(self) -> None:
        """Ask again before the next message: one was refused, and its topic may have been made anew with fewer."""
        with self._lock:
            for topic in self._topics.values():
                topic.num_partitions, topic.refresh_at_s = 0, 0.0

    def _ask(self, topic: str) -> int:
        try:
            return len(self._producer.list_topics(topic, ANSWER_S).topics[topic].partitions)
        except (KafkaException, KeyError):
            return 0
