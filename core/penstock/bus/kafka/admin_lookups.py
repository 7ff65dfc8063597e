"""Reads of logs, groups and open transactions that any process may make: it needs to be no member of a group."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType  # type: ignore[attr-defined]

from penstock.bus.kafka.client import BROKER_TIMEOUT_S, bus_errors
from penstock.bus.kafka.offsets import Partition, Range, decode_ranges, is_in_ranges, parse_place
from penstock.names import STAGES, Pipeline, Stage, find_shared_topic

T = TypeVar("T")

ELECTION_PATIENCE_S = 3.0
"""How long brokers may need to elect the leader of a partition, or the coordinator of a group."""
OWN_TOPICS_REFRESH_S = 30.0
"""How often the lag looks for tenants' own topics: that asks for all topics of the cluster."""
ELECTION_ERRORS = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)


def retry_during_election(ask: Callable[[], T]) -> T:
    """Return what `ask` returns. Call it again while the brokers elect a leader or coordinator.

    Raise its `KafkaException` or `TimeoutError` otherwise, or after `ELECTION_PATIENCE_S`.
    """
    until = time.monotonic() + ELECTION_PATIENCE_S
    while True:
        try:
            return ask()
        except KafkaException as raised:
            if raised.args[0].code() not in ELECTION_ERRORS or time.monotonic() > until:
                raise
        time.sleep(0.05)


def list_partitions(admin: AdminClient, topics: Iterable[str]) -> list[Partition]:
    """Return the partitions of those of the topics that exist. Raise `KafkaException`."""
    found = list[Partition]()
    asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=BROKER_TIMEOUT_S)
    for topic, future in asked.items():
        try:
            found += [(topic, partition.id) for partition in future.result(BROKER_TIMEOUT_S).partitions]
        except KafkaException as raised:
            if raised.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return found


def read_settings(admin: AdminClient, kind: ResourceType, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return all settings of some topics, or of one broker, by name; empty texts for those that have no value.

    Raise `KafkaException` or `TimeoutError`, also where the user may not see them.
    """
    asked: dict[ConfigResource, Future[Any]] = admin.describe_configs(
        [ConfigResource(kind, name) for name in names], request_timeout=BROKER_TIMEOUT_S
    )
    found = {resource.name: future.result(BROKER_TIMEOUT_S) for resource, future in asked.items()}
    return {name: {one: entry.value or "" for one, entry in entries.items()} for name, entries in found.items()}


def read_log_offsets(
    admin: AdminClient, partitions: Iterable[Partition], what: OffsetSpec, level: IsolationLevel
) -> dict[Partition, int]:
    """Return the offset at which each log begins or ends (`what`), for readers of an isolation level.

    Raise `KafkaException` or `TimeoutError`.
    """
    wanted = {TopicPartition(*partition): what for partition in partitions}
    if not wanted:
        return {}
    asked: dict[TopicPartition, Future[Any]] = admin.list_offsets(
        wanted, isolation_level=level, request_timeout=BROKER_TIMEOUT_S
    )
    return {(place.topic, place.partition): future.result(BROKER_TIMEOUT_S).offset for place, future in asked.items()}


class CommittedOffsets:
    """Reads what one group committed, over a connection of its own. Thread-safe."""

    # This uses a consumer that is no member of the group. The admin client of librdkafka 2.16 ends the process if the
    # group's coordinator moves, or was only just elected, at this moment.

    def __init__(self, clients: Mapping[str, Any], group: str) -> None:
        # With `read_committed` it would wait for the end of open transactions, which may still change the commits.
        settings = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_uncommitted"}
        self._consumer = Consumer({**clients, **settings})
        self._lock = threading.Lock()

    def read_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, tuple[int, str | None]]:
        """Return offset and metadata of the last commit of each partition. Raise `KafkaException`.

        The offset is negative where nothing was committed.
        """
        wanted = [TopicPartition(*partition) for partition in partitions]
        if not wanted:
            return {}
        with self._lock:
            places = self._consumer.committed(wanted, timeout=BROKER_TIMEOUT_S)
        for place in places:
            if place.error:
                raise KafkaException(place.error)
        return {(place.topic, place.partition): (place.offset, place.metadata) for place in places}

    def close(self) -> None:
        """Free the connection."""
        with self._lock:
            self._consumer.close()


class GroupLag:
    """Counts the messages that each stage's group has still to settle, over connections that are kept. Thread-safe.

    They are the offsets from the group's commit to the log's end, without those that the commit's metadata has as
    finished (`penstock.bus.kafka.offsets`). So one slow request does not look like the thousands that were finished
    behind it.
    """

    def __init__(self, pipeline: Pipeline, clients: Mapping[str, Any]) -> None:
        self._pipeline, self._admin = pipeline, AdminClient(dict(clients))
        self._inputs = [topic for stage in STAGES for topic in pipeline.input_topics(stage).values()]
        self._own_topics, self._look_at_s = list[str](), 0.0
        self._commits = {stage: CommittedOffsets(clients, pipeline.consumer_group(stage)) for stage in STAGES}

    @property
    def topics(self) -> list[str]:
        """The topics that workers read, tenants' own ones too. Raise `KafkaException`."""
        if (now_s := time.monotonic()) >= self._look_at_s:
            known = self._admin.list_topics(timeout=BROKER_TIMEOUT_S).topics
            inputs = set(self._inputs)
            own = self._pipeline.find_own_topics(known)
            self._own_topics = [topic for topic in own if find_shared_topic(topic) in inputs]
            self._look_at_s = now_s + OWN_TOPICS_REFRESH_S
        return [*self._inputs, *self._own_topics]

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic are not settled, with those of tenants' own topics beside it.

        Raise `KafkaException` or `TimeoutError`.
        """
        return retry_during_election(self._count_by_topic)

    def has_older(self, topic: str, age_ms: float) -> bool:
        """Return whether a topic has a message of this age that its group has not finished.

        Raise `KafkaException` or `TimeoutError`.
        """
        return retry_during_election(partial(self._has_older, topic, age_ms))

    def _has_older(self, topic: str, age_ms: float) -> bool:
        partitions = list_partitions(self._admin, [topic])
        then, level = OffsetSpec.for_timestamp(int(time.time() * 1000 - age_ms)), IsolationLevel.READ_COMMITTED
        newer = read_log_offsets(self._admin, partitions, then, level)
        unfinished = self._read_unfinished(self._pipeline.find_stage(topic), partitions)
        return any(first < (end if newer[one] < 0 else newer[one]) for one, (first, end, _) in unfinished.items())

    def find_gone(self, places: Iterable[str]) -> set[str]:
        """Return those of the places of requests that the group has finished, or that are not in the log.

        Raise `KafkaException` or `TimeoutError`.
        """
        wanted, gone = {place: parse_place(place) for place in places}, set[str]()
        unfinished = self._read_unfinished("prefill", list({partition for partition, _ in wanted.values()}))
        for place, (partition, offset) in wanted.items():
            first, end, finished = unfinished[partition]
            if not first <= offset < end or is_in_ranges(finished, offset):
                gone.add(place)
        return gone

    def _read_unfinished(
        self, stage: Stage, partitions: list[Partition]
    ) -> dict[Partition, tuple[int, int, list[Range]]]:
        """Return where what is not finished begins and ends in the logs, and what is finished between."""
        commits, level = self._commits[stage].read_offsets(partitions), IsolationLevel.READ_UNCOMMITTED
        begins = read_log_offsets(self._admin, partitions, OffsetSpec.earliest(), level)  # type: ignore[no-untyped-call]
        ends = read_log_offsets(self._admin, partitions, OffsetSpec.latest(), level)  # type: ignore[no-untyped-call]
        return {
            one: (max(begins[one], offset), ends[one], decode_ranges(metadata, offset))
            for one, (offset, metadata) in commits.items()
        }

    def close(self) -> None:
        """Free the connections."""
        for commits in self._commits.values():
            commits.close()

    def _count_by_topic(self) -> dict[str, int]:
        partitions = list_partitions(self._admin, self.topics)
        found = dict.fromkeys(self._inputs, 0)
        for stage in STAGES:
            mine = [partition for partition in partitions if self._pipeline.find_stage(partition[0]) == stage]
            for (topic, _), count in count_unsettled_messages(self._admin, self._commits[stage], mine).items():
                found[find_shared_topic(topic)] += count
        return found


def count_unsettled_messages(
    admin: AdminClient, group: CommittedOffsets, partitions: list[Partition]
) -> dict[Partition, int]:
    """Return how many messages of each partition a group has still to settle.

    Raise `KafkaException` or `TimeoutError`.
    """
    level, found = IsolationLevel.READ_COMMITTED, dict[Partition, int]()
    commits = group.read_offsets(partitions)
    fresh = [partition for partition in partitions if commits[partition][0] < 0]
    begins = read_log_offsets(admin, fresh, OffsetSpec.earliest(), level)  # type: ignore[no-untyped-call]
    ends = read_log_offsets(admin, partitions, OffsetSpec.latest(), level)  # type: ignore[no-untyped-call]
    for partition in partitions:
        committed, metadata = commits[partition]
        begin = begins.get(partition, committed)
        done = sum(high + 1 - max(low, begin) for low, high in decode_ranges(metadata, committed) if high >= begin)
        found[partition] = max(0, ends[partition] - begin - done)
    return found


OFFSETS_TOPIC = "__consumer_offsets"
"""Commits of groups are in transactions too: a transaction that never ends there keeps a group from starting."""
CHECK_INTERVAL_S = 0.5


class StuckPartition(NamedTuple):
    """A partition that readers of committed messages cannot read to its end."""

    topic: str
    partition: int
    stable: int
    """The last stable offset, at which readers wait: the beginning of the oldest open transaction."""
    end: int


def find_stuck_partitions(clients: Mapping[str, Any], topics: Iterable[str], patience_s: float) -> list[StuckPartition]:
    """Return the partitions, of these topics and of the groups' commits, whose open transaction does not end.

    A worker's transaction is open for milliseconds. A partition counts as stuck if its last stable offset does not move
    for `patience_s`; where all partitions can be read to their ends this returns at once. `clients` are the settings of
    the bus's clients. Raise `BusUnavailable`.
    """
    admin = AdminClient(dict(clients))
    with bus_errors():
        found = retry_during_election(lambda: _find_behind(admin, list_partitions(admin, [*topics, OFFSETS_TOPIC])))
        until = time.monotonic() + patience_s
        while found and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(CHECK_INTERVAL_S, left_s))
            places = [one[:2] for one in found]
            now = {one[:2]: one for one in retry_during_election(partial(_find_behind, admin, places))}
            found = [now[one[:2]] for one in found if one[:2] in now and now[one[:2]].stable == one.stable]
    return found


def _find_behind(admin: AdminClient, places: list[Partition]) -> list[StuckPartition]:
    """Return those of the partitions whose last stable offset is not their end."""
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    # The ends come first: a stable offset that moves on meanwhile must not look as if it were behind.
    ends = read_log_offsets(admin, places, latest, IsolationLevel.READ_UNCOMMITTED)
    stables = read_log_offsets(admin, places, latest, IsolationLevel.READ_COMMITTED)
    return [StuckPartition(*place, stables[place], ends[place]) for place in places if stables[place] < ends[place]]
