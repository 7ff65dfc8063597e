"""Every kind of tier, each at an empty place; servers of one's own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from penstock.kvstore.block import BlockFormat
from penstock.kvstore.tiers.contract import Tier
from penstock.local.valkey import ValkeyServer
from sim.servers import serve_server
from tests.kvstore.places import Change, DiskPlace, Place, RedisPlace, SharedPlace

MakeTier = Callable[[BlockFormat, int], Tier]
Damage = Callable[[Tier, bytes, Change], None]


@pytest.fixture(scope="session")
def kv_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The url of a server for blocks alone; each test that uses it finds it empty."""
    for server in serve_server(ValkeyServer(tmp_path_factory.mktemp("kv"), appendonly=False)):
        yield server.url


@pytest.fixture(params=["shared", "disk", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place for tiers of every kind, one after the other."""
    if request.param == "shared":
        return SharedPlace(tmp_path)
    if request.param == "disk":
        return DiskPlace(tmp_path / "disk", tmp_path)
    return RedisPlace(request.getfixturevalue("kv_url"))


@pytest.fixture
def make_tier(place: Place, exits: ExitStack) -> MakeTier:
    """Opens tiers, all at the same place; closes them at the end."""
    return lambda form, budget_bytes: exits.enter_context(closing(place.open(form, budget_bytes)))


@pytest.fixture
def damage(place: Place) -> Damage:
    """Changes a stored block behind the tier's back."""
    return place.damage


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server that a test may kill and set as it likes."""
    yield from serve_server(ValkeyServer(tmp_path / "it's 50%", appendonly=False))
