"""Keeps in Redis how far each partition is finished: brokers forget what a group committed if it is empty for long.

A member notes each commit a moment after it was made, and once more when it leaves. A partition without a committed
offset goes on at the note, without requests that are among the last results: a crash may have come between a commit and
its note, and the other members have lived on until the brokers gave its partitions to them, which notes the commit.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import redis
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from penstock.bus.kafka.client import BROKER_TIMEOUT_S, bus_errors
from penstock.bus.kafka.offsets import Partition, decode_ranges, format_partition
from penstock.bus.kafka.reading import read_topic
from penstock.bus.lost import count_lost
from penstock.errors import BusUnavailable
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from penstock.redis.scripts import load_script

log = logging.getLogger(__name__)

ANSWERED_AGE_S = 5.0
"""For so long the ids of the last results are used: a member begins several partitions at once."""
MAX_RECENT_RESULTS = 5000
"""So many offsets at the end of each partition of results are looked through for what was answered last."""
NOTE_RETRY_S = 2.0
"""How long after a failure what is finished is noted again."""
NOTE = load_script("penstock.bus.kafka", "note")


class NotedPlace(NamedTuple):
    """How far a partition is finished, and where its log ended then."""

    offset: int
    end: int
    ranges: str = ""
    """The finished offsets behind `offset`, as in the metadata of a commit."""

    def count_unfinished(self) -> int:
        """Return how many offsets up to the end are not finished."""
        finished = sum(high + 1 - low for low, high in decode_ranges(self.ranges, self.offset))
        return max(0, self.end - self.offset - finished)


class PlaceNotes:
    """The notes of a pipeline. They are about a topic's id: one that is made anew under its name begins without any.

    Thread-safe. Methods raise `redis.RedisError` and `BusUnavailable`.
    """

    def __init__(self, redis_url: str, pipeline: Pipeline, clients: Mapping[str, Any]) -> None:
        self.client, self._key, self._pipeline = redis_client(redis_url), pipeline.places_key, pipeline
        self._clients, self._admin, self._topic_ids = clients, AdminClient(dict(clients)), dict[str, str]()
        self._answered, self._answered_s = frozenset[str](), -ANSWERED_AGE_S

    def forget_topics(self, topics: Iterable[str]) -> None:
        """Ask for the ids of topics again: they may have been made anew."""
        for topic in topics:
            self._topic_ids.pop(topic, None)

    def read_answered(self) -> frozenset[str]:
        """Return the ids of the last results, as of now or of `ANSWERED_AGE_S` ago."""
        if time.monotonic() > self._answered_s + ANSWERED_AGE_S:
            found = read_topic(self._clients, self._pipeline.results_topic, MAX_RECENT_RESULTS)
            self._answered, self._answered_s = frozenset(one.key or "" for one in found), time.monotonic()
        return self._answered

    def find_place(self, partition: Partition) -> NotedPlace | None:
        """Return the note of a partition, or None where there is none of this topic."""
        note: Any = self.client.hget(self._key, format_partition(partition))
        topic_id, place = ("", None) if note is None else _parse_note(note)
        return place if topic_id == self._find_topic_id(partition[0]) else None

    def note_places(self, places: Mapping[Partition, NotedPlace]) -> dict[Partition, NotedPlace]:
        """Note how far partitions are finished. Return the notes of topics in whose place others were made since."""
        words: list[str | int] = []
        for partition, place in places.items():
            words += [format_partition(partition), self._find_topic_id(partition[0]), *place]
        replaced = zip(places, NOTE.run(self.client, [self._key], words), strict=True)
        return {partition: _parse_note(note)[1] for partition, note in replaced if note}

    def _find_topic_id(self, topic: str) -> str:
        if topic not in self._topic_ids:
            with bus_errors():
                asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=BROKER_TIMEOUT_S)
                self._topic_ids[topic] = str(asked[topic].result(BROKER_TIMEOUT_S).topic_id)
        return self._topic_ids[topic]


def _parse_note(note: bytes) -> tuple[str, NotedPlace]:
    topic_id, offset, end, ranges = note.decode().split(" ")
    return topic_id, NotedPlace(int(offset), int(end), ranges)


class PlaceKeeper:
    """What one member notes, and the messages that it found to be lost. Thread-safe."""

    def __init__(self, pipeline: Pipeline, notes: PlaceNotes | None) -> None:
        """Without `notes` nothing is noted."""
        self._pipeline, self.notes = pipeline, notes
        self.ends: dict[Partition, int] = {}
        """Where partitions end, or ended when this member read them last."""
        self._noted: dict[Partition, NotedPlace] = {}
        self._retry_s = 0.0
        self._lock = threading.Lock()
        self._untold, self._uncounted = Counter[str](), Counter[str]()
        """How many messages of each topic are lost, without those that `take_lost` returned, or that Redis counts."""

    def forget_topics(self, topics: Iterable[str]) -> None:
        """Ask for the ids of topics again: they may have been made anew."""
        if self.notes is not None:
            self.notes.forget_topics(topics)

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
        if self.notes is None or not (changed or self._uncounted) or time.monotonic() < self._retry_s:
            return
        try:
            for partition, old in self.notes.note_places(changed).items() if changed else ():
                why = "are gone: their topic was made anew"
                self.tell_lost(partition, old.offset, old.end, old.count_unfinished(), why)
            self._noted |= changed
            with self._lock:
                lost, self._uncounted = self._uncounted, Counter()
            count_lost(self.notes.client, self._pipeline, lost)
        except (redis.RedisError, BusUnavailable) as error:
            log.debug("Kafka: what is finished is noted later: %s", error)
            self._retry_s = time.monotonic() + NOTE_RETRY_S
