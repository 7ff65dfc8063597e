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
    """What tests start and stop."""

    def start(self) -> object:
        """Return once it answers."""

    def stop(self) -> None:
        """End it."""


def served(server: AbstractContextManager[str]) -> Iterator[str]:
    """Yield the server's address. Without one the test is skipped; in CI it fails."""
    address = started(server.__enter__)
    try:
        yield address
    finally:
        server.__exit__(None, None, None)


def started(start: Callable[[], T]) -> T:
    """What `start` returns; a missing dependency skips the test, and in CI fails it."""
    try:
        return start()
    except DependencyMissing as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing).splitlines()[0])


def served_by(server: S) -> Iterator[S]:
    """Yield the server itself, started, and stop it afterwards. As `served`."""
    try:
        started(server.start)
        yield server
    finally:
        server.stop()
