"""Kafka in memory, for one member, whose poller runs in lockstep with the test.

`turn` lets it poll once, and returns when it polls again. `sim.world.kafka_client` says how the client behaves.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock.bus.contract import Outgoing
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.offsets import Partition
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from sim.waiting import PATIENCE_S
from sim.world.kafka_broker import Entry, make_failure
from sim.world.kafka_client import Positions, make_message

Rebalance = Callable[["DoubleConsumer", list[TopicPartition]], None]


class DoubleBus(KafkaBus):
    """A bus whose brokers are in memory. An entry of a log is a value, or None for a transaction marker."""

    def __init__(self) -> None:
        super().__init__(Pipeline("double"), "", BusSettings())
        self.logs: dict[Partition, list[bytes | None]] = {}
        self.commits: dict[Partition, TopicPartition] = {}
        self.written: list[Outgoing] = []
        self.commit_error: int | None = None
        """The error with which brokers answer questions for committed offsets."""
        self.commit_refusal: int | None = None
        """The error with which brokers answer commits."""
        self.deaf: set[Partition] = set()
        """Partitions that deliver nothing though their leader answers."""
        self.unfetchable: set[tuple[Partition, int]] = set()
        """Messages that never come, nor what is behind them, unless the consumer seeks there."""
        self.leaderless: set[Partition] = set()
        self.begins: dict[Partition, int] = {}
        """Where logs begin whose first messages were deleted."""
        self.goes_on = threading.Event()
        """Settlements and polls wait for this event."""
        self.goes_on.set()
        self.is_away = False
        self.lock = threading.Condition()
        self._reader: DoubleConsumer | None = None

    @property
    def reader(self) -> "DoubleConsumer":
        """The consumer of the member that joined last."""
        assert self._reader is not None
        return self._reader

    def create_consumer(self, settings: Mapping[str, Any]) -> Any:
        consumer = DoubleConsumer(self, settings.get("on_commit"))
        if "client.id" in settings:
            self._reader = consumer
        return consumer

    def create_transactions(self, transactional_id: str) -> Any:
        return DoubleTransactions(self)

    def create_output_writer(self) -> Any:
        return DoubleOutputs(self)

    def publish(self, partition: Partition, *values: bytes | None) -> None:
        with self.lock:
            self.logs.setdefault(partition, []).extend(values)

    def give(self, *partitions: Partition) -> None:
        self.reader.rebalances.append(("assign", partitions))
        self.turn()

    def take_away(self, *partitions: Partition) -> None:
        self.reader.rebalances.append(("revoke", partitions))
        self.turn()

    def turn(self) -> None:
        """Let the poller poll once."""
        self.reader.turn()

    def has_all_fetched(self) -> bool:
        """Return whether the reader has come to the ends of all its partitions."""
        reader = self.reader
        return bool(reader.positions) and all(
            partition not in reader.paused and reader.ends.get(partition) == len(self.logs[partition])
            for partition in reader.positions
        )

    def turn_until(self, is_so: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < end, what
            self.turn()


class DoubleConsumer(Positions):
    def __init__(self, bus: DoubleBus, on_commit: Callable[..., None] | None) -> None:
        super().__init__()
        self.bus, self.on_commit = bus, on_commit
        self.under_way: deque[list[TopicPartition]] = deque()
        self.rebalances: deque[tuple[str, tuple[Partition, ...]]] = deque()
        self.errors: deque[Message] = deque()
        self.callbacks: dict[str, Rebalance] = {}
        self.num_polls = self.num_allowed = 0
        self.is_free = False

    def turn(self) -> None:
        with self.bus.lock:
            self.num_allowed += 1
            wanted = self.num_allowed + 1
            self.bus.lock.notify_all()
            assert self.bus.lock.wait_for(lambda: self.num_polls >= wanted or self.is_free, PATIENCE_S), (
                "it polls again"
            )

    def free(self) -> None:
        """Poll without being asked from now on."""
        with self.bus.lock:
            self.is_free = True
            self.bus.lock.notify_all()

    # The interface of confluent_kafka's Consumer.

    def subscribe(self, topics: Sequence[str], on_assign: Rebalance, on_revoke: Rebalance, on_lost: Rebalance) -> None:
        self.callbacks = {"assign": on_assign, "revoke": on_revoke}

    def poll(self, timeout: float) -> Message | None:
        with self.bus.lock:
            self.num_polls += 1
            self.bus.lock.notify_all()
            if not self.bus.lock.wait_for(lambda: self.num_allowed >= self.num_polls or self.is_free, PATIENCE_S):
                self.is_free = True  # the test is over
            if self.is_free:
                self.bus.lock.wait(0.001)
        assert self.bus.goes_on.wait(PATIENCE_S)
        self._answer_commits()
        while self.rebalances:
            self._rebalance(*self.rebalances.popleft())
        with self.bus.lock:
            return self.errors.popleft() if self.errors else self._fetch()

    def _rebalance(self, what: str, partitions: tuple[Partition, ...]) -> None:
        self.callbacks[what](self, [TopicPartition(*partition) for partition in partitions])
        self._answer_commits()
        for partition in partitions if what == "revoke" else ():
            self.positions.pop(partition, None)

    def _fetch(self) -> Message | None:
        for partition in list(self.positions):
            if partition in self.paused or partition in self.bus.deaf:
                continue
            log, begin = self.bus.logs.get(partition, []), self.bus.begins.get(partition, 0)
            position = max(begin, self.positions[partition])
            if position > len(log):  # out of range
                position = begin
            while position < len(log) and (partition, position) not in self.bus.unfetchable:
                value = log[position]
                position += 1
                if value is not None:
                    self.positions[partition] = position
                    self.positions[partition] = self.positions.pop(partition)  # the others come first
                    return make_message(partition, position - 1, Entry(value, timestamp_ms=1000))
            self.positions[partition] = position
            if position == len(log) and self.ends.get(partition) != position:
                self.ends[partition] = position
                end = KafkaError(KafkaError._PARTITION_EOF)
                return make_message(partition, position, None, end)
        return None

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        self.under_way.append(offsets)

    def _answer_commits(self) -> None:
        """Answer the commits that are under way."""
        while self.under_way and self.on_commit is not None:
            places, refusal = self.under_way.popleft(), self.bus.commit_refusal
            if refusal is None:
                with self.bus.lock:
                    self.bus.commits |= {(place.topic, place.partition): place for place in places}
            self.on_commit(None if refusal is None else KafkaError(refusal), places)

    def committed(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        if self.bus.commit_error is not None:
            raise make_failure(self.bus.commit_error)
        return [self.bus.commits.get((p.topic, p.partition), TopicPartition(p.topic, p.partition)) for p in places]

    def get_watermark_offsets(
        self, place: TopicPartition, timeout: float = 0.0, *, cached: bool = False
    ) -> tuple[int, int] | None:
        partition = place.topic, place.partition
        if partition in self.bus.leaderless and not cached:
            return None
        return self.bus.begins.get(partition, 0), len(self.bus.logs.get(partition, []))

    def consumer_group_metadata(self) -> object:
        return None

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        if self.bus.is_away:
            raise make_failure(KafkaError._TRANSPORT)
        partitions = {number: None for name, number in self.bus.logs if name == topic}
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=partitions)})

    def close(self) -> None:
        if self.callbacks and self.positions:
            self._rebalance("revoke", tuple(self.positions))
        self.positions = {}
        self.free()


class DoubleOutputs:
    def __init__(self, bus: DoubleBus) -> None:
        self.bus = bus

    def write_outputs(self, outputs: Sequence[Outgoing]) -> None:
        assert self.bus.goes_on.wait(PATIENCE_S)
        if self.bus.is_away:
            raise make_failure(KafkaError._TRANSPORT)
        with self.bus.lock:
            self.bus.written += outputs


class DoubleTransactions:
    def __init__(self, bus: DoubleBus) -> None:
        self.bus, self.slowness = bus, bus.pace.slowness

    def is_late(self, raised: KafkaException) -> bool:
        return False

    def clear_doubt(self, timeout_s: float = 0.0) -> bool:
        return False

    def run_transaction(self, outputs: Sequence[Outgoing], offsets: list[TopicPartition], membership: object) -> None:
        assert self.bus.goes_on.wait(PATIENCE_S)
        if self.bus.is_away:
            raise make_failure(KafkaError._TRANSPORT)
        with self.bus.lock:
            self.bus.written += outputs
            self.bus.commits |= {(place.topic, place.partition): place for place in offsets}

    def close(self) -> None:
        """Nothing is open."""


def refusal(partition: Partition, code: int, offset: int = 0) -> Message:
    return make_message(partition, offset, None, KafkaError(code))
