"""What a bus is: publish, poll, and settle.

`KafkaBus` and `StreamsBus` keep this contract; one test suite holds both to it.

A *delivery* is a message handed to one member of a stage's group. It stays with that member until it is
settled, or until the bus takes it away (the member died, or the group was rebalanced) and redelivers it to
another.

`settle` publishes the outputs and finishes the deliveries. In the decode stage both happen together: after a crash
either all of it happened, or none. In the prefill stage a delivery may come again after its outputs are out, as a job
that is published twice is harmless: the first one claimed is bound to its request. Work finishes out of order.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol, Self

from penstock.errors import BusUnavailable, RequestTooLarge
from penstock.messages import MAX_REQUEST_BYTES
from penstock.names import PriorityClass, Stage

MAX_MESSAGE_BYTES = 2 * MAX_REQUEST_BYTES - 4096
"""Value, key and headers together: twice a request, less what a broker puts around a message."""


@dataclass(frozen=True)
class Outgoing:
    """A message to publish."""

    topic: str
    value: bytes
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    affinity: str | None = None
    """Messages of one affinity go to one worker while that can carry them (`penstock.bus.affinity`), where the bus has
    partitions. Not part of what is read."""

    @property
    def num_bytes(self) -> int:
        """What counts against `MAX_MESSAGE_BYTES`."""
        words = (self.key or "", *self.headers, *self.headers.values())
        return len(self.value) + sum(len(as_bytes(word)) for word in words)


def as_text(raw: bytes) -> str:
    """A key or a header's value as text. Bytes that are not UTF-8 stay in it, for `as_bytes` to find again."""
    return raw.decode(errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    """What `as_text` was made of."""
    return text.encode(errors="surrogateescape")


def check_size(messages: Iterable[Outgoing]) -> None:
    """Raise `RequestTooLarge` for a message no topic takes."""
    for message in messages:
        if (error := find_size_error(message)) is not None:
            raise error


def find_size_error(message: Outgoing) -> RequestTooLarge | None:
    """Return the error of a message no topic takes."""
    if message.num_bytes <= MAX_MESSAGE_BYTES:
        return None
    return RequestTooLarge(f"{message.num_bytes:,} bytes for {message.topic}; at most {MAX_MESSAGE_BYTES:,} fit")


def create_started_future() -> Future[None]:
    """Return the future of a message that is handed over: whoever waits for it cannot call it back."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return future


def wait_until_acknowledged(sent: Sequence[Future[None]], timeout_s: float) -> None:
    """Wait until all messages are acknowledged. Raises what the first one raises that is not, or `BusUnavailable`."""
    _, open_ = wait(sent, timeout_s)
    for future in sent:
        if future in open_:
            raise BusUnavailable(f"no acknowledgement within {timeout_s:g} s: send it again under the same id")
        future.result()


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
    klass: PriorityClass
    timestamp_s: float
    """When the message was published, seconds since the epoch."""
    is_held: bool = True
    """False: the request was taken over from a dead worker, and the message is, or will be, delivered to somebody
    else, who finishes it. Its `position` is empty."""


@dataclass(frozen=True)
class Settlement:
    """One delivery that is done, and what it brings forth. One that is not held brings forth, and stays."""

    delivery: Delivery
    outputs: Sequence[Outgoing] = ()


class Publisher(Protocol):
    """The producing side. Thread-safe."""

    def send_messages(self, messages: Sequence[Outgoing]) -> list[Future[None]]:
        """Hand messages over, and return for each a future that is done once the message is durable.

        No message waits for another's acknowledgement. A future raises `RequestTooLarge` (its message was not written)
        or `BusUnavailable` (it may have been).
        """

    def publish(self, messages: Sequence[Outgoing]) -> None:
        """Write the messages; when this returns they are durable.

        Raises `RequestTooLarge` (nothing was written), or `BusUnavailable` (some may have been).
        """

    def close(self) -> None:
        """Send what is left and free the connection."""


class Member(Protocol):
    """One member of a stage's group.

    `poll`, `retire` and `close` belong to one thread; `settle`, `held`, `holds`, `waiting` and `parts` to any.
    """

    @property
    def current_problem(self) -> str:
        """Why this member cannot do its part now, as far as it knows without asking; empty: nothing is known.

        The bus cannot be reached, or refuses something; or the member stands still though the bus answers. Then `poll`
        raises `BusUnavailable` a moment later, and a new member is to be made.
        """

    def poll(self, timeout_s: float, room: Mapping[PriorityClass, int]) -> list[Delivery]:
        """At most `room[klass]` deliveries of each class, interactive first; waits up to `timeout_s` for any.

        A class without room is paused, and the assignment kept. What is kept unsettled for a while blocks nothing
        behind it. Raises `BusUnavailable` (polling again is safe, nothing is lost) or `MemberFenced`.
        """

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Publish all outputs, then finish all deliveries; in the decode stage together.

        Raises `DeliveryLost` (naming the lost ones; nothing was done), `RequestTooLarge` (nothing was done),
        `MemberFenced`, or `BusUnavailable`: it is unknown whether it was done.

        In the decode stage settling the same again is safe then: `DeliveryLost` says that it was done, or that another
        member has the delivery. In the prefill stage the outputs may be out already, so a job has to have a new name
        when it is settled again. And once this returned, or even if it did not, the delivery may come again, here or
        elsewhere: the record says what was handed off.
        """

    def count_held(self) -> int:
        """How many deliveries this member holds unsettled."""

    def is_holding(self, delivery: Delivery) -> bool:
        """Whether a delivery is still this member's, as far as it knows without being told: a pause makes it ask.

        To be asked before a request is claimed with it. It may be lost a moment later, and settling then says so.
        """

    def list_prefetched(self) -> list[Delivery]:
        """What it has fetched beyond those, and would deliver if there were room; interactive first."""

    def list_partitions(self) -> list[str]:
        """The parts of the interactive topic that it alone reads, by name. None where members share all of it, or while
        it does not reach the bus or stands still.
        """

    def create_orphan_reader(self) -> "OrphanReader | None":
        """For parts that were a dead member's; None where members share."""

    def stop_consuming(self) -> None:
        """Take nothing more: what would come here goes to other members at once. Settling goes on.

        On Kafka the unsettled deliveries go with it: settling them raises `DeliveryLost`, and who has them settles.
        """

    def close(self) -> None:
        """Leave the group: unsettled deliveries go to other members at once.

        It takes no longer than a few seconds; of a bus that is away it does not wait for an answer.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class OrphanReader(Protocol):
    """Reads parts of a stage's topic whose member died, until the bus has found out. For one thread."""

    def read_orphans(self, parts: Sequence[str], most: int) -> list[Delivery]:
        """At most `most` messages of these parts which nobody finished, as deliveries that nobody holds.

        Each once, as long as its part is asked for again and again. Raises `BusError`.
        """

    def close(self) -> None:
        """Free the connection."""


@dataclass(frozen=True)
class FollowedMessage:
    """A message as a follower reads it."""

    partition: str
    """Of the topic: within one, messages have an order, and a place in it."""
    offset: str
    """Where the message is. Who has counted everything up to it follows `after` it."""
    message: Outgoing | None
    """None: nothing was read. The log ends before the place that was asked for, and is followed after this one."""


class Follower(Protocol):
    """Reads a topic in order, outside any group, from places that its owner keeps. For one thread."""

    def read_messages(self, timeout_s: float, most: int = 500) -> list[FollowedMessage]:
        """The next messages that are visible, at most so many; waits up to `timeout_s` for any.

        Nothing is skipped, and nothing is seen that a transaction may still take back. What the topic does not keep any
        more is passed over. Parts that are added to the topic are read within some seconds. Raises `BusUnavailable`:
        then a new follower goes on after what was counted.
        """

    def close(self) -> None:
        """Free the connection."""


class Bus(Protocol):
    """A way into the topics of one pipeline."""

    def create_topics(self) -> list[str]:
        """Make the pipeline's topics where they are missing; returns those made."""

    def find_missing_topics(self) -> list[str]:
        """Those of the pipeline's topics that are not there."""

    def count_old_retries(self) -> int:
        """How many messages, about, an older version put off to be tried again, and nobody settled since.

        Raises `BusUnavailable`.
        """

    def move_old_retries(self) -> int:
        """Put those messages back where they came from, each once; return how many.

        Raises `UpgradeNeeded` while workers of the older version run, or `BusUnavailable`: then it may be repeated.
        """

    def create_publisher(self) -> Publisher:
        """A producing side of its own."""

    def join_group(self, stage: Stage, name: str) -> Member:
        """Join a stage's group under a stable name (its transactional id, its consumer name)."""

    def count_unsettled(self) -> dict[str, int]:
        """How many messages of each topic that a stage works off are not settled: waiting, or held by a worker.

        Raises `BusUnavailable`. Thread-safe.
        """

    def follow_topic(self, topic: str, after: Mapping[str, str]) -> Follower:
        """Read a topic from these places on, by part; a part that is not named, from its beginning."""

    def read_all(self, topic: str) -> list[Outgoing]:
        """Every message now visible in a topic, outside any group: for tools and tests."""

    def check_connection(self, timeout_s: float = 5.0) -> str:
        """One line about the server reached; raises `BusUnavailable` when it takes longer than that."""
