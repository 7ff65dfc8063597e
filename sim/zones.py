"""One Kafka cluster and one Redis over three zones, with relays between the zones that hand all on some time later.

A zone has a broker, which is also a controller, and a Redis server. Each broker listens on one port for the clients of
each zone, and one for the other brokers. It tells its own zone's clients where it is, and all others where the relay in
between is. So whoever knows the addresses for its zone goes through the relays, also to brokers that it hears of later.
The controllers' votes alone go straight: no request waits for them.

Redis is reached through a relay from everywhere, so workers are as far from it as those of the other zones are.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.local.processes import find_free_port
from penstock.local.valkey import ValkeyServer
from penstock.ops.copies import RACK_SELECTOR
from sim.chaos.proxy import Proxy
from sim.chaos.system import Servers
from sim.kafka_server import SHORT_TIMEOUTS, KafkaCluster, KafkaServer, Quorum
from sim.redis_servers import ReplicatedValkey
from sim.waiting import PATIENCE_S, wait_for

ZONES = (1, 2, 3)
ZONE_DELAY_S = 0.005
"""How long all is under way from one zone to another."""
COPY_WAIT_MS = 20
"""How long a broker's question for new messages waits at the leader: a copy knows so much later what readers may have.
Brokers have 500 by default."""


def name_rack(zone: int) -> str:
    """Return the name by which brokers and clients know a zone."""
    return f"zone-{zone}"


class ZonedCluster(KafkaCluster):
    """A broker in each zone, with its data below `directory`."""

    def __init__(
        self,
        directory: Path,
        delay_s: float = ZONE_DELAY_S,
        *,
        timeouts: Mapping[str, str] = SHORT_TIMEOUTS,
        copy_wait_ms: int = COPY_WAIT_MS,
    ) -> None:
        self._copy_wait_ms = copy_wait_ms
        quorum = Quorum.create_new(len(ZONES))
        self.relays = {(there, here): Proxy(find_free_port()) for here in ZONES for there in ZONES if there != here}
        """The relays, by the zone of clients and that of the broker."""
        self._between = {zone: Proxy(find_free_port()) for zone in ZONES}
        """The relays to each broker, for the other brokers."""
        for relay in self._list_relays():
            relay.delay_both_ways(delay_s)
        self.servers = {zone: self._make_server(directory, zone, quorum, timeouts) for zone in ZONES}

    def list_addresses(self, zone: int) -> str:
        """Return the addresses of all brokers for clients of a zone, the zone's own broker first."""
        relays = [self.relays[zone, other].port for other in ZONES if other != zone]
        return ",".join(f"127.0.0.1:{port}" for port in (self.servers[zone].port, *relays))

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers for clients of the first zone."""
        return self.list_addresses(ZONES[0])

    def are_copies_in_sync(self) -> bool:
        """Return whether each partition has all its copies in sync."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        with contextlib.suppress(KafkaException):
            topics = admin.list_topics(timeout=PATIENCE_S).topics.values()
            return all(len(one.isrs) == len(one.replicas) for topic in topics for one in topic.partitions.values())
        return False

    def start(self) -> Self:
        """Start the relays, then the brokers."""
        for relay in self._list_relays():
            relay.__enter__()
        return super().start()

    def stop(self) -> None:
        """Kill the brokers, then end the relays."""
        super().stop()
        for relay in self._list_relays():
            relay.__exit__(None, None, None)

    def _list_relays(self) -> list[Proxy]:
        return [*self.relays.values(), *self._between.values()]

    def _make_server(self, directory: Path, zone: int, quorum: Quorum, timeouts: Mapping[str, str]) -> KafkaServer:
        """Return a zone's broker. The port that it has for its own zone is the server's own."""
        own = find_free_port()
        listens, tells = {f"ZONE{zone}": own}, {f"ZONE{zone}": own}
        for name, relay in {
            **{f"ZONE{there}": self.relays[there, zone] for there in ZONES if there != zone},
            "BROKERS": self._between[zone],
        }.items():
            listens[name], tells[name] = relay.target_port, relay.port
        return KafkaServer(
            directory / f"broker-{zone}", own, node=zone, quorum=quorum, timeouts=timeouts,
            more={
                "broker.rack": name_rack(zone),
                "replica.selector.class": RACK_SELECTOR,
                "replica.fetch.wait.max.ms": str(self._copy_wait_ms),
                "listeners": ",".join(
                    [*_format_listeners(listens), f"CONTROLLER://127.0.0.1:{quorum.ports[zone]}"]
                ),
                "advertised.listeners": ",".join(_format_listeners(tells)),
                "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in (*listens, "CONTROLLER")),
                "inter.broker.listener.name": "BROKERS",
            },
        )  # fmt: skip


def _format_listeners(ports: Mapping[str, int]) -> list[str]:
    return [f"{name}://127.0.0.1:{port}" for name, port in ports.items()]


class _RelayedValkey(ValkeyServer):
    """A server of a zone, which takes writes while one of its replicas follows."""

    def __init__(self, directory: Path, relay: Proxy, replica_of: int | None) -> None:
        super().__init__(directory, relay.target_port, replica_of=replica_of)
        self._announced = relay.port

    def _build_command(self) -> list[str]:
        more = {"replica-announce-port": self._announced, "min-replicas-to-write": 1, "min-replicas-max-lag": 10}
        return [
            *super()._build_command(),
            *(word for name, value in more.items() for word in (f"--{name}", str(value))),
        ]


class ZonedServers(Servers):
    """The servers of three zones. A zone can be lost as a whole; the Sentinel, of one for three, lies in none."""

    is_replicated = True

    def __init__(
        self,
        directory: Path,
        timeouts: Mapping[str, str],
        delay_s: float = ZONE_DELAY_S,
        copy_wait_ms: int = COPY_WAIT_MS,
    ) -> None:
        self.cluster = ZonedCluster(directory / "kafka", delay_s, timeouts=timeouts, copy_wait_ms=copy_wait_ms)
        self._relays = {zone: Proxy(find_free_port()) for zone in ZONES}
        for relay in self._relays.values():
            relay.delay_both_ways(delay_s)
        first = self._relays[ZONES[0]].port
        self._redis_of = {
            zone: _RelayedValkey(directory / f"redis-{zone}", relay, None if relay.port == first else first)
            for zone, relay in self._relays.items()
        }
        servers = {relay.port: self._redis_of[zone] for zone, relay in self._relays.items()}
        self.replicated = ReplicatedValkey(directory / "redis", servers=servers)
        self.redis = self._redis_of[ZONES[0]]
        self.kafka, self.kafka_proxy = None, None
        self.bootstrap = self.cluster.bootstrap

    @property
    def stream_url(self) -> str:
        """The URL of the stream Redis."""
        return self.replicated.url

    def find_zone(self, worker: str) -> int:
        """Return the zone of a worker, by the number in its name."""
        return ZONES[int(worker.rpartition("-")[2]) % len(ZONES)]

    def build_environment(self, worker: str) -> dict[str, str]:
        """Return the settings of a worker that are its zone's."""
        zone = self.find_zone(worker)
        return {"PENSTOCK_KAFKA": self.cluster.list_addresses(zone), "PENSTOCK_BUS_RACK": name_rack(zone)}

    def lose_zone(self, zone: int, for_s: float) -> None:
        """Kill a zone's broker and its Redis server, and start them again after `for_s`; wait until both follow."""
        broker, server = self.cluster.servers[zone], self._redis_of[zone]
        was_master = self.replicated.master is server
        broker.kill()
        server.kill()
        if was_master:
            wait_for(lambda: self.replicated.master is not server, "another zone has the master")
        time.sleep(for_s)
        server.start()
        broker.start()
        self.replicated.wait_until_replicated()
        wait_for(self.cluster.are_copies_in_sync, "each partition has all its copies in sync", every_s=0.5)

    def __enter__(self) -> Self:
        for relay in self._relays.values():
            relay.__enter__()
        self.replicated.start()
        self.cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()
        self.replicated.stop()
        for relay in self._relays.values():
            relay.__exit__(None, None, None)
