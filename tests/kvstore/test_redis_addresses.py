"""Ways to reach a Redis server, and several of them."""

import os
import shutil
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
import redis

from penstock.errors import KVStoreError
from penstock.kvstore.block import BlockFormat, ReadRequest
from penstock.kvstore.tiers import server as redis_server
from penstock.kvstore.tiers.redis import RedisTier
from penstock.local.valkey import ValkeyServer
from penstock.names import kv_key
from penstock.redis.urls import split_urls
from tests.kvstore.blocks import FORM, PAYLOAD_BYTES, content, is_here, keys_of, new_names, put, read
from tests.kvstore.redis_checks import AMPLE, LARGE_FORM, STORED_BYTES, check_away, check_works
from tests.kvstore.redis_servers import Proxy, unix_server


@pytest.fixture
def empty_url(kv_url: str) -> str:
    """A server that no other test uses meanwhile."""
    with redis.Redis.from_url(kv_url) as client:
        client.flushall()
    return kv_url


# Ways to reach one.


@pytest.mark.parametrize("form", [FORM, LARGE_FORM], ids=["small", "large"])
def test_a_unix_socket(tmp_path: Path, form: BlockFormat) -> None:
    with unix_server(tmp_path) as url:
        check_works(RedisTier.open(form, [url], AMPLE, 60), form)


def test_damage_on_several_connections(tmp_path: Path) -> None:
    """Through a unix socket large blocks come over several at once."""
    names = new_names(11)
    with unix_server(tmp_path) as url, redis.Redis.from_url(url) as client:
        tier = RedisTier.open(LARGE_FORM, [url], AMPLE, 60)
        put(tier, names, LARGE_FORM)
        client.setrange(kv_key(names[2].hash), 1000, b"?")
        client.delete(kv_key(names[5].hash))
        client.set(kv_key(names[7].hash), b"")
        expected = [None if at in (2, 5, 7) else content(name, LARGE_FORM) for at, name in enumerate(names)]
        assert read(tier, names, LARGE_FORM) == expected
        assert (tier.counters.hits, tier.counters.misses, tier.counters.damaged) == (8, 3, 2)
        assert list(tier.list_entries()) == sorted(tier.list_entries(), key=lambda entry: entry.used_s)
        assert tier.check_integrity() == []
        tier.close()


def test_a_password(own_server: ValkeyServer) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("requirepass", "open sesame")
    check_away(RedisTier.open(FORM, [own_server.url], AMPLE, 60))
    host = f"127.0.0.1:{own_server.port}/0"
    check_works(RedisTier.open(FORM, [f"redis://:open%20sesame@{host}"], AMPLE, 60))


def test_tls(own_server: ValkeyServer, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, env={**os.environ, "RANDFILE": str(tmp_path / "random")},
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Proxy(own_server.port, context) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}/0"
        check_works(RedisTier.open(LARGE_FORM, [f"{url}?ssl_ca_certs={certificate}"], AMPLE, 60), LARGE_FORM)
        check_away(RedisTier.open(FORM, [url], AMPLE, 60))


# Several addresses.


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
    assert tier.remove_blocks(keys_of(names)) == 40
    tier.close()
    other.close()


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


def test_addresses_of_a_setting() -> None:
    assert split_urls(" redis://a, ,redis://b/1,") == ["redis://a", "redis://b/1"]
    assert split_urls("") == []


def test_a_closed_tier_of_several_addresses_has_nothing(empty_url: str, own_server: ValkeyServer) -> None:
    both, names = RedisTier.open(FORM, [empty_url, own_server.url], AMPLE, 60), new_names(20)
    put(both, names)
    both.close()
    assert read(both, names) == [None] * 20
    assert put(both, names) == is_here(both, names) == [False] * 20
    assert both.remove_blocks(keys_of(names)) == both.read_usage().blocks == len(list(both.list_entries())) == 0


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
            proxy.passing.set()

        proxy.passing.clear()
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


def test_scripts_forgotten_while_several_connections_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 0.0)
    names = new_names(8)
    with unix_server(tmp_path) as url, redis.Redis.from_url(url) as client:
        tier = RedisTier.open(LARGE_FORM, [url], AMPLE, 60)
        put(tier, names, LARGE_FORM)
        assert None not in read(tier, names, LARGE_FORM)
        client.script_flush()
        assert is_here(tier, names) == [False] * 8
        for _ in range(4):
            assert is_here(tier, names) == [True] * 8
        assert tier.counters.errors == 1
        tier.close()
