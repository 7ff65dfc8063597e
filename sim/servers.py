"""Real servers for the tests, each started when the first test asks for it and shared by the session."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
