"""A bus in memory: a log for each topic, and for each stage a group whose members share the messages."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from penstock.bus.contract import (
    MAX_FOLLOWED_MESSAGES,
    Delivery,
    FollowedMessage,
    Member,
    OrphanReader,
    Outgoing,
    Settlement,
    check_size,
    create_started_future,
)
from penstock.bus.joined import EventBell, JoinedMember, join_both
from penstock.errors import (
    BusUnavailable,
    DeliveryLost,
    MemberFenced,
    PenstockError,
    ReplyRefused,
    SettingsError,
)
from penstock.names import CLASSES, Pipeline, PriorityClass, WorkerKind
from penstock.redis.scripts import ScriptCall

PARTITION = "all"
"""The name of a topic's only partition."""


@dataclass
class Entry:
    """A message in a topic. `member` holds it; None while it waits."""

    offset: int
    message: Outgoing
    timestamp_s: float
    member: "MemoryMember | None" = None


@dataclass
class Topic:
    """The messages of a topic, by offset. A settled message is not there any more."""

    num_published: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)

    def append(self, message: Outgoing) -> str:
        """Add a message behind the others, and return its place."""
        written, offset = Outgoing(message.topic, message.value, message.key, dict(message.headers)), self.num_published
        self.entries[offset] = Entry(offset, written, time.time())
        self.num_published += 1
        return f"{message.topic}@{offset}"


class MemoryBus:
    """The topics of one pipeline, shared by all holders of this object, on any threads."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.changed = threading.Condition()
        """Guards everything here, and is notified of each new message and of each that waits again."""
        self.topics: dict[str, Topic] = {}
        """The pipeline's topics, and those that hold replies."""
        self.reply_prefixes: Mapping[str, Sequence[str]] = {}
        """What the names of reply topics begin with, by tenant."""
        self._bells: list[EventBell] = []
        self.members: dict[tuple[WorkerKind, str], MemoryMember] = {}

    def create_topics(self, tenant: str = "") -> list[str]:
        """Create the pipeline's topics that are missing, and return those created. A tenant can have none."""
        if tenant:
            raise SettingsError("topics of a tenant's own need Kafka as the bus: set PENSTOCK_KAFKA")
        with self.changed:
            missing = self.find_missing_topics()
            self.topics |= {topic: Topic() for topic in missing}
            return missing

    def add_reply_topic(self, topic: str) -> None:
        """Create a topic for replies."""
        with self.changed:
            self.topics.setdefault(topic, Topic())

    def find_missing_topics(self) -> list[str]:
        """Return the pipeline's topics that do not exist."""
        return [topic for topic in self.pipeline.all_topics() if topic not in self.topics]

    def find_own_topics(self) -> list[str]:
        """Return none: only Kafka has them."""
        return []

    def create_publisher(self) -> "MemoryPublisher":
        """Return a publisher."""
        return MemoryPublisher(self)

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group, and return the member. An older member of the same name is fenced."""
        return self.add_members(stage, lambda kind: MemoryMember(self, kind, name))

    def add_members(self, stage: WorkerKind, make: Callable[[WorkerKind], "MemoryMember"]) -> Member:
        """Join a stage's group with the member that `make` returns, and return it; `auto` joins both groups."""
        if stage == "auto":
            self._bells.append(bell := EventBell())
            return JoinedMember(self.pipeline, *join_both(lambda kind: self._add_member(make(kind))), bell)
        return self._add_member(make(stage))

    def _add_member(self, made: "MemoryMember") -> "MemoryMember":
        with self.changed:
            older = self.members.get((made.stage, made.name))
            self.members[made.stage, made.name] = made
            if older is not None:
                older.give_back_all()
            return made

    def list_members(self, name: str) -> "list[MemoryMember]":
        """Return the members that have a name, one for each group that they are in."""
        with self.changed:
            return [member for (_, other), member in self.members.items() if other == name]

    def note_change(self) -> None:
        """Wake the threads that wait for messages. The caller holds `changed`."""
        self.changed.notify_all()
        for bell in self._bells:
            bell.ring()

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic are not settled."""
        with self.changed:
            inputs = (topic for stage in ("prefill", "decode") for topic in self.pipeline.input_topics(stage).values())
            return {topic: len(self.topics[topic].entries) for topic in inputs}

    def find_gone(self, places: Sequence[str]) -> set[str]:
        """Return those of the places at which no message is."""
        with self.changed:
            parts = {place: place.rpartition("@") for place in places}
            return {place for place, (name, _, at) in parts.items() if int(at) not in self.topics[name].entries}

    def follow_topic(self, topic: str, after: Mapping[str, str]) -> "MemoryFollower":
        """Return a follower of a topic; see `contract.Bus.follow_topic`."""
        return MemoryFollower(self, topic, int(after.get(PARTITION, "-1")))

    def read_all(self, topic: str) -> list[Outgoing]:
        """Return every message now in a topic. Settled messages are not there any more."""
        with self.changed:
            return [entry.message for entry in self.topics[topic].entries.values()]

    def check_connection(self, timeout_s: float = 5.0) -> str:
        """Return one line about the bus."""
        return f"messages of {self.pipeline.name} at hand, in memory"

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def append(self, messages: Sequence[Outgoing]) -> list[str]:
        """Add messages to their topics, all or none, and wake waiting readers. Return their places. Raise
        `BusUnavailable`.
        """
        with self.changed:
            unknown = {message.topic for message in messages}.difference(self.topics)
            if unknown:
                raise BusUnavailable(f"no such topic: {', '.join(sorted(unknown))}")
            places = [self.topics[message.topic].append(message) for message in messages]
            self.note_change()
            return places


class MemoryMember:
    """A member of a stage's group."""

    def __init__(self, bus: MemoryBus, stage: WorkerKind, name: str) -> None:
        self._bus, self.stage, self.name = bus, stage, name
        self._topics: dict[PriorityClass, str] = bus.pipeline.input_topics(stage)
        self._held: dict[tuple[str, str], tuple[Entry, Delivery]] = {}
        self._is_consuming, self._is_dead = True, False
        self.current_problem, self.slowness = "", 1

    def poll(self, timeout_s: float, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return deliveries of the classes with capacity, interactive first; see `contract.Member.poll`."""
        end = time.monotonic() + timeout_s
        with self._bus.changed:
            while True:
                self._raise_if_fenced()
                found = self._take(capacity) if self._is_consuming else []
                left_s = end - time.monotonic()
                if found or left_s <= 0:
                    return found
                self._bus.changed.wait(left_s)

    def _take(self, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        found: list[Delivery] = []
        for priority_class in CLASSES:
            topic = self._topics[priority_class]
            waiting = [entry for entry in self._bus.topics[topic].entries.values() if entry.member is None]
            for entry in waiting[: capacity.get(priority_class, 0)]:
                entry.member = self
                message, position = entry.message, str(entry.offset)
                content = message.value, message.key, message.headers
                found.append(Delivery(topic, position, *content, priority_class, entry.timestamp_s))
                self._held[topic, position] = entry, found[-1]
        return found

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Publish and finish together; see `contract.Member.settle`."""
        outputs = [output for settlement in settlements for output in settlement.outputs]
        check_size(outputs)
        deliveries = [settlement.delivery for settlement in settlements if settlement.delivery.is_held]
        with self._bus.changed:
            self._raise_if_fenced()
            lost = [one for one in deliveries if not self.is_holding(one)]
            if lost:
                raise DeliveryLost(lost)
            unknown = {one.topic for one in outputs if one.is_reply}.difference(self._bus.topics)
            if unknown:
                raise ReplyRefused(dict.fromkeys(unknown, "there is no such topic"), is_sure=True)
            self._bus.append(outputs)
            for one in deliveries:
                entry, _ = self._held.pop(one.address)
                self._bus.topics[one.topic].entries.pop(entry.offset, None)

    @property
    def reply_prefixes(self) -> Mapping[str, Sequence[str]]:
        """What the names of reply topics begin with, by tenant."""
        return self._bus.reply_prefixes

    def find_reply_refusals(self, replies: Sequence[Outgoing]) -> list[str]:
        """Return nothing against any: `settle` looks at their topics itself."""
        return [""] * len(replies)

    def count_held(self) -> int:
        """Return how many deliveries this member holds unsettled."""
        return len(self._held)

    def is_holding(self, delivery: Delivery) -> bool:
        """Return whether a delivery is still this member's."""
        _, held = self._held.get(delivery.address, (None, None))
        return delivery.is_held and held is delivery

    def list_prefetched(self) -> list[Delivery]:
        """Return nothing: a member takes only as many messages as it has capacity for."""
        return []

    def list_partitions(self) -> list[str]:
        """Return nothing: members share the topics."""
        return []

    def count_waiting(self) -> Mapping[tuple[str, int], int]:
        """Return nothing: members share the topics."""
        return {}

    def create_orphan_readers(self) -> list[OrphanReader]:
        """Return none: any member can take the messages that no member has polled."""
        return []

    def build_renewal(self, session_s: float) -> list[ScriptCall]:
        """Return nothing: the members are those of this process."""
        return []

    def stop_consuming(self) -> None:
        """Take no more messages. Messages that the member holds can still be settled."""
        self._is_consuming = False

    def give_back_all(self) -> None:
        """Let other members have the unsettled deliveries, as if this member had died."""
        with self._bus.changed:
            for entry, _ in self._held.values():
                entry.member = None
            self._held = {}
            self._bus.note_change()

    def die(self) -> None:
        """Be dead: other members have what this one held, and whatever it is asked it raises `BusUnavailable`."""
        with self._bus.changed:
            self._is_dead = True
            self.give_back_all()

    def close(self) -> None:
        """Leave the group."""
        self.give_back_all()
        with self._bus.changed:
            self._is_consuming = False
            if self._bus.members.get((self.stage, self.name)) is self:
                del self._bus.members[self.stage, self.name]

    def _raise_if_fenced(self) -> None:
        if self._is_dead:
            raise BusUnavailable(f"{self.name} was killed")
        newest = self._bus.members.get((self.stage, self.name))
        if newest is not None and newest is not self:
            raise MemberFenced(f"another member of the group has the name {self.name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryPublisher:
    """Adds messages to topics."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus

    def send_messages(self, messages: Sequence[Outgoing]) -> list[Future[str]]:
        """Add the messages, and return a future for each; see `contract.Publisher.send_messages`."""
        sent = []
        for message in messages:
            future = create_started_future()
            try:
                future.set_result(self.publish([message])[0])
            except PenstockError as error:
                future.set_exception(error)
            sent.append(future)
        return sent

    def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        """Add the messages, all or none. Return their places. Raise `RequestTooLarge` or `BusUnavailable`."""
        check_size(messages)
        return self._bus.append(messages)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class MemoryFollower:
    """Reads a topic from an offset on."""

    def __init__(self, bus: MemoryBus, topic: str, after: int) -> None:
        self._bus, self._topic, self._after = bus, topic, after

    def read_messages(self, timeout_s: float, max_messages: int = MAX_FOLLOWED_MESSAGES) -> list[FollowedMessage]:
        """Return the next messages; see `contract.Follower.read_messages`."""
        end = time.monotonic() + timeout_s
        with self._bus.changed:
            while True:
                entries = self._bus.topics[self._topic].entries.values()
                found = [entry for entry in entries if entry.offset > self._after][:max_messages]
                left_s = end - time.monotonic()
                if found or left_s <= 0:
                    break
                self._bus.changed.wait(left_s)
            if found:
                self._after = found[-1].offset
            return [FollowedMessage(PARTITION, str(entry.offset), entry.message) for entry in found]

    def close(self) -> None:
        """Do nothing: there is no connection."""
