"""Redis servers for tests: the one that is named or started, and one with a replica and a Sentinel."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import redis

from penstock.local.valkey import ValkeyServer, find_binary
from penstock.redis.sentinel import find_masters
from penstock.waiting import wait_until
from sim.waiting import PATIENCE_S


class ValkeySentinel(ValkeyServer):
    """A Sentinel with a quorum of one, for a single machine."""

    def __init__(self, directory: Path, service: str, master: int, down_after_s: float) -> None:
        super().__init__(directory)
        self._service, self._master, self._down_after_s = service, master, down_after_s

    def _build_command(self) -> list[str]:
        config = self.directory / "sentinel.conf"
        if not config.exists():  # the Sentinel writes its state into it
            lines = [
                "bind 127.0.0.1",
                f"port {self.port}",
                f"sentinel monitor {self._service} 127.0.0.1 {self._master} 1",
                f"sentinel down-after-milliseconds {self._service} {round(self._down_after_s * 1000)}",
                f"sentinel failover-timeout {self._service} 10000",
            ]
            config.write_text("".join(f"{line}\n" for line in lines), "utf-8", "surrogateescape")
        return [str(find_binary()), str(config), "--sentinel"]


class ReplicatedValkey:
    """A master, its replica, and a Sentinel that makes the replica the master when the master fails."""

    SERVICE = "penstock"

    def __init__(
        self, directory: Path, down_after_s: float = 1.0, servers: Mapping[int, ValkeyServer] | None = None
    ) -> None:
        """`servers`: others than two, by the port at which clients reach them; the first one is the master."""
        if servers is None:
            first = ValkeyServer(directory / "first")
            second = ValkeyServer(directory / "second", replica_of=first.port)
            servers = {server.port: server for server in (first, second)}
        self.servers = servers
        """The servers, by the port that the Sentinel names."""
        self.sentinel = ValkeySentinel(directory / "sentinel", self.SERVICE, next(iter(servers)), down_after_s)

    @property
    def url(self) -> str:
        """The url of the Sentinel, for clients."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{self.SERVICE}/0"

    @property
    def master(self) -> ValkeyServer:
        """The server that the Sentinel names."""
        (place,) = find_masters(self.url).values()
        assert isinstance(place, tuple), f"the Sentinel says {place}"
        return self.servers[place[1]]

    def start(self) -> Self:
        """Start, and wait until the replica could take over. Raises `DependencyMissing`."""
        for server in self.servers.values():
            server.start()
        with redis.Redis(port=self.sentinel._master) as master:  # noqa: SLF001 - it is ours

            def is_copied() -> bool:
                replication: Any = master.info("replication")
                replicas = [replication.get(f"slave{number}", {}) for number in range(len(self.servers) - 1)]
                return all("online" in replica.values() for replica in replicas)

            wait_until(is_copied, 30.0, "the master has its replicas")
        self.sentinel.start()
        self.wait_until_replicated()
        return self

    def wait_until_replicated(self) -> None:
        """Wait until the Sentinel knows all replicas, up to date."""
        with redis.Redis(port=self.sentinel.port, protocol=2) as sentinel:

            def is_known() -> bool:
                replicas: Any = sentinel.sentinel_slaves(self.SERVICE)
                linked: list[bool] = [one["flags"] == "slave" and one["master-link-status"] == "ok" for one in replicas]
                return sum(linked) >= len(self.servers) - 1

            wait_until(is_known, PATIENCE_S, "the Sentinel knows the replicas")

    def stop(self) -> None:
        """Stop the Sentinel, then the servers."""
        for server in (self.sentinel, *self.servers.values()):
            server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def find_or_start_redis(directory: Path) -> Iterator[str]:
    """Yield the url of `PENSTOCK_STREAM_URL`, else that of a `ValkeyServer`. Raises `DependencyMissing`."""
    if given := os.environ.get("PENSTOCK_STREAM_URL", ""):
        yield given
    else:
        with ValkeyServer(directory) as server:
            yield server.url
