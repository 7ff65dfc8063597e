"""The servers of a run, and how a process gets its member and its record at each level.

At the level `fast` these are the doubles of bus and record, over a link. At the others the product's own record and bus
run, and the doubles are those of their client libraries.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

import redis
from confluent_kafka import Consumer, Producer, TopicCollection
from confluent_kafka.admin import AdminClient
from obstore.store import MemoryStore

from penstock.bus.contract import Bus, Member, Outgoing, Publisher
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.streams.bus import StreamsBus
from penstock.bus.streams.client import decode_entry
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.names import Pipeline, WorkerKind, batch_lease_key, find_stages
from penstock.objects import ObjectStorage
from penstock.record import Record
from penstock.redis.client import connection_pool, redis_client
from penstock.testing.bus import MemoryBus
from sim.world.kafka_broker import BrokerBus, KafkaBroker
from sim.world.kafka_client import WorldAdmin, WorldConsumer, WorldProducer
from sim.world.network import Link, WorldMember, WorldPublisher, WorldRecord, WorldRecords
from sim.world.redis_server import RedisServer
from sim.world.runtime import World
from sim.world.ways import JUDGE, Ways

SETTINGS = BusSettings(reply_topics="*=replies.")
SIMULATED = ("penstock.", "fakeredis.", "redis.")
"""What the names of modules begin with that run by the world's clock and threads."""


class ReadBus(Protocol):
    """What the judge asks a bus."""

    def read_all(self, topic: str) -> list[Outgoing]:
        """Return every message now visible in a topic."""

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic are not settled."""


class Servers(ABC):
    """What a run needs of the servers of a level. One Redis is at each."""

    bus: ReadBus
    """The bus as the judge reads it."""
    record: Record
    """The record as the judge reads it."""
    judge = JUDGE
    """Who asks from outside of the world."""

    def __init__(self, world: World, pipeline: Pipeline, ways: Ways) -> None:
        self.world, self.pipeline, self.ways = world, pipeline, ways

    def list_doubles(self) -> list[tuple[object, object]]:
        """Return what stands in the place of what of the product while the run lasts."""
        return [(connection_pool, self._connect)]

    def _connect(self, url: str, **options: Any) -> redis.ConnectionPool:
        return self._redis.connection_pool(url, **options)

    def start(self) -> None:
        """Start the servers, after the doubles were installed."""
        self._redis = RedisServer(self.world, self.ways.find_link)

    @abstractmethod
    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group."""

    @abstractmethod
    def open_record(self, who: str, settings: RecordSettings) -> Record:
        """Return a process's way to the record."""

    @abstractmethod
    def open_publisher(self, who: str) -> Publisher:
        """Return a client's way to the bus."""

    def find_addresses(self, who: str) -> Addresses:
        """Return where a process finds Redis; a bus in memory is found by the process that runs."""
        return Addresses(stream_url=_make_url(who, "redis"), pipeline=self.pipeline.name)

    @abstractmethod
    def ask(self, who: str) -> None:
        """Ask all servers. Raise what the product raises where one does not answer."""

    @abstractmethod
    def rebalance(self, stage: WorkerKind, name: str) -> None:
        """Let the bus give what a member holds to others."""

    def note_death(self, stage: WorkerKind, name: str) -> Callable[[], None]:
        """Return what the bus does when it notices that a process was killed."""
        return lambda: None

    def delete_messages(self, chance: Random) -> list[str]:
        """Delete the first requests of a topic, whether they were read or not, and return their ids. Some levels have
        servers that cannot.
        """
        return []

    def forget(self, ended: Iterable[str]) -> None:
        """Forget what is forgotten while a pipeline is off for a week: the records of requests that have ended, if they
        are in Redis.
        """
        for one in ended:
            self._ask_redis().delete(self.pipeline.record_key(one), self.pipeline.log_key(one))

    def delete_keys(self, *keys: str) -> None:
        """Let Redis lose some keys."""
        self._ask_redis().delete(*keys)

    def count_lost(self) -> int:
        """Return how many messages Redis counts as lost."""
        return sum(map(int, self._ask_redis().hvals(self.pipeline.lost_key)))

    def _ask_redis(self) -> Any:
        return redis_client(_make_url(self.judge, "redis"))

    def create_reply_topics(self, topics: Sequence[str]) -> None:
        """Create topics that hold replies. Not all levels can."""
        raise NotImplementedError

    def close_or_open(self, topic: str) -> None:
        """Let a topic take no more replies, or take them again, of which nobody is told."""
        raise NotImplementedError

    def read_replies(self, topic: str) -> list[Outgoing]:
        """Return the replies in a topic."""
        raise NotImplementedError

    @abstractmethod
    def list_left(self) -> list[str]:
        """Return what the servers keep of requests that should be gone when all are answered."""

    def list_breaches(self) -> list[str]:
        """Return what the record's epochs forbid."""
        return self._redis.watch.breaches


class MemoryServers(Servers):
    """The servers of the level `fast`: doubles of bus and record are given to a worker, all other keys are in Redis."""

    def start(self) -> None:
        """Create the topics."""
        super().start()
        self.bus: MemoryBus = MemoryBus(self.pipeline)
        self.records = WorldRecords(self.world)
        self.keys: Any = redis_client(_make_url(self.judge, "redis"))
        """All keys but the records, as the judge asks for them."""
        self.objects = MemoryStore()
        """What gateways keep of files and batches."""
        self.bus.create_topics()
        self.record = WorldRecord(self.records, RecordSettings(), self._find(self.judge, "redis"))

    def _find(self, who: str, server: str) -> Link:
        found = self.ways.find_link(who, server)
        return Link.without_length(self.world) if found is None else found

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group."""
        link = self._find(name, "bus")
        return self.bus.add_members(stage, lambda kind: WorldMember(self.bus, kind, name, link))

    def open_record(self, who: str, settings: RecordSettings) -> Record:
        """Return a process's way to the record."""
        return WorldRecord(self.records, settings, self._find(who, "redis"), self.keys)

    def open_publisher(self, who: str) -> Publisher:
        """Return a client's way to the bus."""
        return WorldPublisher(self.bus, self._find(who, "bus"))

    def open_objects(self, url: str) -> ObjectStorage:
        """Return a process's way to the object store."""
        return ObjectStorage(self.objects)

    def create_reply_topics(self, topics: Sequence[str]) -> None:
        """Create topics that hold replies."""
        self.bus.reply_prefixes = SETTINGS.find_reply_prefixes()
        for topic in topics:
            self.bus.add_reply_topic(topic)
        self._closed = dict[str, Any]()

    def close_or_open(self, topic: str) -> None:
        """Take a topic away, or bring it back."""
        there, away = self.bus.topics, self._closed
        one, other = (there, away) if topic in there else (away, there)
        other[topic] = one.pop(topic)

    def read_replies(self, topic: str) -> list[Outgoing]:
        """Return the replies in a topic."""
        return [one.message for one in (self._closed | self.bus.topics)[topic].entries.values()]

    def ask(self, who: str) -> None:
        """Ask both servers."""
        for server in ("redis", "bus"):
            self._find(who, server).call(lambda: None)

    def rebalance(self, stage: WorkerKind, name: str) -> None:
        """Let others have what a worker's members hold."""
        for member in self.bus.list_members(name):
            member.give_back_all()

    def note_death(self, stage: WorkerKind, name: str) -> Callable[[], None]:
        """Return what gives back all that a dead worker's members hold, if no others have its name by then."""
        members = self.bus.list_members(name)

        def notice() -> None:
            for member in set(members).intersection(self.bus.list_members(name)):
                member.give_back_all()

        return notice

    def list_left(self) -> list[str]:
        """Return free requests, and leases of batches."""
        free = [f"{name} is free in {stage}" for stage, names in self.records.free.items() for name in names]
        return free + [f"{key.decode()} is left" for key in self.keys.keys(batch_lease_key("*"))]


class StreamsServers(Servers):
    """One Redis with record and bus, which are the product's own."""

    def start(self) -> None:
        """Create the topics."""
        super().start()
        self.record = self.open_record(self.judge, RecordSettings())
        bus = self._open_bus(self.judge)
        bus.create_topics()
        self.bus: ReadBus = bus

    def _open_bus(self, who: str) -> Bus:
        return StreamsBus(self.pipeline, _make_url(who, "bus"), SETTINGS)

    def create_reply_topics(self, topics: Sequence[str]) -> None:
        """Create streams."""
        for topic in topics:
            self._ask_redis().xgroup_create(topic, "requester", id="0", mkstream=True)

    def close_or_open(self, topic: str) -> None:
        """Give a stream another name, or its own again."""
        one, other = topic, f"closed {topic}"
        client = self._ask_redis()
        client.rename(*((one, other) if client.exists(one) else (other, one)))

    def read_replies(self, topic: str) -> list[Outgoing]:
        """Return the entries of a stream."""
        found = [entry for key in (topic, f"closed {topic}") for _, entry in self._ask_redis().xrange(key)]
        return [Outgoing(topic, *decode_entry(entry)) for entry in found]

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group."""
        return self._open_bus(name).join_group(stage, name)

    def open_record(self, who: str, settings: RecordSettings) -> Record:
        """Return a process's way to the record."""
        return Record(redis_client(_make_url(who, "redis")), self.pipeline, settings)

    def open_publisher(self, who: str) -> Publisher:
        """Return a client's way to the bus."""
        return self._open_bus(who).create_publisher()

    def ask(self, who: str) -> None:
        """Ask the server."""
        for server in ("redis", "bus"):
            redis_client(_make_url(who, server)).ping()

    def rebalance(self, stage: WorkerKind, name: str) -> None:
        """Do nothing: a consumer of a group keeps what it has while its member's key lasts."""

    def delete_messages(self, chance: Random) -> list[str]:
        """Delete the first entries of a stream."""
        topic, client = chance.choice(list(self.pipeline.input_topics("prefill").values())), self._ask_redis()
        entries = client.xrange(self.pipeline.stream_key(topic), count=chance.randint(1, 10))
        if entries:
            client.xdel(self.pipeline.stream_key(topic), *(entry_id for entry_id, _ in entries))
        return [fields[b"key"].decode() for _, fields in entries if b"key" in fields]

    def list_left(self) -> list[str]:
        """Return sets of held requests, though none is held."""
        left = self._ask_redis().keys(self.pipeline.held_key("*"))
        return [f"{key!r} is left" for key in left]


class KafkaServers(StreamsServers):
    """Kafka as the product's own bus, and one Redis with its record."""

    def list_doubles(self) -> list[tuple[object, object]]:
        """Return the pool of connections, and Kafka's clients."""
        return [
            *super().list_doubles(),
            (Consumer, lambda settings: WorldConsumer(self.world, self._broker, self._find(settings), settings)),
            (Producer, lambda settings: WorldProducer(self.world, self._broker, self._find(settings), settings)),
            (AdminClient, lambda settings: WorldAdmin(self.world, self._broker, self._find(settings))),
            (TopicCollection, lambda topics: topics),
        ]

    def _find(self, settings: Mapping[str, Any]) -> Link:
        found = self.ways.find_link(settings["bootstrap.servers"], "bus")
        assert found is not None, "the judge has no client"
        return found

    def start(self) -> None:
        """Create the topics."""
        Servers.start(self)
        self.record = self.open_record(self.judge, RecordSettings())
        count = BusSettings().partitions
        self._broker = KafkaBroker(self.world, dict.fromkeys(self.pipeline.all_topics(), count))
        self._broker.full_until_s = lambda: self.ways.full_until_s
        self.bus = BrokerBus(self.pipeline, self._broker)

    def create_own_topics(self, tenant: str) -> None:
        """Create a tenant's own topics, with as many partitions as all others have."""
        count = BusSettings().partitions
        self._broker.create_topics(dict.fromkeys(self.pipeline.list_own_topics(tenant), count))

    def _open_bus(self, who: str) -> Bus:
        return KafkaBus(self.pipeline, who, SETTINGS, redis_url=_make_url(who, "redis"))

    def create_reply_topics(self, topics: Sequence[str]) -> None:
        """Create topics of one partition."""
        self._broker.create_topics(dict.fromkeys(topics, 1))

    def close_or_open(self, topic: str) -> None:
        """Let the brokers refuse what is written to a topic, or take it again."""
        self._broker.refused ^= {topic}

    def read_replies(self, topic: str) -> list[Outgoing]:
        """Return the replies in a topic."""
        return self.bus.read_all(topic)

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group."""
        found = self.ways.find_link(name, "bus")
        if found is not None:
            self._broker.stands_until_s = found.stands_until_s
        return super().join_group(stage, name)

    def ask(self, who: str) -> None:
        """Ask both servers."""
        redis_client(_make_url(who, "redis")).ping()
        self._find({"bootstrap.servers": who}).call(lambda: None)

    def delete_messages(self, chance: Random) -> list[str]:
        """Delete the first messages of a partition, as retention does."""
        topic = chance.choice(list(self.pipeline.input_topics("prefill").values()))
        partition = topic, chance.randrange(self._broker.topics[topic])
        begin, end = self._broker.begins[partition], self._broker.find_stable_end(partition)
        gone = self._broker.delete_records(partition, chance.randint(begin, end))
        return [entry.key.decode() for entry in gone if entry.key is not None]

    def forget(self, ended: Iterable[str]) -> None:
        """Forget records, and what groups have committed that have no members."""
        super().forget(ended)
        self._broker.forget_commits()

    def rebalance(self, stage: WorkerKind, name: str) -> None:
        """Let the group lose a member, as if its time were over, and elect new leaders, as if a broker had ended."""
        self._broker.elect_leaders()
        for one in find_stages(stage):
            self._broker.fence(self.pipeline.consumer_group(one), name)


def _make_url(who: str, server: str) -> str:
    return f"redis://{who}.{server}"


LEVELS: dict[str, Any] = {"fast": MemoryServers, "streams": StreamsServers, "kafka": KafkaServers}
"""The servers of each level."""
