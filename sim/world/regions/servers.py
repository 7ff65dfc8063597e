"""The servers of two regions, each a Kafka and a Redis of its own. Whose a process is, its name begins with."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from random import Random
from typing import Any
from urllib.parse import urlsplit

from confluent_kafka import TopicCollection
from obstore.store import MemoryStore

from penstock.bus.contract import Member, Outgoing, Publisher
from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings
from penstock.names import Pipeline, WorkerKind
from penstock.objects import ObjectStorage
from penstock.record import Record
from sim.world.kafka_broker import KafkaBroker
from sim.world.network import Link
from sim.world.runtime import World
from sim.world.servers import KafkaServers, Servers, StreamsServers
from sim.world.ways import JUDGE, Ways

HOME, PEER = "eu", "us"
REGIONS = (HOME, PEER)


def find_region(who: str) -> str:
    """Return the region of a process, a client or a judge."""
    return who.partition("-")[0]


class RegionWays(Ways):
    """The ways within regions and between them. The servers of a region that is away answer nobody."""

    def __init__(self, world: World, chance: Random, loss: float, delay_s: float) -> None:
        super().__init__(world, chance, loss, delay_s)
        self.pauses = {f"{region}.{server}": 0.0 for region in REGIONS for server in ("redis", "bus")}
        self.away_until_s = dict.fromkeys(REGIONS, 0.0)
        self.cut_until_s = {(PEER, HOME): 0.0, (HOME, PEER): 0.0}
        """By region that connects, and region to which it connects."""
        self.between_s = 0.04
        """How long a message takes from one region to the other."""

    def is_away(self, region: str) -> bool:
        """Return whether the servers of a region are away."""
        return self.away_until_s[region] > self._world.now_s

    def is_cut(self, one: str, other: str) -> bool:
        """Return whether a region cannot connect to another one."""
        return self.cut_until_s.get((one, other), 0.0) > self._world.now_s or self.is_away(other)

    def end_mishaps(self) -> None:
        """Let all regions be there, and able to talk to each other."""
        self.is_calm = True
        self.away_until_s = dict.fromkeys(self.away_until_s, 0.0)
        self.cut_until_s = dict.fromkeys(self.cut_until_s, 0.0)

    def find_link(self, who: str, server: str) -> Link | None:
        """Return the way of a process or client to a server of its region; None for the judge of a region."""
        link, region = super().find_link(who, server), find_region(who)
        if link is not None:
            is_cut = link.is_cut
            link.is_cut = lambda: self.is_away(region) or is_cut()
            link.stands_until_s = lambda: self.pauses[f"{region}.{server}"]
        return link


class OneRegion(KafkaServers):
    """The servers of one region."""

    ways: RegionWays

    def __init__(self, world: World, pipeline: Pipeline, ways: RegionWays, region: str) -> None:
        super().__init__(world, pipeline, ways)
        self.region, self.judge = region, f"{region}-{JUDGE}"
        self.objects = MemoryStore()
        """What gateways keep of files and batches."""

    def start(self) -> None:
        """Create the topics."""
        super().start()
        ways, region = self.ways, self.region
        self.broker.stands_until_s = lambda: max(ways.pauses[f"{region}.bus"], ways.away_until_s[region])

    @property
    def broker(self) -> KafkaBroker:
        """The brokers, as the judge and the copying task see them."""
        return self._broker

    @property
    def keys(self) -> Any:
        """Redis, as the judge sees it."""
        return self._ask_redis()

    def find_addresses(self, who: str) -> Addresses:
        """Return where a process finds its servers."""
        return super().find_addresses(who).model_copy(update={"kafka": who})

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group."""
        return StreamsServers.join_group(self, stage, name)


class BothBuses:
    """Both regions' buses, as the judge reads them."""

    def __init__(self, parts: Mapping[str, OneRegion]) -> None:
        self._parts = parts

    def read_all(self, topic: str) -> list[Outgoing]:
        """Return every message now visible in a topic of either region."""
        return [message for part in self._parts.values() for message in part.bus.read_all(topic)]

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic are not settled."""
        return {
            f"{name}.{topic}": count
            for name, part in self._parts.items()
            for topic, count in part.bus.count_unsettled().items()
        }


class RegionServers(Servers):
    """The servers of both regions, each process at its own."""

    def __init__(self, world: World, pipeline: Pipeline, ways: RegionWays) -> None:
        super().__init__(world, pipeline, ways)
        self.parts = {region: OneRegion(world, pipeline, ways, region) for region in REGIONS}
        self.bus = BothBuses(self.parts)

    def of(self, who: str) -> OneRegion:
        """Return the servers of a process."""
        return self.parts[find_region(who)]

    def list_doubles(self) -> list[tuple[object, object]]:
        """Return what stands in the place of what of the product: each leads to the region of who connects."""
        doubles = {region: dict(part.list_doubles()) for region, part in self.parts.items()}

        def connect(original: object, given: Any, **options: Any) -> object:
            who = str(urlsplit(given).hostname) if isinstance(given, str) else given["bootstrap.servers"]
            made: Any = doubles[find_region(who)][original]
            return made(given, **options)

        found = doubles[HOME]
        topics = found.pop(TopicCollection)
        return [(TopicCollection, topics), *((one, partial(connect, one)) for one in found)]

    def start(self) -> None:
        """Start the servers of both, after the doubles were installed."""
        for part in self.parts.values():
            part.start()

    def create_own_topics(self, tenant: str) -> None:
        """Create a tenant's own topics in both regions."""
        for part in self.parts.values():
            part.create_own_topics(tenant)

    def find_addresses(self, who: str) -> Addresses:
        """Return where a process finds its servers."""
        return self.of(who).find_addresses(who)

    def join_group(self, stage: WorkerKind, name: str) -> Member:
        """Join a stage's group."""
        return self.of(name).join_group(stage, name)

    def open_record(self, who: str, settings: RecordSettings) -> Record:
        """Return a process's way to the record."""
        return self.of(who).open_record(who, settings)

    def open_publisher(self, who: str) -> Publisher:
        """Return a client's way to the bus."""
        return self.of(who).open_publisher(who)

    def open_objects(self, _: str) -> ObjectStorage:
        """Return the way of the process that runs to its region's object store."""
        assert self.world.current is not None, "only a process of the world has one"
        return ObjectStorage(self.of(self.world.current.process.name).objects)

    def ask(self, who: str) -> None:
        """Ask both servers."""
        self.of(who).ask(who)

    def rebalance(self, stage: WorkerKind, name: str) -> None:
        """Let others have what a worker's members hold."""
        self.of(name).rebalance(stage, name)

    def note_death(self, stage: WorkerKind, name: str) -> Callable[[], None]:
        """Return what the bus does when it notices that a process was killed."""
        return self.of(name).note_death(stage, name)

    def forget(self, ended: Iterable[str]) -> None:
        """Forget nothing: no region is off for a week."""

    def list_left(self) -> list[str]:
        """Return what the servers keep of requests that should be gone when all are answered."""
        return [f"{region}: {left}" for region, part in self.parts.items() for left in part.list_left()]

    def list_breaches(self) -> list[str]:
        """Return what the records' epochs forbid."""
        return [f"{region}: {told}" for region, part in self.parts.items() for told in part.list_breaches()]
