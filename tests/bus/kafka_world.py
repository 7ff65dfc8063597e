"""A Kafka member on the simulated world's brokers: a test is a thread beside the member's, and says what they do.

`played` runs a test so. `sim.world.kafka_client` says how the client behaves.
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar, TypeVar

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.offsets import Partition
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.names import Pipeline
from sim.waiting import PATIENCE_S
from sim.world.kafka_broker import BrokerBus, Entry, Group, KafkaBroker, MemberKey, make_failure
from sim.world.kafka_client import WorldAdmin, WorldConsumer, WorldProducer, make_message
from sim.world.network import Link
from sim.world.runtime import Doubles, Process, SimEvent, World

T = TypeVar("T")
TURN_S = 0.3
"""In so long the member's poller polls at least once."""


class PlayedWorld:
    """A world with one process, in which functions run one after the other beside the threads that they started."""

    current: ClassVar["PlayedWorld"]
    ended: ClassVar[list[World]] = []
    """Worlds that are over: threads that were freed would run to their end."""

    def __init__(self) -> None:
        PlayedWorld.current = self
        self.world, self._failures = World(0), list[BaseException]()
        self._process = Process("test", on_failure=lambda _, error: self._failures.append(error))
        self.bus: PlayedBus
        doubles = [
            (Consumer, lambda settings: PlayedConsumer(self.bus, settings)),
            (Producer, lambda settings: PlayedProducer(self.bus, settings)),
            (AdminClient, lambda _: WorldAdmin(self.world, self.bus.broker, self.bus.link)),
            (TopicCollection, lambda topics: topics),
        ]
        self._installed = Doubles(self.world).install(("penstock.", "tests.bus.test_kafka_member"), doubles)

    def __enter__(self) -> "PlayedWorld":
        self._installed.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.world.kill(self._process)
        self.ended.append(self.world)
        self._installed.__exit__(*error)

    def play(self, function: Callable[[], T]) -> T:
        """Return what a function returns that may wait."""
        found: list[T] = []
        thread = self.world.start_thread(self._process, "test", lambda: found.append(function()))
        self.world.run(lambda: thread.is_over or self._failures, 100 * PATIENCE_S)
        if self._failures:
            raise self._failures.pop()
        assert found, "it does not end"
        return found[0]


def played(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a world of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with PlayedWorld() as world:
            world.play(lambda: test(*args, **kwargs))

    return run


class PlayedBroker(KafkaBroker):
    """Brokers that assign and refuse what a test says, and end no membership by themselves."""

    def __init__(self, world: World, topics: Iterable[str]) -> None:
        super().__init__(world, dict.fromkeys(topics, 2))
        self.stands_until_s = lambda: math.inf
        self.given: set[Partition] = set()
        self.commits: dict[Partition, TopicPartition] = {}
        self.commit_error: int | None = None
        """The error with which brokers answer questions for committed offsets."""
        self.commit_refusal: int | None = None
        """The error with which brokers answer commits."""
        self.commits_go_on = SimEvent(world)
        """Commits of consumers wait for this event."""
        self.commits_go_on.set()

    def _find_group(self, name: str) -> Group:
        return self._groups.setdefault(name, Group(commits=self.commits))

    def assign(self) -> None:
        """Let the member that joined last have what was given."""
        for group in self._groups.values():
            self._assign_anew(group)

    def _assign_anew(self, group: Group) -> None:
        group.epoch += 1
        group.target = dict.fromkeys(self.given, max(group.members, default=""))
        self.changed.notify_all()

    def commit(self, group: str, offsets: Sequence[TopicPartition], member: MemberKey) -> None:
        self.commits_go_on.wait()
        if self.commit_refusal is not None:
            raise make_failure(self.commit_refusal)
        super().commit(group, offsets, member)

    def read_commits(self, group: str, wanted: Iterable[Partition], *, stable: bool) -> list[TopicPartition]:
        if self.commit_error is not None:
            raise make_failure(self.commit_error)
        return super().read_commits(group, wanted, stable=stable)


class PlayedBus(KafkaBus):
    """The bus over such brokers."""

    def __init__(self) -> None:
        super().__init__(Pipeline("double"), "brokers", BusSettings())
        PlayedWorld.current.bus, self.world = self, PlayedWorld.current.world
        self.broker = PlayedBroker(self.world, self.pipeline.all_topics())
        self.logs, self.begins, self.commits = self.broker.logs, self.broker.begins, self.broker.commits
        self.link = Link(self.world, Random(0), BusUnavailable, is_cut=lambda: self.is_away)
        self.deaf: set[Partition] = set()
        """Partitions that deliver nothing though their leader answers."""
        self.unfetchable: set[tuple[Partition, int]] = set()
        """Messages that never come, nor what is behind them, unless the consumer seeks there."""
        self.leaderless: set[Partition] = set()
        self.goes_on = SimEvent(self.world)
        """Producers and polls wait for this event."""
        self.goes_on.set()
        self.is_away = False
        self.reader: PlayedConsumer
        """The consumer of the member that joined last."""

    @property
    def written(self) -> list[Outgoing]:
        """The results and dead letters."""
        topics = (self.pipeline.results_topic, self.pipeline.dead_letter_topic)
        return [output for topic in topics for output in BrokerBus(self.pipeline, self.broker).read_all(topic)]

    def publish(self, partition: Partition, *values: bytes | None) -> None:
        """Append to a log: None is a transaction's marker."""
        self.logs[partition] += [Entry(value, timestamp_ms=1000) for value in values]
        self.broker.changed.notify_all()

    def give(self, *partitions: Partition) -> None:
        """Assign partitions, and wait until the member has them."""
        self.broker.given |= {*partitions}
        self.broker.assign()
        self.turn_until(lambda: self.broker.given <= self.reader.positions.keys(), "it has them")

    def take_away(self, *partitions: Partition) -> None:
        """Revoke partitions, and wait until the member has given them up."""
        self.broker.given -= {*partitions}
        self.broker.assign()
        self.turn_until(lambda: not self.reader.positions.keys() & {*partitions}, "it has given them up")

    def turn(self) -> None:
        """Let the poller poll."""
        self.world.sleep(TURN_S)

    def turn_until(self, is_so: Callable[[], object], what: str) -> None:
        """Let the member go on until it is so."""
        end_s = self.world.now_s + PATIENCE_S
        while not is_so():
            assert self.world.now_s < end_s, what
            self.world.sleep(TURN_S / 10)

    def has_all_fetched(self) -> bool:
        """Return whether the reader has come to the ends of all its partitions."""
        reader = self.reader
        return bool(reader.positions) and all(
            partition not in reader.paused and reader.ends.get(partition) == len(self.logs[partition])
            for partition in reader.positions
        )


class PlayedConsumer(WorldConsumer):
    """A consumer that a test lets hang, or gives errors."""

    def __init__(self, bus: PlayedBus, settings: Mapping[str, Any]) -> None:
        super().__init__(bus.world, bus.broker, bus.link, settings)
        self._bus, self.errors = bus, deque[Message]()
        if "client.id" in settings:
            bus.reader = self

    def poll(self, timeout: float) -> Message | None:
        self._bus.goes_on.wait()
        return super().poll(timeout)

    def _fetch(self) -> Message | None:
        if self.errors:
            return self.errors.popleft()
        silent = {
            partition for partition, position in self.positions.items()
            if partition in self._bus.deaf or (partition, position) in self._bus.unfetchable
        } - self.paused  # fmt: skip
        self.paused |= silent
        try:
            return super()._fetch()
        finally:
            self.paused -= silent

    def get_watermark_offsets(  # type: ignore[override]
        self, place: TopicPartition, timeout: float = 0.0, *, cached: bool = False
    ) -> tuple[int, int] | None:
        if (place.topic, place.partition) in self._bus.leaderless and not cached:
            return None
        return super().get_watermark_offsets(place, timeout, cached=cached)

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        if any((place.topic, place.partition) in self._bus.leaderless for place in places):
            raise make_failure(KafkaError._UNKNOWN_PARTITION)
        return super().offsets_for_times(places, timeout)


class PlayedProducer(WorldProducer):
    """A producer that a test lets hang."""

    def __init__(self, bus: PlayedBus, settings: Mapping[str, Any]) -> None:
        self._bus = bus
        super().__init__(bus.world, bus.broker, bus.link, settings)

    def _ask(self, execute: Callable[[], Any], timeout_s: float) -> Any:
        self._bus.goes_on.wait()
        return super()._ask(execute, timeout_s)


def refusal(partition: Partition, code: int, offset: int = 0) -> Message:
    """Return an error in a message's place."""
    return make_message(partition, offset, None, KafkaError(code))
