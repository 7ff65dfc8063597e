"""Keeps in Redis how far each partition is finished: brokers forget what a group committed if it is empty for long.

A member notes each commit a moment after it was made, and once more when it leaves. A partition without a committed
offset goes on at the note, and knows which requests are among the last results: a crash may have come between a commit
and its note, and the other members have lived on until the brokers gave its partitions to them, which notes the commit.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis
from confluent_kafka import TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.bus.kafka.client import bus_errors
from penstock.bus.kafka.follower import read_topic
from penstock.bus.kafka.offsets import Partition, StartPosition, decode_forgotten_end, decode_ranges
from penstock.bus.kafka.orphans import format_partition
from penstock.bus.lost import LOST_KEPT_S, count_lost
from penstock.errors import BusUnavailable
from penstock.names import Pipeline, split_topic
from penstock.pace import ServerPace
from penstock.redis.client import redis_client
from penstock.redis.scripts import load_script

log = logging.getLogger(__name__)

NUM_LAST_RESULTS = 1000
"""So many offsets at the end of each partition of results are looked through for what was answered last."""
TOPIC_TIMEOUT_S = 2.0
"""How long brokers may take to tell a topic's id. A member that leaves waits for that, too."""
NOTE_RETRY_S = 2.0
"""How long after a failure what is finished is noted again."""
AskBounds = Callable[[Partition], tuple[int, int]]
"""Returns where a partition's log begins and ends."""
NOTE = load_script("penstock.bus.kafka", "note")


class PlaceKeeper:
    """The notes as one member reads and writes them, and the messages that it found to be lost.

    A note is about a topic's id: one that is made anew under its name begins without any.
    """

    def __init__(self, pipeline: Pipeline, clients: Mapping[str, Any], redis_url: str, pace: ServerPace) -> None:
        """`clients`: the settings of all clients. Without an address of Redis nothing is noted. `pace` stretches
        the time limit of questions.
        """
        self._pipeline, self._clients, self._pace = pipeline, dict(clients), pace
        self._redis = redis_client(redis_url) if redis_url else None
        self._admin: AdminClient | None = None
        self._answered = dict[str, frozenset[str]]()
        """The ids of the last results, by topic."""
        self._topic_ids: dict[str, str] = {}
        self._ends: dict[Partition, int] = {}
        """Where partitions end, or ended when this member read them last."""
        self._lock = threading.Lock()  # held while notes are written: a member that leaves writes its last ones itself
        self._noted: dict[Partition, tuple[int, int, str]] = {}
        self._retry_s = 0.0
        self._uncounted = deque[tuple[str, int]]()
        """How many messages of a topic are lost that Redis does not count yet."""

    def find_start(self, place: TopicPartition, ask_bounds: AskBounds) -> StartPosition:
        """Return where a partition begins whose last commit is `place`: where that was forgotten, by its note.

        Raise `BusUnavailable`, `redis.RedisError`, or what `ask_bounds` raises.
        """
        partition, metadata = (place.topic, place.partition), place.metadata or ""
        if place.offset >= 0:
            end = decode_forgotten_end(metadata)
            answered = self._read_answered(place.topic) if end > place.offset else frozenset[str]()
            return StartPosition(place.offset, metadata, place.leader_epoch, end if answered else 0, answered)
        low, high = ask_bounds(partition)
        note: Any = self._redis and self._redis.hget(self._pipeline.finished_key, format_partition(partition))
        topic_id, offset, _, ranges = note.decode().split(" ") if note else ("", "", "", "")
        answered = self._read_answered(place.topic) if low < high else frozenset[str]()
        if topic_id and topic_id == self._find_topic_id(partition[0], self._topic_ids):
            log.warning("Kafka: %s partition %d has no committed offset, and goes on at %s as noted in Redis",
                        *partition, offset)  # fmt: skip
            return StartPosition(int(offset), ranges, None, high, answered)
        if low < high:
            log.warning("Kafka: %s partition %d has messages, no committed offset and no note of one: it begins with "
                        "the earliest, at %d", *partition, low)  # fmt: skip
        return StartPosition(0, "", None, high if answered else 0, answered)  # what was deleted before `low` is told

    def _read_answered(self, topic: str) -> frozenset[str]:
        """Return the ids of the last results of what is in a topic, as of when this was called first: while this member
        is in its group, the brokers forget nothing. Raise `BusUnavailable`.
        """
        results = self._pipeline.results_topic + split_topic(topic)[1]
        if results not in self._answered:
            found = read_topic(self._clients, results, NUM_LAST_RESULTS) if self._redis else ()
            self._answered[results] = frozenset(one.key for one in found if one.key is not None)
        return self._answered[results]

    def tell_lost(self, partition: Partition, first: int, end: int, count: int, why: str) -> None:
        """Say in the log which messages are lost, and have `note_commits` count them. Any thread may call this."""
        log.warning("Kafka: %s partition %d: %d messages, of the offsets %d to %d, %s",
                    *partition, count, first, end - 1, why)  # fmt: skip
        if self._redis is not None:
            self._uncounted.append((partition[0], count))

    def note_commits(self, commits: Mapping[Partition, tuple[int, str]], *, is_last: bool = False) -> None:
        """Note in Redis what was committed since, and count there what is lost. While Redis is away try again later."""
        with self._lock:
            self._note_commits(commits, is_last=is_last)

    def _note_commits(self, commits: Mapping[Partition, tuple[int, str]], *, is_last: bool) -> None:
        known = self._topic_ids  # taken before the commits: a topic's newer id is not noted with older ones
        notes = {
            one: (offset, max(offset, self._ends.get(one, 0)), ranges)
            for one, (offset, ranges) in list(commits.items())
        }
        changed = {one: note for one, note in notes.items() if self._noted.get(one) != note}
        is_due = is_last or time.monotonic() >= self._retry_s
        if self._redis is None or not (is_due and (changed or self._uncounted)):
            return
        words, keys = list[str | int](), [self._pipeline.finished_key, self._pipeline.lost_key]
        try:
            for one, (offset, end, ranges) in changed.items():
                finished = sum(high + 1 - low for low, high in decode_ranges(ranges, offset))
                words += [format_partition(one), one[0], self._find_topic_id(one[0], known), offset]
                words += [max(0, end - offset - finished), ranges]
            lost = NOTE.run(self._redis, keys, [LOST_KEPT_S, *words]) if changed else ()
            self._noted |= changed
            for one, count in zip(changed, lost, strict=True):
                if count:
                    log.warning(
                        "Kafka: %s partition %d: %d messages were lost: their topic was deleted and created again",
                        *one,
                        count,
                    )
            while self._uncounted:
                count_lost(self._redis, self._pipeline, *self._uncounted[0])
                self._uncounted.popleft()
        except (redis.RedisError, BusUnavailable) as error:
            log.debug("Kafka: noting finished offsets failed, retrying: %s", error)
            self._retry_s = time.monotonic() + NOTE_RETRY_S

    def begin_partitions(self, came: Iterable[Partition]) -> None:
        """Forget what is known of partitions that come: their topics may have been made anew."""
        self._topic_ids = {}
        for one in came:
            self._ends.pop(one, None)

    def note_end(self, partition: Partition, end: int) -> None:
        """Note where a partition ends, as far as that is known."""
        self._ends[partition] = end

    def note_read(self, partition: Partition, offset: int) -> None:
        """Note that a partition has a message at an offset."""
        self._ends[partition] = max(self._ends.get(partition, 0), offset + 1)

    def _find_topic_id(self, topic: str, known: dict[str, str]) -> str:
        self._admin = self._admin or AdminClient(self._clients)
        if topic not in known:
            limit_s = self._pace.stretch(TOPIC_TIMEOUT_S)
            with bus_errors():
                asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=limit_s)
                known[topic] = str(asked[topic].result(limit_s).topic_id)
        return known[topic]
