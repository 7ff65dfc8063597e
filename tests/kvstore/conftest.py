"""Tiers, each empty as far as a test can tell: keys are random."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.tiers.contract import Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier
from penstock.local.valkey import ValkeyServer
from tests.servers import served


@pytest.fixture(params=["memory", "redis"])
def tier(request: pytest.FixtureRequest) -> Tier:
    """Every kind of tier, one after the other."""
    if request.param == "memory":
        return MemoryTier(2**20)
    return RedisTier(request.getfixturevalue("redis_url"), keep_s=60)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that a test may kill and set as it likes."""
    server = ValkeyServer(tmp_path, appendonly=False)
    for _ in served(_url(server)):
        yield server


@contextlib.contextmanager
def _url(server: ValkeyServer) -> Iterator[str]:
    with server:
        yield server.url


@pytest.fixture
def new_key() -> Callable[[], bytes]:
    """Makes keys that nobody else uses."""
    return lambda: uuid.uuid4().bytes * 2
