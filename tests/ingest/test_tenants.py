"""Keys: hashed at rest, revoked everywhere within a second, and the command that makes them."""

import json
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.settings import AdmissionSettings
from penstock.errors import BusUnavailable, SettingsError
from penstock.ingest import keys
from penstock.ingest.errors import ApiError
from penstock.ingest.keys import FileKeys, KeyBook, RedisKeys, open_key_source, read_book_file, write_book_file
from penstock.ingest.tenants import Caller, Keyring, TenantEntry, make_key
from penstock.local.processes import find_free_port
from penstock.local.valkey import ValkeyServer
from penstock.names import KEYS_KEY, TENANTS_KEY
from penstock.redis.client import async_redis_client, redis_client
from tests.commands import Terminal

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Keys are of a whole server, so these tests have their own."""
    with ValkeyServer(tmp_path_factory.mktemp("keys")) as server:
        yield server.url


@pytest.fixture(params=["file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_redis: str) -> str:
    """Where keys are, as the setting says it."""
    monkeypatch.setattr(keys, "CACHE_TTL_S", 0.0)
    found = "redis" if request.param == "redis" else str(tmp_path / "deep" / "keys.json")
    monkeypatch.setenv("PENSTOCK_GATEWAY_KEYS", found)
    with redis_client(own_redis) as client:
        client.delete(KEYS_KEY, TENANTS_KEY)
    return found


@pytest.fixture
async def ring(place: str, own_redis: str) -> AsyncIterator[Callable[[], Keyring]]:
    client = async_redis_client(own_redis)
    yield lambda: Keyring(open_key_source(AdmissionSettings(keys=place), "0.0.0.0", client))
    await client.aclose()


@pytest.fixture
def command(terminal: Terminal, place: str, own_redis: str) -> Callable[..., str]:
    """`penstock keys`, for the keys that are there; it must end with `code`."""

    def run(*arguments: str, code: int = 0) -> str:
        done = terminal("keys", *arguments, PENSTOCK_STREAM_URL=own_redis)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout.strip()

    return run


async def refused(gate: Keyring, header: str | None) -> bool:
    with pytest.raises(ApiError) as raised:
        await gate.authenticate_caller(header)
    return (raised.value.status, raised.value.code) == (401, "invalid_api_key")


async def test_made_listed_used_and_revoked(ring: Callable[[], Keyring], command: Callable[..., str]) -> None:
    key, second = command("create", "acme"), command("create", "acme")
    command("tenant", "acme", "--weight", "3", "--class", "batch", "--requests-per-min", "60", "--tokens-per-min", "9")
    command("tenant", "acme", "--tokens-per-min", "0", "--max-request-tokens", "50")
    gate = ring()
    key_id = key.split("_")[1]
    expected = Caller("acme", ("batch",), 3.0, 60, tokens_per_min=None, max_request_tokens=50, key=key_id)
    assert await gate.authenticate_caller(f"Bearer {key}") == expected
    assert await gate.authenticate_caller(f"bearer  {key} ") == expected
    listed = json.loads(command("list", "--json"))
    assert sorted(listed["keys"]) == sorted(one.split("_")[1] for one in (key, second))
    assert "hash" not in json.dumps(listed)
    assert "psk_" in command("list")
    command("revoke", key)
    assert await refused(gate, f"Bearer {key}")
    assert (await gate.authenticate_caller(f"Bearer {second}")).tenant == "acme"
    command("revoke", key, code=1)


async def test_a_tenant_stays_where_the_command_says(ring: Callable[[], Keyring], command: Callable[..., str]) -> None:
    key = command("create", "acme")
    assert "stays" not in command("list")
    for given, regions, topics, listed in (
        (("--region", "eu", "--region", "ch"), ("eu", "ch"), "shared", "eu, ch"),
        (("--weight", "2"), ("eu", "ch"), "shared", "eu, ch"),
        (("--region", "", "--topics", "own"), (), "own", "its region"),
    ):
        command("tenant", "acme", *given)
        caller = await ring().authenticate_caller(f"Bearer {key}")
        assert (caller.regions, caller.topics, caller.has_own_topics) == (regions, topics, True)
        assert listed in command("list")
    command("tenant", "acme", "--topics", "shared")
    assert not (await ring().authenticate_caller(f"Bearer {key}")).has_own_topics
    command("tenant", "acme", "--region", "EU", code=2)
    command("tenant", "acme", "--topics", "mine", code=2)


async def test_the_secret_is_nowhere_at_rest(place: str, own_redis: str, command: Callable[..., str]) -> None:
    secret = command("create", "acme").split("_", 2)[2]
    if place == "redis":
        with redis_client(own_redis) as client:
            kept = json.dumps([raw.decode() for raw in client.hvals(KEYS_KEY)])
    else:
        kept = Path(place).read_text()
        assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
    assert "hash" in kept
    assert secret not in kept


async def test_a_key_of_another_secret_or_shape_is_none(
    ring: Callable[[], Keyring], command: Callable[..., str]
) -> None:
    key, other = command("create", "acme"), command("create", "b")
    mixed = key[:17] + other[17:]
    gate = ring()
    for header in (None, "", "Bearer", key, f"Basic {key}", f"Bearer {mixed}", f"Bearer {key}\n{other}", "Bearer ä"):
        assert await refused(gate, header)


async def test_a_file_that_broke_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "CACHE_TTL_S", 0.0)
    key, key_id, entry = make_key("acme")
    path = tmp_path / "keys.json"
    write_book_file(path, KeyBook(keys={key_id: entry}))
    ring = Keyring(FileKeys(path))
    path.write_text("{")
    assert (await ring.authenticate_caller(f"Bearer {key}")).tenant == "acme"
    path.unlink()
    assert (await ring.authenticate_caller(f"Bearer {key}")).tenant == "acme"
    write_book_file(path, KeyBook(tenants={"acme": TenantEntry(weight=2)}, keys={key_id: entry}))
    assert (await ring.authenticate_caller(f"Bearer {key}")).weight == 2
    with pytest.raises(SettingsError):
        FileKeys(tmp_path / "none.json")


def test_toml_is_read_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[tenants.acme]\nweight = 3\n[keys.0123456789ab]\ntenant = "acme"\nhash = "' + "a" * 64 + '"\n')
    book = read_book_file(path)
    assert (book.tenants["acme"].weight, book.keys["0123456789ab"].tenant) == (3, "acme")
    with pytest.raises(SettingsError, match="by hand"):
        write_book_file(path, book)
    path.write_text("[tenants.acme]\nwieght = 3\n")
    with pytest.raises(SettingsError, match="wieght"):
        read_book_file(path)


async def test_open_only_where_nobody_else_can_come(own_redis: str) -> None:
    client = async_redis_client(own_redis)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert open_key_source(AdmissionSettings(), host, client) is None
    assert open_key_source(AdmissionSettings(keys="open"), "0.0.0.0", client) is None
    for host in ("0.0.0.0", "::", "10.0.0.7", "gateway.example"):
        with pytest.raises(SettingsError, match="PENSTOCK_GATEWAY_KEYS"):
            open_key_source(AdmissionSettings(), host, client)
    assert await Keyring(None).authenticate_caller("Bearer anything") == Caller("default")
    await client.aclose()


async def test_keys_in_a_redis_that_is_away() -> None:
    client = async_redis_client(f"redis://127.0.0.1:{find_free_port()}/0")
    with pytest.raises(BusUnavailable):
        await Keyring(RedisKeys(client)).authenticate_caller(f"Bearer {make_key('acme')[0]}")
    await client.aclose()
