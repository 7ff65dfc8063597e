"""Real servers for the tests, each started when the first test asks for it and shared by the session."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from penstock.errors import DependencyMissing


def served(server: AbstractContextManager[str]) -> Iterator[str]:
    """Yield the server's address. Without one the test is skipped; in CI it fails."""
    try:
        address = server.__enter__()
    except DependencyMissing as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing).splitlines()[0])
    try:
        yield address
    finally:
        server.__exit__(None, None, None)
