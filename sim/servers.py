"""Real servers for the tests, each started when the first test asks for it, and shared."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from penstock.errors import DependencyMissing

T = TypeVar("T")
S = TypeVar("S", bound="Server")


class Server(Protocol):
    """A server that tests start and stop."""

    def start(self) -> object:
        """Return once it answers."""

    def stop(self) -> None:
        """End it."""


def serve_address(server: AbstractContextManager[str]) -> Iterator[str]:
    """Yield the server's address. Without one the test is skipped; in CI it fails."""
    address = start_or_skip(server.__enter__)
    try:
        yield address
    finally:
        server.__exit__(None, None, None)


@contextmanager
def share_server(directory: Path, server: AbstractContextManager[str]) -> Iterator[str]:
    """Yield the address of a server that all processes which run tests share.

    The first process that asks for it starts it, and stops it when no other uses it. `directory` belongs to these
    processes alone. Locks on files say who starts or stops it and who uses it: they end with the process that has them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "starting").open("w") as starting, (directory / "using").open("w") as using:
        fcntl.flock(starting, fcntl.LOCK_EX)
        known = directory / "address"
        if known.exists():
            fcntl.flock(using, fcntl.LOCK_SH)
            fcntl.flock(starting, fcntl.LOCK_UN)
            yield known.read_text()
            return
        with server as address:
            known.write_text(address)
            fcntl.flock(starting, fcntl.LOCK_UN)
            try:
                yield address
            finally:
                fcntl.flock(starting, fcntl.LOCK_EX)  # who asks from now on waits, and starts another
                fcntl.flock(using, fcntl.LOCK_EX)
                known.unlink()


def start_or_skip(start: Callable[[], T]) -> T:
    """Return what `start` returns. A missing dependency skips the test, and in CI fails it."""
    try:
        return start()
    except DependencyMissing as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing).splitlines()[0])


def serve_server(server: S) -> Iterator[S]:
    """Start a server, yield it, and stop it afterwards. Without it the test is skipped; in CI it fails."""
    try:
        start_or_skip(server.start)
        yield server
    finally:
        server.stop()
