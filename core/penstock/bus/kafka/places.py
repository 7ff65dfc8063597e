"""Keeps in Redis how far each partition is finished: brokers forget what a group committed if it is empty for long.

A member notes each commit a moment after it was made, and once more when it leaves. A partition without a committed
offset goes on at the note, without requests that are among the last results: a crash may have come between a commit and
its note, and the other members have lived on until the brokers gave its partitions to them, which notes the commit.
"""

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import redis
from confluent_kafka import Consumer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.bus.kafka.client import BROKER_TIMEOUT_S, FETCH_LIMITS, bus_errors, parse_key
from penstock.bus.kafka.offsets import Partition, decode_ranges, format_partition
from penstock.bus.lost import count_lost
from penstock.errors import BusUnavailable
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from penstock.redis.scripts import load_script

log = logging.getLogger(__name__)

ANSWERED_AGE_S = 5.0
"""For so long the ids of the last results are used: a member begins several partitions at once."""
NUM_LAST_RESULTS = 5000
"""So many offsets at the end of each partition of results are looked through for what was answered last."""
TOPIC_TIMEOUT_S = 2.0
"""How long brokers may take to tell a topic's id. A member that leaves waits for that, too."""
NOTE_RETRY_S = 2.0
"""How long after a failure what is finished is noted again."""
NOTE = load_script("penstock.bus.kafka", "note")


class NotedPlace(NamedTuple):
    """How far a partition is finished, and where its log ended then."""

    offset: int
    end: int
    ranges: str = ""
    """The finished offsets behind `offset`, as in the metadata of a commit."""

    @classmethod
    def parse(cls, note: bytes) -> tuple[str, "NotedPlace"]:
        """Return a note, and the id of the topic that it is about."""
        topic_id, offset, end, ranges = note.decode().split(" ")
        return topic_id, cls(int(offset), int(end), ranges)


class PlaceKeeper:
    """The notes as one member reads and writes them, and the messages that it found to be lost. Thread-safe.

    A note is about a topic's id: one that is made anew under its name begins without any.
    """

    def __init__(self, pipeline: Pipeline, clients: Mapping[str, Any], redis_url: str) -> None:
        """`clients`: the settings of all clients. Without an address of Redis nothing is noted."""
        self._pipeline, self._clients = pipeline, dict(clients)
        self._redis = redis_client(redis_url) if redis_url else None
        self._admin: AdminClient | None = None
        self._answered, self._answered_s = frozenset[str](), -ANSWERED_AGE_S
        self._topic_ids: dict[str, str] = {}
        self.ends: dict[Partition, int] = {}
        """Where partitions end, or ended when this member read them last."""
        self._noted: dict[Partition, NotedPlace] = {}
        self._retry_s = 0.0
        self._lock = threading.Lock()
        self._untold, self._uncounted = Counter[str](), Counter[str]()
        """How many messages of each topic are lost, without those that `take_lost` returned, or that Redis counts."""

    def forget_topics(self, topics: Iterable[str]) -> None:
        """Ask for the ids of topics again: they may have been made anew."""
        for topic in topics:
            self._topic_ids.pop(topic, None)

    def find_place(self, partition: Partition) -> NotedPlace | None:
        """Return the note of a partition, or None where there is none. Raise `BusUnavailable` or `redis.RedisError`."""
        note: Any = self._redis and self._redis.hget(self._pipeline.places_key, format_partition(partition))
        topic_id, place = NotedPlace.parse(note) if note else ("", None)
        return place if place is not None and topic_id == self._find_topic_id(partition[0]) else None

    def read_answered(self) -> frozenset[str]:
        """Return the ids of the last results, as of `ANSWERED_AGE_S` ago or later. Raise `BusUnavailable`."""
        topic, ids = self._pipeline.results_topic, set[str]()
        if self._redis is None or time.monotonic() < self._answered_s + ANSWERED_AGE_S:
            return self._answered
        settings: dict[str, Any] = {"group.id": f"{topic}.last", "enable.auto.commit": False, **FETCH_LIMITS}
        settings |= {"isolation.level": "read_committed", "auto.offset.reset": "earliest", "enable.partition.eof": True}
        with contextlib.closing(Consumer(self._clients | settings)) as reader, bus_errors():
            for number in reader.list_topics(topic, BROKER_TIMEOUT_S).topics[topic].partitions:
                _, end = reader.get_watermark_offsets(TopicPartition(topic, number), BROKER_TIMEOUT_S)
                reader.assign([TopicPartition(topic, number, max(0, end - NUM_LAST_RESULTS))])
                while (message := reader.poll(BROKER_TIMEOUT_S)) is not None and message.error() is None:
                    ids.add(parse_key(message) or "")
                if message is None:
                    raise BusUnavailable(f"Kafka: {topic} cannot be read")
        self._answered, self._answered_s = frozenset(ids), time.monotonic()
        return self._answered

    def tell_lost(self, partition: Partition, first: int, end: int, count: int, why: str) -> None:
        """Say in the log which messages are lost, and count them."""
        log.warning("Kafka: %s partition %d: %d messages, of the offsets %d to %d, %s",
                    *partition, count, first, end - 1, why)  # fmt: skip
        with self._lock:
            self._untold[partition[0]] += count
            self._uncounted[partition[0]] += count

    def take_lost(self) -> Mapping[str, int]:
        """Return how many messages of each topic are lost, since the last call."""
        with self._lock:
            lost, self._untold = self._untold, Counter()
        return lost

    def note_commits(self, commits: Mapping[Partition, tuple[int, str]]) -> None:
        """Note in Redis what was committed since, and count there what is lost. While Redis is away try again later."""
        places = {
            one: NotedPlace(offset, max(offset, self.ends.get(one, 0)), ranges)
            for one, (offset, ranges) in list(commits.items())
        }
        changed = {one: place for one, place in places.items() if self._noted.get(one) != place}
        if self._redis is None or not (changed or self._uncounted) or time.monotonic() < self._retry_s:
            return
        words: list[str | int] = []
        try:
            for one, place in changed.items():
                words += [format_partition(one), self._find_topic_id(one[0]), *place]
            replaced = NOTE.run(self._redis, [self._pipeline.places_key], words) if changed else ()
            self._noted |= changed
            for one, note in zip(changed, replaced, strict=True):
                if note:
                    self._tell_made_anew(one, NotedPlace.parse(note)[1])
            with self._lock:
                lost, self._uncounted = self._uncounted, Counter()
            count_lost(self._redis, self._pipeline, lost)
        except (redis.RedisError, BusUnavailable) as error:
            log.debug("Kafka: what is finished is noted later: %s", error)
            self._retry_s = time.monotonic() + NOTE_RETRY_S

    def _tell_made_anew(self, partition: Partition, old: NotedPlace) -> None:
        finished = sum(high + 1 - low for low, high in decode_ranges(old.ranges, old.offset))
        count, why = max(0, old.end - old.offset - finished), "are gone: their topic was made anew"
        self.tell_lost(partition, old.offset, old.end, count, why)

    def _find_topic_id(self, topic: str) -> str:
        self._admin = self._admin or AdminClient(self._clients)
        if topic not in self._topic_ids:
            with bus_errors():
                asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=TOPIC_TIMEOUT_S)
                self._topic_ids[topic] = str(asked[topic].result(TOPIC_TIMEOUT_S).topic_id)
        return self._topic_ids[topic]
