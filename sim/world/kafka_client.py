"""Doubles of `confluent_kafka`'s consumer and producer, with the behaviour of librdkafka, over a link to `KafkaBroker`.

A partition keeps its pause when it is revoked and assigned again; rebalances happen within `poll`, which waits for the
callbacks; a message is delivered once unless the consumer seeks. Threads of the client's own process send heartbeats,
commits and messages, so they stand still and die with it.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from confluent_kafka import OFFSET_BEGINNING, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from penstock.bus.kafka.client import MAX_BATCH_BYTES
from penstock.bus.kafka.offsets import Partition
from penstock.errors import BusUnavailable
from sim.world.kafka_broker import Entry, KafkaBroker, MemberKey, OwnerKey, make_failure
from sim.world.network import TIMEOUT_S, Link
from sim.world.runtime import SimCondition, SimQueue, World

LIBRARY = "librdkafka"
"""What the names of threads begin with that are not the product's."""
HEARTBEAT_S = 1.0
RETRY_S = 0.1
FETCH_WAIT_S = 0.05
Report = Callable[[KafkaError | None, Message], object]
Rebalance = Callable[["WorldConsumer", list[TopicPartition]], None]


class Client:
    """The common part of consumer and producer: one way to the brokers, and threads beside the caller's."""

    def __init__(self, world: World, broker: KafkaBroker, link: Link) -> None:
        self._world, self._broker, self._link = world, broker, link
        self._is_closed = False

    def _ask(self, execute: Callable[[], Any], timeout_s: float) -> Any:
        """Ask the brokers until they answer, or the time is over. What is asked may be done twice."""
        end_s = self._world.now_s + timeout_s
        while True:
            try:
                return self._link.call(execute, may_be_late=True, limit_s=min(TIMEOUT_S, max(0.0, timeout_s)))
            except BusUnavailable:
                if self._world.now_s >= end_s:
                    raise make_failure(KafkaError._TIMED_OUT, retriable=True) from None  # noqa: SLF001
            except KafkaException as error:
                if not error.args[0].retriable() or self._world.now_s >= end_s:
                    raise
            self._world.sleep(RETRY_S)

    def _start_thread(self, name: str, run: Callable[[], None]) -> None:
        assert self._world.current is not None
        self._world.start_thread(self._world.current.process, name, run)

    def list_topics(self, topic: str | None = None, timeout: float = TIMEOUT_S) -> SimpleNamespace:
        """Return the partitions of a topic, or of all, each with a leader."""
        counts = self._ask(lambda: dict(self._broker.topics), timeout)
        found = {
            name: SimpleNamespace(
                topic=name, error=None, partitions={number: SimpleNamespace(leader=0) for number in range(count)}
            )
            for name, count in counts.items()
            if topic in {None, name}
        }
        if topic is not None and topic not in found:
            unknown = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
            found[topic] = SimpleNamespace(topic=topic, error=unknown, partitions={})
        return SimpleNamespace(topics=found, brokers={0: None}, cluster_id="world")


class Positions:
    """Where a consumer reads each of its partitions."""

    def __init__(self) -> None:
        self.positions: dict[Partition, int] = {}
        self.ends: dict[Partition, int] = {}
        """The ends that were told."""
        self.high: dict[Partition, int] = {}
        """The ends that came with what was fetched."""
        self.epochs: dict[Partition, int] = {}
        """The leader epochs by which the brokers are asked whether a log was cut before a position."""
        self.paused: set[Partition] = set()

    def assign(self, places: list[TopicPartition]) -> None:
        """Read these partitions, without a group."""
        self.positions, self.ends = {}, {}
        self.incremental_assign(places)

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        """Read these partitions, too."""
        for place in places:
            self.positions[place.topic, place.partition] = max(0, place.offset)
            self.ends.pop((place.topic, place.partition), None)

    def incremental_unassign(self, places: list[TopicPartition]) -> None:
        """Read these partitions no more."""
        for place in places:
            self.positions.pop((place.topic, place.partition), None)

    def pause(self, places: list[TopicPartition]) -> None:
        """Do not return messages of partitions."""
        self.paused |= {(place.topic, place.partition) for place in places}

    def resume(self, places: list[TopicPartition]) -> None:
        """Return messages of partitions again."""
        self.paused -= {(place.topic, place.partition) for place in places}

    def seek(self, place: TopicPartition) -> None:
        """Go on elsewhere."""
        partition = place.topic, place.partition
        if partition not in self.positions:
            raise make_failure(KafkaError._STATE)  # noqa: SLF001 - that is its name
        self.positions[partition] = 0 if place.offset == OFFSET_BEGINNING else place.offset
        if place.leader_epoch is not None and place.leader_epoch >= 0:
            self.epochs[partition] = place.leader_epoch
        self.ends.pop(partition, None)


class WorldConsumer(Client, Positions):
    """`confluent_kafka.Consumer`."""

    def __init__(self, world: World, broker: KafkaBroker, link: Link, settings: Mapping[str, Any]) -> None:
        Client.__init__(self, world, broker, link)
        Positions.__init__(self)
        self._group = settings["group.id"]
        self._is_stable = settings["isolation.level"] == "read_committed"
        self._tells_ends = settings.get("enable.partition.eof", False)
        self._on_commit = settings.get("on_commit")
        self._client = settings.get("client.id", "")
        self._name, self._epoch = "", 0
        self._topics: Sequence[str] = ()
        self._callbacks: dict[str, Rebalance] = {}
        self._wanted: set[Partition] | None = None
        """The assignment that the brokers told last; None where the membership is lost."""
        self._commits = SimQueue(world)
        self._num_committing = 0
        self._answers: deque[tuple[KafkaError | None, list[TopicPartition]]] = deque()
        self._beat_now = SimCondition(world)

    def subscribe(self, topics: Sequence[str], on_assign: Rebalance, on_revoke: Rebalance, on_lost: Rebalance) -> None:
        """Join the group."""
        self._topics, self._callbacks = topics, {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        self._wanted = set()
        self._take_name()
        self._start_thread(f"{LIBRARY}-beat", self._beat_forever)
        self._start_thread(f"{LIBRARY}-commit", self._commit_forever)

    def _is_subscribed(self, topic: str) -> bool:
        return any(re.match(one, topic) if one.startswith("^") else one == topic for one in self._topics)

    def _take_name(self) -> None:
        self._name = f"{self._client}/{self._broker.make_name()}"

    def _beat_forever(self) -> None:
        while not self._is_closed:
            owned, name = set(self.positions), self._name
            try:
                topics = [topic for topic in self._broker.topics if self._is_subscribed(topic)]
                answer = self._ask(partial(self._broker.beat, self._group, name, topics, owned), TIMEOUT_S)
                if owned == set(self.positions) and name == self._name:
                    self._epoch, self._wanted = answer
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_MEMBER_ID and name == self._name:
                    self._wanted = None
            with self._broker.changed:
                self._broker.changed.notify_all()
            with self._beat_now:
                self._beat_now.wait_for(lambda: set(self.positions) != owned or name != self._name, HEARTBEAT_S)  # noqa: B023

    def _commit_forever(self) -> None:
        while True:
            places = self._commits.get()
            ask = partial(self._broker.commit, self._group, places, (self._name, self._epoch))
            try:
                self._ask(ask, 2 * TIMEOUT_S)
                self._answers.append((None, places))
            except KafkaException as error:
                self._answers.append((error.args[0], places))
            self._num_committing -= 1

    def poll(self, timeout: float) -> Message | None:
        """Serve callbacks, then return a message, or None."""
        end_s = self._world.now_s + timeout
        while True:
            self._serve_answers()
            self._follow_assignment()
            found = self._fetch()
            left_s = end_s - self._world.now_s
            if found is not None or left_s <= 0:
                return found
            with self._broker.changed:
                self._broker.changed.wait(min(FETCH_WAIT_S, left_s))

    def consume(self, num_messages: int, timeout: float) -> list[Message]:
        """Return the messages that are there, up to a number; the time is for the first."""
        found = list[Message]()
        while len(found) < num_messages and (message := self.poll(0.0 if found else timeout)) is not None:
            found.append(message)
        return found

    def _serve_answers(self) -> None:
        while self._answers and self._on_commit is not None:
            self._on_commit(*self._answers.popleft())

    def _follow_assignment(self) -> None:
        """Give up and take partitions as the brokers told."""
        if not self._callbacks:
            return
        owned = set(self.positions)
        if self._wanted is None:
            self._call_back("lost", owned)
            self._take_name()
            self._wanted = set()
        elif gone := owned - self._wanted:
            self._call_back("revoke", gone)
        elif came := self._wanted - owned:
            self._call_back("assign", came)
        else:
            return
        with self._beat_now:
            self._beat_now.notify_all()

    def _call_back(self, what: str, partitions: set[Partition]) -> None:
        places = sorted(partitions)
        if places:
            self._callbacks[what](self, [TopicPartition(*partition) for partition in places])
        if what != "assign":
            while self._num_committing:  # librdkafka gives partitions up behind the commits that it has sent
                self._world.sleep(RETRY_S)
            self._serve_answers()
            for partition in places:
                self.positions.pop(partition, None)

    def _fetch(self) -> Message | None:
        if self._link.is_cut() or self._link.stands_until_s() > self._world.now_s:
            return None
        for partition in list(self.positions):
            if partition in self.paused:
                continue
            log, begin = self._broker.logs[partition], self._broker.begins[partition]
            position = max(self.positions[partition], begin)
            end = self._broker.find_stable_end(partition) if self._is_stable else len(log)
            self.high[partition] = len(log)
            if (epoch := self.epochs.pop(partition, None)) is not None:
                position = min(position, self._broker.find_epoch_end(partition, epoch))
            if position > len(log):
                position = begin
            while position < end:
                entry, position = log[position], position + 1
                if entry.is_visible:
                    self.positions.pop(partition)  # the others come first
                    self.positions[partition] = position
                    # Most of the way's time does not show, as librdkafka fetches ahead.
                    self._world.sleep(self._link.chance.expovariate(1 / self._link.delay_s) / 8)
                    return make_message(partition, position - 1, entry)
            self.positions[partition] = position
            if self._tells_ends and self.ends.get(partition) != position:
                self.ends[partition] = position
                end_error = KafkaError(KafkaError._PARTITION_EOF)  # noqa: SLF001 - that is its name
                return make_message(partition, position, None, end_error)
        return None

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        """Send a commit. The answer comes in `poll`."""
        assert asynchronous
        self._num_committing += 1
        self._commits.put(offsets)

    def committed(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """Return the group's commits."""
        wanted = [(place.topic, place.partition) for place in places]
        found: list[TopicPartition] = self._ask(
            lambda: self._broker.read_commits(self._group, wanted, stable=self._is_stable), timeout
        )
        return found

    def get_watermark_offsets(
        self, place: TopicPartition, timeout: float = 0.0, *, cached: bool = False
    ) -> tuple[int, int]:
        """Return where a partition begins and ends."""
        partition = place.topic, place.partition
        if cached:
            return self._broker.begins[partition], self.high.get(partition, -1)
        end: int = self._ask(lambda: self._broker.find_stable_end(partition), timeout)
        return min(end, self._broker.begins[partition]), end

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """Return where partitions end, for whose ends alone it is asked."""
        wanted = [(place.topic, place.partition) for place in places]
        ends = self._ask(lambda: [self._broker.find_stable_end(one) for one in wanted], timeout)
        return [TopicPartition(*one, end) for one, end in zip(wanted, ends, strict=True)]

    def consumer_group_metadata(self) -> tuple[str, str, int]:
        """Return who this member is."""
        return self._group, self._name, self._epoch

    def close(self) -> None:
        """Leave the group."""
        if self._callbacks and not self._is_closed:
            self._call_back("revoke", set(self.positions))
            self._is_closed = True
            try:
                self._link.call(lambda: self._broker.leave(self._group, self._name))
            except BusUnavailable:  # then the brokers notice it later
                return
        self._is_closed = True


class WorldProducer(Client):
    """`confluent_kafka.Producer`."""

    def __init__(self, world: World, broker: KafkaBroker, link: Link, settings: Mapping[str, Any]) -> None:
        super().__init__(world, broker, link)
        self._limit_s = settings["message.timeout.ms"] / 1000
        self._owner_id = settings.get("transactional.id", "")
        self._timeout_s = settings.get("transaction.timeout.ms", 0) / 1000
        self._key: OwnerKey | None = None
        self._writer = broker.make_name() if self._owner_id or settings.get("enable.idempotence") else ""
        self._num_written = self._num_open = 0
        self._queue = SimQueue(world)
        self._reports: deque[tuple[Report, KafkaError | None, Message]] = deque()
        self._has_reports = SimCondition(world)
        self._start_thread(f"{LIBRARY}-send", self._send_forever)

    def produce(
        self, topic: str, value: bytes, key: bytes | None, partition: int, headers: Any, on_delivery: Report
    ) -> None:
        """Hand over a message."""
        number = self._broker.choose_partition(topic, key) if partition < 0 else partition
        self._num_open += 1
        self._queue.put((((topic, number), Entry(value, key, headers)), self._key, on_delivery))

    def _send_forever(self) -> None:
        while True:
            entry, key, report = self._queue.get()
            words = self._writer, self._num_written, [entry], key
            try:
                offset = self._ask(partial(self._broker.write_entries, *words), self._limit_s)
                self._num_written += 1
                self._report(report, None, entry[0], offset)
            except KafkaException as error:
                # Whether it was written is not known: what follows must not be taken for it.
                self._writer, self._num_written = self._writer and self._broker.make_name(), 0
                is_late = error.args[0].code() == KafkaError._TIMED_OUT  # noqa: SLF001 - that is its name
                self._report(report, KafkaError(KafkaError._MSG_TIMED_OUT) if is_late else error.args[0])  # noqa: SLF001

    def _report(
        self, report: Report, error: KafkaError | None, partition: Partition = ("", 0), offset: int = -1
    ) -> None:
        self._num_open -= 1
        self._reports.append((report, error, make_message(partition, offset, None)))
        self._has_reports.notify_all()

    def poll(self, timeout: float) -> int:
        """Serve reports, and wait for one."""
        if not self._reports:
            with self._has_reports:
                self._has_reports.wait(timeout)
        return self._serve_reports()

    def _serve_reports(self) -> int:
        num_served = 0
        while self._reports:
            report, error, message = self._reports.popleft()
            report(error, message)
            num_served += 1
        return num_served

    def flush(self, timeout: float) -> int:
        """Wait until all messages are acknowledged. Return how many are not."""
        with self._has_reports:
            self._has_reports.wait_for(lambda: not self._num_open, timeout)
        self._serve_reports()
        return self._num_open

    def purge(self) -> None:
        """Give up the messages that are not sent."""
        while not self._queue.empty():
            *_, report = self._queue.get_nowait()
            self._report(report, KafkaError(KafkaError._PURGE_QUEUE))  # noqa: SLF001 - that is its name

    def init_transactions(self, timeout: float) -> None:
        """Take the transactional id."""
        self._key = self._ask(lambda: self._broker.init_owner(self._owner_id, self._timeout_s), timeout)

    def begin_transaction(self) -> None:
        """Do nothing: a transaction begins with its first message."""

    def send_offsets_to_transaction(
        self, offsets: list[TopicPartition], membership: tuple[str, str, int], timeout: float
    ) -> None:
        """Commit offsets with the transaction."""
        key, (group, *member) = self._find_key(), membership
        self._ask(lambda: self._broker.add_offsets(key, group, offsets, cast("MemberKey", tuple(member))), timeout)

    def commit_transaction(self, timeout: float) -> None:
        """Commit the transaction."""
        self._end_transaction("committed", timeout)

    def abort_transaction(self, timeout: float) -> None:
        """Abort the transaction."""
        self.purge()
        self._end_transaction("aborted", timeout)

    def _end_transaction(self, outcome: str, timeout: float) -> None:
        key = self._find_key()
        self._key = self._ask(lambda: self._broker.end_transaction(key, outcome), timeout)

    def _find_key(self) -> OwnerKey:
        assert self._key is not None, "init_transactions comes first"
        return self._key


class WorldAdmin(Client):
    """`confluent_kafka.admin.AdminClient`, as far as it tells topics' ids and partitions, and where logs end."""

    def describe_topics(
        self, topics: Any, request_timeout: float, *, include_authorized_operations: bool = False
    ) -> dict[str, SimpleNamespace]:
        """Return a topic's id, which is its name here, and its partitions."""
        counts = self._ask(lambda: dict(self._broker.topics), request_timeout)

        def describe(name: str) -> SimpleNamespace:
            partitions = [SimpleNamespace(id=number, leader=0, isr=[0]) for number in range(counts.get(name, 0))]
            about = SimpleNamespace(topic_id=name, partitions=partitions, authorized_operations=None)
            return make_result(about)

        return {name: describe(name) for name in topics}

    def describe_configs(self, resources: Any, request_timeout: float) -> dict[Any, SimpleNamespace]:
        """Return the largest batch that each topic takes."""
        self._ask(lambda: None, request_timeout)
        limit = SimpleNamespace(value=str(MAX_BATCH_BYTES))
        return {one: make_result({"max.message.bytes": limit}) for one in resources}

    def list_offsets(
        self, wanted: Mapping[TopicPartition, OffsetSpec], isolation_level: IsolationLevel, request_timeout: float
    ) -> dict[TopicPartition, SimpleNamespace]:
        """Return where logs begin or end."""
        broker, level = self._broker, IsolationLevel.READ_COMMITTED

        def find(place: TopicPartition, what: OffsetSpec) -> int:
            one = place.topic, place.partition
            if isinstance(what, type(OffsetSpec.earliest())):  # type: ignore[no-untyped-call]
                return broker.begins[one]
            return broker.find_stable_end(one) if isolation_level == level else len(broker.logs[one])

        found = self._ask(lambda: {place: find(place, what) for place, what in wanted.items()}, request_timeout)
        return {place: make_result(SimpleNamespace(offset=offset)) for place, offset in found.items()}


def make_result(value: object) -> SimpleNamespace:
    """Return a future that has its result."""
    return SimpleNamespace(result=lambda _: value)


def make_message(partition: Partition, offset: int, entry: Entry | None, error: KafkaError | None = None) -> Message:
    """Return a message, or an error in its place. As librdkafka does, the latter has no epoch of its own, but 0."""
    make, entry = cast(Any, Message), entry or Entry(None)
    return cast(
        Message,
        make(
            topic=partition[0], partition=partition[1], offset=offset, key=entry.key, value=entry.value,
            headers=list(entry.headers), error=error, timestamp=(1, entry.timestamp_ms), latency=0.0,
            leader_epoch=0 if error else entry.epoch,
        ),
    )  # fmt: skip
