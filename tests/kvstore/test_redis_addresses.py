"""Ways to reach a Redis server, several of them, and which of them holds a block."""

import random
import shutil
import ssl
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import KVStoreError
from penstock.kvstore.block import BlockFormat, ReadRequest
from penstock.kvstore.tiers import server as redis_server
from penstock.kvstore.tiers.redis import RedisTier, RendezvousHash, url_identity
from penstock.local.valkey import ValkeyServer
from penstock.names import kv_key
from sim.chaos.proxy import Proxy
from tests.kvstore.blocks import FORM, PAYLOAD_BYTES, content, is_here, keys_of, new_names, put, read
from tests.kvstore.redis_checks import AMPLE, LARGE_FORM, STORED_BYTES, check_away, check_works
from tests.security.certificates import Authority


@pytest.fixture
def empty_url(kv_url: str) -> str:
    """A server that no other test uses meanwhile."""
    with redis.Redis.from_url(kv_url) as client:
        client.flushall()
    return kv_url


# Ways to reach one.


@pytest.mark.parametrize("form", [FORM, LARGE_FORM], ids=["small", "large"])
def test_a_unix_socket(own_server: ValkeyServer, form: BlockFormat) -> None:
    check_works(RedisTier.open(form, [own_server.unix_url], AMPLE, 60), form)


def test_damage_on_several_connections(own_server: ValkeyServer) -> None:
    """Through a unix socket large blocks come over several at once."""
    names = new_names(11)
    with redis.Redis.from_url(own_server.url) as client:
        tier = RedisTier.open(LARGE_FORM, [own_server.unix_url], AMPLE, 60)
        put(tier, names, LARGE_FORM)
        client.setrange(kv_key(names[2].hash), 1000, b"damaged")
        client.delete(kv_key(names[5].hash))
        client.set(kv_key(names[7].hash), b"")
        expected = [None if at in (2, 5, 7) else content(name, LARGE_FORM) for at, name in enumerate(names)]
        assert read(tier, names, LARGE_FORM) == expected
        assert (tier.counters.hits, tier.counters.misses, tier.counters.damaged) == (8, 3, 2)
        assert list(tier.list_entries()) == sorted(tier.list_entries(), key=lambda entry: entry.used_s)
        assert tier.check_integrity() == []
        tier.close()


@pytest.mark.proof
def test_a_password(own_server: ValkeyServer) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("requirepass", "open sesame")
    check_away(RedisTier.open(FORM, [own_server.url], AMPLE, 60))
    host = f"127.0.0.1:{own_server.port}/0"
    check_works(RedisTier.open(FORM, [f"redis://:open%20sesame@{host}"], AMPLE, 60))


@pytest.mark.proof
def test_tls(own_server: ValkeyServer, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    authority, context = Authority(tmp_path / "authority"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("server"))
    with Proxy(own_server.port, tls=context) as proxy:
        url, file = f"rediss://127.0.0.1:{proxy.port}/0", quote(str(authority.file))
        check_works(RedisTier.open(LARGE_FORM, [f"{url}?ssl_ca_certs={file}"], AMPLE, 60), LARGE_FORM)
        check_away(RedisTier.open(FORM, [url], AMPLE, 60))


# Several addresses.


@pytest.mark.proof
def test_several_addresses_share_the_blocks(empty_url: str, own_server: ValkeyServer) -> None:
    urls = [own_server.url, empty_url]
    tier, other = RedisTier.open(FORM, urls, AMPLE, 60), RedisTier.open(FORM, urls[::-1], AMPLE, 60)
    names = new_names(40)
    assert put(tier, names) == [True] * 40
    assert read(other, names) == [content(name) for name in names]
    tier.lease_blocks("a job", keys_of(names[:7]), 60)
    usage = other.read_usage()
    assert (usage.blocks, usage.bytes, usage.budget, usage.leased) == (40, 40 * STORED_BYTES, 2 * AMPLE, 7)
    assert {entry.key for entry in other.list_entries()} == set(keys_of(names))
    alone = [RedisTier.attach([url]).read_usage().blocks for url in urls]
    assert sum(alone) == 40
    assert min(alone) > 5
    other.release_leases("a job", keys_of(names))
    assert tier.check_integrity() == []
    assert tier.remove_blocks(keys_of(names[:20])) == 20
    tier.close()
    assert read(tier, names) == [None] * 40
    assert put(tier, names) == is_here(tier, names) == [False] * 40
    assert tier.remove_blocks(keys_of(names)) == tier.read_usage().blocks == len(list(tier.list_entries())) == 0
    other.close()


@pytest.mark.proof
def test_one_address_down_loses_its_share_only(empty_url: str, own_server: ValkeyServer) -> None:
    tier, names = RedisTier.open(FORM, [own_server.url, empty_url], AMPLE, 60), new_names(40)
    put(tier, names)
    here = {entry.key for entry in RedisTier.attach([empty_url]).list_entries()}
    own_server.kill()
    expected = [content(name) if name.hash in here else None for name in names]
    assert read(tier, names) == expected
    assert tier.counters.errors == 1
    assert is_here(tier, names) == [name.hash in here for name in names]
    assert put(tier, names) == [name.hash in here for name in names]
    assert tier.read_usage().blocks == len(here)
    tier.close()


def test_nothing_is_received_after_a_get_that_raised(empty_url: str, own_server: ValkeyServer) -> None:
    """The caller's memory is somebody else's then."""
    over = threading.Event()
    with Proxy(own_server.port) as proxy:
        tier = RedisTier.open(FORM, [f"redis://127.0.0.1:{proxy.port}/0", empty_url], AMPLE, 60)
        names, looking = new_names(40), RedisTier.attach([own_server.url])
        put(tier, names)
        slow = [name for name, here in zip(names, is_here(looking, names), strict=True) if here]
        fast = next(name for name in names if name not in slow)
        places = [bytearray(PAYLOAD_BYTES) for _ in slow]
        wanted = [ReadRequest(name, memoryview(place)) for name, place in zip(slow, places, strict=True)]

        def release() -> None:
            over.wait(0.3)
            proxy.forward_normally()

        proxy.stop_forwarding()
        releasing = threading.Thread(target=release)
        releasing.start()
        with pytest.raises(TypeError):
            tier.get([ReadRequest(fast, memoryview(bytes(PAYLOAD_BYTES))), *wanted])  # that cannot be written to
        over.set()
        assert places == [content(name) for name in slow]
        releasing.join()
        tier.close()
        looking.close()


def test_a_machine_without_threads_to_spare(
    empty_url: str, own_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open tier needs no more; one that is opened says so."""
    urls, names, start, started = [empty_url, own_server.url], new_names(20), threading.Thread.start, list[str]()

    def start_some(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        start(thread)

    tier = RedisTier.open(FORM, urls, AMPLE, 60)
    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(KVStoreError):
        RedisTier.open(FORM, urls, AMPLE, 60)
    assert put(tier, names) == [True] * 20
    assert read(tier, names) == [content(name) for name in names]
    tier.close()


def test_scripts_forgotten_while_several_connections_wait(
    own_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 0.0)
    names = new_names(8)
    with redis.Redis.from_url(own_server.url) as client:
        tier = RedisTier.open(LARGE_FORM, [own_server.unix_url], AMPLE, 60)
        put(tier, names, LARGE_FORM)
        assert None not in read(tier, names, LARGE_FORM)
        client.script_flush()
        assert is_here(tier, names) == [False] * 8
        for _ in range(4):
            assert is_here(tier, names) == [True] * 8
        assert tier.counters.errors == 1
        tier.close()


URLS = st.lists(st.integers(0, 10_000).map(lambda n: f"redis://host{n}:6379/0"), min_size=1, max_size=8, unique=True)
KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=50)


@given(URLS, KEYS, st.randoms(use_true_random=False))
def test_the_order_of_addresses_does_not_matter(urls: list[str], keys: list[bytes], rng: random.Random) -> None:
    mixed = rng.sample(urls, len(urls))
    one, two = RendezvousHash(urls), RendezvousHash(mixed)
    assert [urls[one.find_server(key)] for key in keys] == [mixed[two.find_server(key)] for key in keys]
    assert sorted(index for part in one.group_by_server(keys).values() for index in part) == list(range(len(keys)))


@given(URLS, KEYS)
def test_a_new_address_takes_keys_and_moves_no_others(urls: list[str], keys: list[bytes]) -> None:
    before, after = RendezvousHash(urls[:-1] or urls), RendezvousHash(urls)
    for key in keys:
        assert after.find_server(key) in (before.find_server(key), len(urls) - 1)


def test_shares_are_about_equal_and_so_is_what_moves() -> None:
    rng, urls = random.Random(7), [f"redis://10.0.0.{n}:6379/0" for n in range(5)]
    keys = [rng.randbytes(32) for _ in range(10_000)]
    dealt = RendezvousHash(urls).group_by_server(keys)
    assert all(1800 < len(dealt[place]) < 2200 for place in range(5))
    smaller = RendezvousHash(urls[:4])
    moved = sum(smaller.find_server(key) != RendezvousHash(urls).find_server(key) for key in keys[:1000])
    assert 150 < moved < 250


def test_a_new_password_moves_nothing() -> None:
    assert (
        url_identity("redis://me:old@host:6379/1")
        == url_identity("redis://:n%40w@host:6379/1")
        == "redis://host:6379/1"
    )
    assert url_identity("unix:///run/a.sock?db=1") != url_identity("unix:///run/a.sock?db=2")
