"""Looks up where a member's partitions begin and end, and finds out whether the member makes progress.

A partition that brings nothing for a while is either at its end or not read, for whatever reason, and only its leader
can say which. If it has more messages, is not paused, and stands still all the same, its member is at fault.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from typing import Protocol

import redis
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from penstock.bus.kafka.client import ask_bounds
from penstock.bus.kafka.offsets import Partition, StartPosition
from penstock.bus.kafka.places import PlaceKeeper
from penstock.errors import BusUnavailable
from penstock.names import find_shared_topic
from penstock.pace import NUM_STEADY, ServerPace

log = logging.getLogger(__name__)

COMMITTED_TIMEOUT_S = 2.0
END_TIMEOUT_S = 1.0
TOPIC_TIMEOUT_S = 3.0
LOOKUP_INTERVAL_S, LOOKUP_RETRY_S = 0.25, 0.05
UNKNOWN_START_S = 5.0
"""A partition whose last commit is not known for this long is a problem that is told."""
ACCESS_ERRORS = (
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.INVALID_GROUP_ID,
)
"""Errors that need a change of settings or rights."""


class PositionLookup:
    """Looks up where partitions have to begin, and where they end.

    `LookupThread` calls `answer_requests` again and again, so that the poller waits for no answer; the poller calls the
    other methods. The consumer is in no group, and reads what is committed: a commit that a dead member's open
    transaction may still change has no answer before that transaction ends.
    """

    def __init__(self, consumer: Consumer, changed: threading.Condition, places: PlaceKeeper, pace: ServerPace) -> None:
        """`changed` guards the requests, and is notified of each. `places` has what the brokers may have forgotten.
        `pace` stretches the time limits of questions.
        """
        self._consumer, self._lock, self._places, self._pace = consumer, changed, places, pace
        # Each request is an object of its own: a partition may go and come back before an older request is answered.
        self._starts: dict[Partition, object] = {}
        self._ends: dict[Partition, object] = {}
        self._found_starts: dict[Partition, StartPosition] = {}
        self._found_ends: dict[Partition, int | None] = {}
        self._are_ends_known = True
        """Whether the last question for ends was answered. Each partition is asked for by itself where it was not."""
        self._unknown_starts: dict[Partition, tuple[float, str]] = {}
        """The partitions whose last commit the brokers do not tell: since when, and why."""

    @property
    def current_problem(self) -> str:
        """Describes one partition that cannot be begun, as its last commit is not known; empty where there is none.

        It is not told while a transaction that is just being committed may be the reason.
        """
        latest_s = time.monotonic() - self._pace.stretch(UNKNOWN_START_S)
        with self._lock:
            late = ((one, why) for one, (since_s, why) in self._unknown_starts.items() if since_s <= latest_s)
            found = next(late, None)
        if found is None:
            return ""
        (topic, number), why = found
        return f"Kafka: {topic} partition {number} is not read, its committed offset is not known: {why}"

    def request_starts(self, partitions: Iterable[Partition]) -> None:
        """Request the last commits of partitions. The brokers are asked until they answer."""
        with self._lock:
            self._starts |= {partition: object() for partition in partitions}
            self._lock.notify()

    def request_ends(self, partitions: Iterable[Partition]) -> None:
        """Request the ends of partitions, for readers of committed messages. The brokers are asked once."""
        with self._lock:
            self._ends |= {partition: object() for partition in partitions}
            self._lock.notify()

    def cancel_requests(self, partitions: Iterable[Partition]) -> None:
        """Cancel the requests for partitions, and drop their answers."""
        with self._lock:
            for partition in partitions:
                self._unknown_starts.pop(partition, None)
                for known in (self._starts, self._ends, self._found_starts, self._found_ends):
                    known.pop(partition, None)

    def take_starts(self) -> dict[Partition, StartPosition]:
        """Return the commits that were found since the last call."""
        with self._lock:
            found, self._found_starts = self._found_starts, {}
        return found

    def take_ends(self) -> dict[Partition, int | None]:
        """Return the ends that were found since the last call; None where no leader answered."""
        with self._lock:
            found, self._found_ends = self._found_ends, {}
        return found

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to ask the brokers."""
        return bool(self._starts or self._ends)

    def answer_requests(self) -> None:
        """Send the next requests to the brokers, if there are any. Raise `BusUnavailable` if they refuse."""
        with self._lock:
            starts, ends = dict(self._starts), dict(list(self._ends.items())[: None if self._are_ends_known else 1])
        if starts and not self._ask_starts(starts):
            with self._lock:
                self._lock.wait(LOOKUP_RETRY_S)
        found = self._ask_ends(ends) if ends else {}
        with self._lock:
            for partition, request in ends.items():
                if partition in found and self._ends.get(partition) is request:
                    del self._ends[partition]
                    self._found_ends[partition] = found[partition]

    def learn_pace(self, topic: str, connect_timeout_s: float) -> None:
        """Find out how late brokers answer now, before anything is made whose limits follow from that. Raise
        `KafkaException` where none can be reached.

        The first answer does not count, as it may come behind those that a new connection waits for.
        """
        self._consumer.list_topics(topic, connect_timeout_s)
        for _ in range(NUM_STEADY):
            with contextlib.suppress(KafkaException):  # the next question has more time
                self.list_partitions(topic)

    def list_partitions(self, topic: str) -> list[Partition]:
        """Return a topic's partitions; none where the brokers do not know it. Raise `KafkaException`."""
        with self._pace.ask(TOPIC_TIMEOUT_S) as limit_s:
            known = self._consumer.list_topics(topic, limit_s).topics.get(topic)
        return [(topic, number) for number in (known.partitions if known else ())]

    def list_own_partitions(self, shared: str) -> list[Partition]:
        """Return the partitions of tenants' own topics beside a shared one. Raise `KafkaException`."""
        known = self._consumer.list_topics(timeout=self._pace.stretch(TOPIC_TIMEOUT_S)).topics
        names = [topic for topic in known if topic != shared and find_shared_topic(topic) == shared]
        return [(topic, number) for topic in names for number in known[topic].partitions]

    def close(self) -> None:
        """Free the connection."""
        self._consumer.close()
        del self._consumer

    def _ask_starts(self, wanted: dict[Partition, object]) -> bool:
        """Return whether all partitions were answered. If one has no answer yet, ask for each by itself."""
        found = self._find_starts(wanted)
        if found is None and len(wanted) > 1:
            num_answered = sum(self._ask_starts({partition: request}) for partition, request in wanted.items())
            return num_answered == len(wanted)
        with self._lock:
            for partition, start in (found or {}).items():
                if self._starts.get(partition) is wanted[partition]:
                    del self._starts[partition]
                    self._unknown_starts.pop(partition, None)
                    self._found_starts[partition] = start
        return found is not None

    def _find_starts(self, wanted: dict[Partition, object]) -> dict[Partition, StartPosition] | None:
        """Return where partitions begin; None where that cannot be found out now, as one may have no stable offset."""
        places = [TopicPartition(*one) for one in wanted]
        try:
            found = self._consumer.committed(places, timeout=self._pace.stretch(COMMITTED_TIMEOUT_S))
            return {(place.topic, place.partition): self._find_start(place) for place in found}
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            if error.code() in ACCESS_ERRORS:
                words = f"Kafka refuses the group's committed offsets, check its access: {error.str()}"
                raise BusUnavailable(words) from raised
            why = error.str()
        except (BusUnavailable, redis.RedisError) as raised:
            why = str(raised)
        if len(wanted) == 1:
            ((partition, request),) = wanted.items()
            log.warning("%s: reading the committed offset failed, retrying: %s", "/".join(map(str, partition)), why)
            with self._lock:
                if self._starts.get(partition) is request:
                    since_s, _ = self._unknown_starts.get(partition, (time.monotonic(), ""))
                    self._unknown_starts[partition] = since_s, why
        return None

    def _find_start(self, place: TopicPartition) -> StartPosition:
        """Return where a partition begins whose commit was read, if there is one."""
        if place.error:
            raise KafkaException(place.error)
        return self._places.find_start(place, self._ask_bounds)

    def _ask_bounds(self, partition: Partition) -> tuple[int, int]:
        return ask_bounds(self._consumer, partition, self._pace.stretch(END_TIMEOUT_S))

    def _ask_ends(self, wanted: Iterable[Partition]) -> dict[Partition, int | None]:
        """Return the ends of partitions; None for a single one that has no leader, and nothing where one of several
        has none.
        """
        wanted = list(wanted)
        try:
            if len(wanted) == 1:  # this also finds a partition that was added later
                found: dict[Partition, int | None] = {wanted[0]: self._ask_bounds(wanted[0])[1]}
            else:  # in one question to each broker: an idle member asks for dozens of partitions every few seconds
                asked = [TopicPartition(*one, OFFSET_END) for one in wanted]
                places = self._consumer.offsets_for_times(asked, self._pace.stretch(END_TIMEOUT_S))
                found = {(one.topic, one.partition): one.offset for one in places if not one.error and one.offset >= 0}
            self._are_ends_known = len(found) == len(wanted)
        except (KafkaException, BusUnavailable) as error:
            log.debug("Kafka: the ends of %s are not known: %s", wanted, error)
            self._are_ends_known, found = False, dict.fromkeys(wanted if len(wanted) == 1 else ())
        return found


class LookingUp(Protocol):
    """A member that has something to look up."""

    @property
    def has_requests(self) -> bool:
        """Whether it waits for answers of the brokers."""

    def look_up(self) -> bool:
        """Ask the brokers what is to be looked up now. Return False once the member has left."""


class LookupThread:
    """Looks up what one member has to know, or both members of a worker that is in two groups.

    An answer for one member that the brokers hold back delays the other one's by up to `COMMITTED_TIMEOUT_S`, or more
    where they are slow.
    """

    def __init__(self, name: str) -> None:
        self.requested = threading.Condition()
        """Guards the requests of all members, and is notified of each."""
        self._members: list[LookingUp] = []
        self._thread = threading.Thread(target=self._run, name=f"kafka-lookup-{name}", daemon=True)

    def serve(self, member: LookingUp) -> None:
        """Look up for this member, too, until it has left."""
        self._members.append(member)
        if not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        while self._members:
            with self.requested:
                self.requested.wait_for(lambda: any(one.has_requests for one in self._members), LOOKUP_INTERVAL_S)
            for member in list(self._members):
                if not member.look_up():
                    self._members.remove(member)


QUIET_PARTITION_S = 5.0
"""A partition that brought nothing for this long has its end looked up, and again after each such period."""
STALLED_PARTITION_S = 10.0
"""How long a partition with more messages may stand still. Two lookups must show it, as new messages take time.

After that its member does not count as its reader. It is made anew once it has waited as `FetchAttempts` says.
"""
MAX_FETCH_ATTEMPTS = 5
"""How many members try to fetch a message before it is passed over. Each waits twice as long as the one before."""


class FetchAttempts:
    """Counts, over all members that a worker makes, how often a partition stood still at one offset.

    A message may take long to fetch: it is large and the link is slow, or unpacking it takes long. librdkafka does not
    show that: its statistics count a response once it is there as a whole, and a message once it is unpacked. A member
    that is made anew begins the same fetch again, so each one waits twice as long for it.
    """

    def __init__(self) -> None:
        self._stalls: dict[Partition, tuple[int, int]] = {}
        """For each partition the offset at which it last stood still, and how often it did."""

    def note_stall(self, partition: Partition, offset: int) -> None:
        """Note that a member waited for a message as long as it may, and did not get it."""
        self._stalls[partition] = offset, min(self._count_stalls(partition, offset) + 1, MAX_FETCH_ATTEMPTS - 1)

    def compute_patience(self, partition: Partition, offset: int) -> float:
        """Return how many seconds the next message of a partition may take to come."""
        return float(STALLED_PARTITION_S * 2 ** self._count_stalls(partition, offset))

    def is_last(self, partition: Partition, offset: int) -> bool:
        """Return whether a message is to be passed over if this attempt to fetch it fails, too."""
        return self._count_stalls(partition, offset) >= MAX_FETCH_ATTEMPTS - 1

    @property
    def longest_patience_s(self) -> float:
        """How many seconds any message may take to come."""
        return max((self.compute_patience(one, offset) for one, (offset, _) in list(self._stalls.items())), default=0.0)

    def _count_stalls(self, partition: Partition, offset: int) -> int:
        known, num_stalls = self._stalls.get(partition, (offset, 0))
        return num_stalls if known == offset else 0


class ReadProgress:
    """Knows when each partition that is to be read last brought something. Plain Python, no I/O; for one thread."""

    def __init__(self, attempts: FetchAttempts) -> None:
        self._attempts = attempts
        self._moved_s: dict[Partition, float] = {}
        self._asked_s: dict[Partition, float] = {}
        self._num_behind: dict[Partition, int] = {}
        self._standing: dict[Partition, str] = {}
        self._stalled: dict[Partition, int] = {}

    @property
    def current_problem(self) -> str:
        """Describes one partition that its member waited for as long as it may; empty where there is none."""
        return next((self._standing.get(one, "") for one in list(self._stalled)), "")

    @property
    def standing_partitions(self) -> dict[Partition, str]:
        """The partitions that have messages and bring none, each with a description."""
        return dict(self._standing)

    def track_partitions(self, partitions: Iterable[Partition], now_s: float) -> None:
        """Set the partitions that are to be read now. The time of those that are new begins now."""
        wanted = set(partitions)
        for partition in self._moved_s.keys() - wanted:
            self._moved_s.pop(partition)
            self._asked_s.pop(partition, None)
            self._forget_stall(partition)
        for partition in wanted - self._moved_s.keys():
            self._moved_s[partition] = now_s

    def note_message(self, partition: Partition, now_s: float) -> None:
        """Note that a partition brought something, or is read on elsewhere: its time begins now."""
        if partition in self._moved_s:
            self._moved_s[partition] = now_s
            self._forget_stall(partition)

    def take_quiet(self, now_s: float) -> list[Partition]:
        """Return the partitions whose end is to be looked up now. They are returned again after `QUIET_PARTITION_S`."""
        found = [
            partition
            for partition, moved_s in self._moved_s.items()
            if now_s - max(moved_s, self._asked_s.get(partition, moved_s)) >= QUIET_PARTITION_S
        ]
        self._asked_s |= dict.fromkeys(found, now_s)
        return found

    def compare_end(self, partition: Partition, position: int, end: int | None, now_s: float) -> bool:
        """Note the end of a quiet partition, as its leader gave it; None for an outage, in which no leader answers.

        Return whether its next message was waited for as long as may be, in the last attempt to fetch it.
        """
        if partition not in self._moved_s:
            return False
        if end is None or end <= position:
            self._forget_stall(partition)
            return False
        looks = self._num_behind[partition] = self._num_behind.get(partition, 0) + 1
        waited_s = now_s - self._moved_s[partition]
        if looks < 2 or waited_s < STALLED_PARTITION_S:
            return False
        topic, number = partition
        self._standing[partition] = f"{topic} partition {number} ends at {end} and is not read beyond {position}"
        if partition in self._stalled or waited_s < self._attempts.compute_patience(partition, position):
            return False
        was_last = self._attempts.is_last(partition, position)
        self._stalled[partition] = position
        self._attempts.note_stall(partition, position)
        return was_last

    def _forget_stall(self, partition: Partition) -> None:
        for known in (self._num_behind, self._standing, self._stalled):
            known.pop(partition, None)
