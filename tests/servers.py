"""Real servers for the tests, each started when the first test asks for it and shared by the session."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest

from penstock.errors import DependencyMissing

T = TypeVar("T")


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
