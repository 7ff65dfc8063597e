"""Redis servers that fail: away, broken, cut off, full, emptied."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest
import redis

from penstock.errors import KVStoreError
from penstock.kvstore.block import HEADER_BYTES, BlockFormat
from penstock.kvstore.tiers import server as redis_server
from penstock.kvstore.tiers.index import SCRIPTS
from penstock.kvstore.tiers.redis import RedisTier
from penstock.local.valkey import ValkeyServer
from sim.chaos.proxy import Proxy
from sim.waiting import PATIENCE_S, wait_for
from tests.kvstore.blocks import FORM, content, is_here, new_names, put, read
from tests.kvstore.redis_checks import AMPLE, LARGE_FORM, STORED_BYTES, check_away


def test_what_is_no_address() -> None:
    hosts = [[f"redis://{host}/0"] for host in ("a..b", "x" * 64, "a%00b", "a\udc80")]
    for urls in ([], ["http://127.0.0.1"], ["redis://a/0?no_such_option=1"], *hosts):
        with pytest.raises(KVStoreError):
            RedisTier.open(FORM, urls, AMPLE, 60)


def test_a_server_is_asked_again_however_often_it_was_away(
    own_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 0.0)
    tier, names = RedisTier.open(FORM, [own_server.url], AMPLE, 60), new_names(1)
    own_server.kill()
    for _ in range(110):
        assert put(tier, names) == [False]
    own_server.start()
    assert put(tier, names) == [True]
    assert tier.counters.errors == 110
    with redis.Redis.from_url(own_server.url) as client:
        for _ in range(110):  # as a server does to clients that are idle for long
            (idle,) = tier._nodes[0]._server._idle
            client.client_kill_filter(_type="normal", skipme=True)
            wait_for(lambda wire=idle: not wire.is_quiet(), "the connection is closed")  # type: ignore[misc]
            assert read(tier, names) == [content(names[0])]
    assert tier.counters.errors == 110
    tier.close()


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_server_that_dies_and_comes_back_empty(
    own_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, is_noticed: bool
) -> None:
    """If nobody notices, that costs no error."""
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 0.2)
    tier, names = RedisTier.open(FORM, [own_server.url], AMPLE, 60), new_names(3)
    put(tier, names)
    own_server.kill()
    if is_noticed:
        check_away(tier)
    own_server.start()
    if is_noticed:
        wait_for(lambda: put(tier, names[:1]) == [True], "the server is asked again")
        assert read(tier, names) == [content(names[0]), None, None]
    else:
        assert read(tier, names[:1]) == [None]
        assert put(tier, names[:1]) == [True]
        assert tier.counters.errors == 0
    assert tier.check_integrity() == []
    tier.close()


@contextlib.contextmanager
def serve(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that answers each connection so; its port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                answer(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server.server_address[1]
        server.shutdown()
        serving.join()


@pytest.mark.parametrize("nonsense", [b"", b"what?\r\n", b"-ERR no\r\n", b"$-7\r\n", b"*1\r\n" * 5000, b":1" * 100_000])
def test_a_server_that_is_broken(nonsense: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and answers nothing, or nonsense, or that it will not."""
    monkeypatch.setattr(redis_server, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 600.0)

    def answer(connection: socket.socket) -> None:
        while connection.recv(65536):
            connection.sendall(nonsense)

    with serve(answer) as port:
        check_away(RedisTier.open(FORM, [f"redis://127.0.0.1:{port}/0"], AMPLE, 60))


@pytest.mark.parametrize("greets", [True, False])
def test_a_server_that_sends_a_byte_at_a_time(monkeypatch: pytest.MonkeyPatch, greets: bool) -> None:
    """Each comes in time, the reply never."""
    monkeypatch.setattr(redis_server, "TIMEOUT_S", 0.1)
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        if greets:
            connection.recv(2**20)
            connection.sendall(b"+OK\r\n" * 2 + b"".join(b"$40\r\n%b\r\n" % script.sha.encode() for script in SCRIPTS))
        connection.sendall(b":" if greets else b"+")
        while not over.wait(0.02):
            connection.sendall(b"1")

    with serve(answer) as port:
        tier = RedisTier.open(FORM, [f"redis://user:password@127.0.0.1:{port}/1"], AMPLE, 60)
        asking = threading.Thread(target=is_here, args=(tier, new_names(1)))
        asking.start()
        asking.join(PATIENCE_S)
        gave_up = not asking.is_alive()
        over.set()
        asking.join()
    assert gave_up
    assert tier.counters.errors == 1


Behind = Callable[..., tuple[Proxy, RedisTier]]


@pytest.fixture
def behind(own_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, exits: contextlib.ExitStack) -> Behind:
    """Opens a tier of a form behind a proxy, which asks its server again at once."""
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 0.0)

    def open_behind(form: BlockFormat = FORM) -> tuple[Proxy, RedisTier]:
        proxy = exits.enter_context(Proxy(own_server.port))
        tier = RedisTier.open(form, [f"redis://127.0.0.1:{proxy.port}/0"], AMPLE, 60)
        return proxy, exits.enter_context(contextlib.closing(tier))

    return open_behind


@pytest.mark.parametrize("cut", [0, 5, 100, 250, 70_000, 310_000, 600_250, 899_000])
def test_a_connection_cut_while_blocks_are_read(behind: Behind, cut: int) -> None:
    """What came whole is used, the rest of the batch is misses; nothing is damaged, and the next call is as before."""
    (proxy, tier), names = behind(LARGE_FORM), new_names(3)
    put(tier, names, LARGE_FORM)
    proxy.cut_after(cut)
    whole = cut // (300_000 + HEADER_BYTES + 11)
    expected = [content(name, LARGE_FORM) if at < whole else None for at, name in enumerate(names)]
    assert read(tier, names, LARGE_FORM) == expected
    assert (tier.counters.hits, tier.counters.misses, tier.counters.damaged) == (whole, 3 - whole, 0)
    assert tier.counters.errors == 1
    assert read(tier, names, LARGE_FORM) == [content(name, LARGE_FORM) for name in names]


@pytest.mark.parametrize("cut", [0, 10, 30, 50])
def test_a_connection_cut_while_blocks_are_written(behind: Behind, cut: int) -> None:
    (proxy, tier), names = behind(), new_names(3)
    assert read(tier, names) == [None] * 3
    proxy.cut_after(cut)
    assert not all(put(tier, names))
    assert tier.counters.errors == 1
    assert put(tier, names) == [True] * 3
    assert read(tier, names) == [content(name) for name in names]
    assert (tier.read_usage().blocks, tier.read_usage().bytes) == (3, 3 * STORED_BYTES)
    assert tier.check_integrity() == []


def test_a_late_reply_is_nobody_s(behind: Behind) -> None:
    """A reply that comes after its call gave up goes with its connection."""
    (proxy, tier), names = behind(), new_names(2)
    put(tier, names)
    (wire,) = tier._nodes[0]._server._idle
    wire._socket.settimeout(0.2)  # of this connection alone: what comes after it may take its time
    wire._patience_s = wire._patience_left_s = 0.2
    proxy.stop_forwarding()
    assert read(tier, names[:1]) == [None]
    assert tier.counters.errors == 1
    proxy.forward_normally()
    assert read(tier, names[1:]) == [content(names[1])]
    assert proxy.num_connections == 2


def test_a_server_without_memory(own_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the write: an error counted, nothing taken in. What it has can still be read."""
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 0.0)
    tier, names = RedisTier.open(FORM, [own_server.url], AMPLE, 60), new_names(3)
    put(tier, names[:1])
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1)
    assert put(tier, names[1:]) == [False, False]
    assert tier.counters.errors == 1
    assert read(tier, names) == [content(names[0]), None, None]
    assert (tier.read_usage().blocks, tier.read_usage().bytes) == (1, STORED_BYTES)
    assert tier.counters.errors == 1
    assert tier.check_integrity() == []
    tier.close()


def test_a_server_that_evicts(own_server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take blocks and parts of the index; there is no wrong block, and the sums do not drift."""
    monkeypatch.setattr(redis_server, "RETRY_AFTER_S", 0.0)
    tier = RedisTier.open(LARGE_FORM, [own_server.url], 2**30, 60)
    with redis.Redis.from_url(own_server.url) as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", used + 3 * 2**20)
    names = new_names(30)
    for name in names:
        put(tier, [name], LARGE_FORM)
    found = read(tier, names, LARGE_FORM)
    assert None in found
    assert all(got in (None, content(name, LARGE_FORM)) for name, got in zip(names, found, strict=True))
    assert tier.counters.damaged == 0
    assert [line for line in tier.check_integrity() if "lost" not in line] == []
    tier.close()
