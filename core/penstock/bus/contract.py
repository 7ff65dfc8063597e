"""The contract of a bus: publish, poll, and settle.

`KafkaBus` and `StreamsBus` implement it; one test suite holds both to it.

A *delivery* is a message handed to one member of a stage's group. It stays with that member until it is
settled, or until the bus takes it away (the member died, or the group was rebalanced) and redelivers it to
another.

`settle` publishes the outputs and finishes the deliveries. Both happen together: after a crash either all of it
happened, or none. Only a `prefill` member that has not settled a result may get a delivery again whose outputs are out.
A job that is published twice is harmless: the first one claimed is bound to its request. From its first result on the
member settles as all others do. Work finishes out of order.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, Self

from penstock.bus.placement import JobNeed, PromptChain
from penstock.errors import BusUnavailable, RequestTooLarge
from penstock.messages import MAX_REQUEST_BYTES
from penstock.names import PriorityClass, WorkerKind, find_shared_topic, split_topic
from penstock.redis.scripts import ScriptCall

MAX_FOLLOWED_MESSAGES = 500
"""The most messages that a follower returns at once."""
MAX_MESSAGE_BYTES = 2 * MAX_REQUEST_BYTES - 4096
"""The most bytes of value, key and headers together: twice the limit of a request, less what a broker adds."""


@dataclass(frozen=True)
class Outgoing:
    """A message to publish."""

    topic: str
    value: bytes
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    chain: PromptChain | None = None
    """The beginning of a request's prompt, by which its worker is chosen if the bus has partitions
    (`penstock.bus.placement`). Without it a message goes by its key. It is not part of the written message."""
    job: JobNeed | None = None
    """What a job needs, by which its worker is chosen in the same way."""
    is_reply: bool = False
    """Whether it goes to a topic of its requester's, not the pipeline's. On Redis Streams `topic` is the stream's key
    then."""
    partition: int | None = None
    """The partition that a requester named for its reply."""

    @cached_property
    def num_bytes(self) -> int:
        """The size that `MAX_MESSAGE_BYTES` limits."""
        words = (self.key or "", *self.headers, *self.headers.values())
        return len(self.value) + len(as_bytes("".join(words)))


def as_text(raw: bytes) -> str:
    """Return a key or a header's value as text. `as_bytes` restores bytes that are not UTF-8."""
    return raw.decode(errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    """Return the bytes from which `as_text` made a text."""
    return text.encode(errors="surrogateescape")


def check_size(messages: Iterable[Outgoing]) -> None:
    """Raise `RequestTooLarge` for a message that is too large for any topic."""
    for message in messages:
        if (error := find_size_error(message)) is not None:
            raise error


def find_size_error(message: Outgoing) -> RequestTooLarge | None:
    """Return the error for a message that is too large for any topic, else None."""
    if message.num_bytes <= MAX_MESSAGE_BYTES:
        return None
    return RequestTooLarge(f"{message.num_bytes:,} bytes for {message.topic}; at most {MAX_MESSAGE_BYTES:,} fit")


def create_started_future() -> Future[str]:
    """Return the future of a message that was handed to the client: it cannot be cancelled any more."""
    future: Future[str] = Future()
    future.set_running_or_notify_cancel()
    return future


def wait_until_acknowledged(sent: Sequence[Future[str]], timeout_s: float) -> list[str]:
    """Wait until all messages are acknowledged, and return their places. Raise the first message's error, or
    `BusUnavailable` after the time.
    """
    _, open_ = wait(sent, timeout_s)
    for future in sent:
        if future in open_:
            raise BusUnavailable(f"no acknowledgement within {timeout_s:g} s: send it again under the same id")
        future.result()
    return [future.result() for future in sent]


@dataclass(frozen=True)
class Delivery:
    """A message as a member holds it.

    `position` names it within its topic: `<partition>:<offset>` or a stream id.
    """

    topic: str
    position: str
    value: bytes
    key: str | None
    headers: Mapping[str, str]
    priority_class: PriorityClass
    timestamp_s: float
    """When the message was published, seconds since the epoch."""
    is_held: bool = True
    """False where the request was taken over from a dead worker: another member has the delivery, or will get it, and
    finishes it. The `position` is still the message's."""
    since_result_s: float = math.inf
    """How long after the newest result of its key that the bus found among the last ones the message was published."""

    @property
    def address(self) -> tuple[str, str]:
        """Topic and position: what names the message in its pipeline."""
        return self.topic, self.position

    @property
    def name(self) -> str:
        """The name of the message's place, as it is bound to a request that is settled with this message."""
        return f"{self.topic}@{self.position}"

    @cached_property
    def offset(self) -> tuple[tuple[str, int], int]:
        """Where the bus has partitions, the message's partition (topic and number) and its offset there."""
        number, _, offset = self.position.partition(":")
        return (self.topic, int(number)), int(offset)


@dataclass(frozen=True)
class Settlement:
    """A finished delivery and the messages to publish with it.

    Where the delivery is not held by this member, only the messages are published.
    """

    delivery: Delivery
    outputs: Sequence[Outgoing] = ()

    def place_outputs(self) -> list[Outgoing]:
        """Return the outputs as they are written: what follows from a message of a tenant's own topic goes to the same
        tenant's own topics. Results, jobs and dead letters do so, whoever has made them. Replies go where
        their requesters want them.
        """
        _, own = split_topic(self.delivery.topic)
        return [
            replace(one, topic=find_shared_topic(one.topic) + own) if own and not one.is_reply else one
            for one in self.outputs
        ]


class Publisher(Protocol):
    """The producing side. Thread-safe."""

    def send_messages(self, messages: Sequence[Outgoing]) -> list[Future[str]]:
        """Hand messages to the client, and return for each a future of its place (as `Delivery.name`), which is done
        once the message is durable.

        No message waits for another's acknowledgement. A future raises `RequestTooLarge` (its message was not written)
        or `BusUnavailable` (it may have been).
        """

    def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        """Write the messages, and return their places; when this returns they are durable.

        Raises `RequestTooLarge` (nothing was written), or `BusUnavailable` (some may have been).
        """

    def close(self) -> None:
        """Send what is left and free the connection."""


class Member(Protocol):
    """One member of a stage's group.

    `poll`, `stop_consuming` and `close` belong to one thread; any thread may call the other methods.
    """

    @property
    def reply_prefixes(self) -> Mapping[str, Sequence[str]]:
        """By tenant, the beginnings of names that its reply topics may have (`BusSettings.find_reply_prefixes`)."""

    @property
    def current_problem(self) -> str:
        """Why this member cannot work now, as far as it knows without asking the bus; empty where it knows no problem.

        There are two kinds of problems: the bus cannot be reached or refuses something, or the member makes no progress
        though the bus answers. With the second kind `poll` raises `BusUnavailable` a moment later, and the caller has
        to join the group with a new member.
        """

    @property
    def slowness(self) -> int:
        """By how many times longer than usual its settlements may take, as the bus is slow to answer."""

    def poll(self, timeout_s: float, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return at most `capacity` deliveries of each class, interactive first. Wait up to `timeout_s` for any.

        A class without capacity is paused, and its assignment kept. A delivery that stays unsettled does not block
        those behind it. Raise `BusUnavailable` (polling again is safe, nothing is lost) or `MemberFenced`.
        """

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Publish all outputs, and finish all deliveries together with that.

        Raise `DeliveryLost` (it names the lost deliveries; nothing was done), `ReplyRefused` (it names the topics of
        replies; nothing was done), `RequestTooLarge` (no delivery was finished, and no result published),
        `MemberFenced`, or `BusUnavailable`: then it is unknown whether the settlement was made.

        After `BusUnavailable` a result may be settled again as it is: `DeliveryLost` means that the settlement was
        made, or that another member has the delivery, or had it: one that came to this member again is another
        delivery, as its request may have been done anew meanwhile. A job must get a new name before it is settled
        again, as it may be published already, also after `RequestTooLarge`.

        A `prefill` member that has not settled a result yet publishes first, and finishes the deliveries after that. A
        delivery may come again even after this returned, to this member or another one: the record knows which requests
        were handed off. A settlement with an output for the results topic is made as by all others, and so is every
        later one of this member; the first of them also waits for what finishes earlier ones.
        """

    def find_reply_refusals(self, replies: Sequence[Outgoing]) -> list[str]:
        """Return for each reply why its topic would not take it, as far as that is known before it is written; an empty
        text where nothing is known against it. Raise `BusUnavailable`.
        """

    def count_held(self) -> int:
        """Return how many deliveries this member holds unsettled."""

    def is_holding(self, delivery: Delivery) -> bool:
        """Return whether a delivery is still this member's, as far as it knows. After a pause it asks the bus.

        A delivery that is not held in the bus (`is_held` is False) never is. Call this before a request is claimed with
        the delivery. The delivery may be lost a moment later; then `settle` raises `DeliveryLost`.
        """

    def list_prefetched(self) -> list[Delivery]:
        """Return the deliveries that are fetched and not yet handed out by `poll`, interactive first."""

    def list_partitions(self) -> list[str]:
        """Return the names of the partitions of the interactive topics that this member alone reads.

        The list is empty where members share the topic, and while the member cannot reach the bus or makes no progress.
        """

    def count_waiting(self) -> Mapping[tuple[str, int], int]:
        """Return how many messages wait in each partition that this member alone reads (topic and number).

        Messages that `poll` has returned do not count. The member answers without asking the bus. Any thread may call
        this.

        It is empty where `list_partitions` would be.
        """

    def create_orphan_readers(self) -> "list[OrphanReader]":
        """Return a reader for partitions of dead members of each group; none where members share the topics."""

    def build_renewal(self, session_s: float) -> Sequence[ScriptCall]:
        """Return the calls that say on Redis that this member lives; none where the bus finds that out by itself.

        A worker's session, which lasts for `session_s`, makes them with each renewal: so its member is dead when the
        session has been over for the bus's session timeout. A member without a session lives by its polls. Any thread
        may call this.
        """

    def stop_consuming(self) -> None:
        """Stop reading: new messages go to other members at once. Settling goes on.

        On Kafka the unsettled deliveries go to other members too: settling them here raises `DeliveryLost`.
        """

    def close(self) -> None:
        """Leave the group: unsettled deliveries go to other members at once.

        It takes no longer than a few seconds, and does not wait for a bus that is away.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class OrphanReader(Protocol):
    """Reads partitions of a topic whose member died, until the bus assigns them anew. For one thread."""

    @property
    def topic(self) -> str:
        """The interactive topic of its group."""

    def list_partitions(self) -> list[str]:
        """Return the names of all partitions of the topic, as far as they are known. Thread-safe."""

    def read_orphans(self, partitions: Sequence[str], max_messages: int) -> list[Delivery]:
        """Return at most `max_messages` unfinished messages of these partitions, as deliveries that are not held.

        Each message is returned once, as long as every call names its partition. Raise `BusError`.
        """

    def close(self) -> None:
        """Free the connection."""


@dataclass(frozen=True)
class FollowedMessage:
    """A message as a follower reads it."""

    partition: str
    """The partition of the topic. Within one, messages have an order."""
    offset: str
    """The offset of the message in its partition. A follower that is opened with it as `after` goes on behind it."""
    message: Outgoing | None
    """The message; None where the log ends before the offset to go on from: the follower goes on from `offset`."""


class Follower(Protocol):
    """Reads a topic in order, outside any group, from offsets that its owner keeps. For one thread."""

    def read_messages(self, timeout_s: float, max_messages: int = MAX_FOLLOWED_MESSAGES) -> list[FollowedMessage]:
        """Return the next visible messages, at most `max_messages`. Wait up to `timeout_s` for any.

        No message is skipped that the topic still keeps, and none is returned that a transaction may still abort.
        Partitions that are added to the topic are read within some seconds. After `BusUnavailable` the owner opens a
        new follower at the offsets that it keeps.
        """

    def close(self) -> None:
        """Free the connection."""


class Bus(Protocol):
    """A way into the topics of one pipeline."""

    def create_topics(self, tenant: str = "") -> list[str]:
        """Create the pipeline's topics, or a tenant's own ones, that are missing, and return those created.

        Raise `SettingsError` where a tenant can have none.
        """

    def find_missing_topics(self) -> list[str]:
        """Return the pipeline's topics that do not exist."""

    def find_own_topics(self) -> list[str]:
        """Return the topics that tenants have of their own. Raise `BusUnavailable`."""

    def create_publisher(self) -> Publisher:
        """Return a publisher with a connection of its own."""

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group under a stable name (transactional id, consumer name), and return the member.

        An `auto` member is one of both stages' groups, and its deliveries are jobs and requests (`bus.joined`).
        """

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic of the stages are not settled: waiting, or held by a worker.

        Raise `BusUnavailable`. Thread-safe.
        """

    def find_gone(self, places: Sequence[str]) -> set[str]:
        """Return those of the places of requests at which no message waits any more: it was finished, or deleted.

        The request was lost if no worker has seen it: workers make its record before they finish its message. Raise
        `BusUnavailable`. Thread-safe.
        """

    def follow_topic(self, topic: str, after: Mapping[str, str]) -> Follower:
        """Return a follower of a topic that begins behind these offsets, by partition; others begin at their start."""

    def read_all(self, topic: str) -> list[Outgoing]:
        """Return every message now visible in a topic, outside any group: for tools and tests."""

    def check_connection(self, timeout_s: float = 5.0) -> str:
        """Return one line about the server. Raise `BusUnavailable` where it does not answer within `timeout_s`."""

    def close(self) -> None:
        """Free the connections that look-ups keep. Publishers, members and followers are closed by themselves."""
