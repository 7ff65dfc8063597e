"""What every tier does, and what is special about each."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers import redis as redis_tier
from kvstore.tiers.contract import Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier
from penstock.local.processes import free_port, wait_until
from penstock.local.valkey import ValkeyServer
from penstock.names import kv_key

NewKey = Callable[[], bytes]

# All tiers.


def test_what_is_put_is_got_in_the_order_asked(tier: Tier, new_key: NewKey) -> None:
    one, two, three = new_key(), new_key(), new_key()
    tier.put([(one, b"first"), (two, b"\x00\xff" * 500)])
    assert tier.get([two, three, one, two]) == [b"\x00\xff" * 500, None, b"first", b"\x00\xff" * 500]
    assert tier.counters.bytes_written == 1005


def test_nothing_is_a_batch(tier: Tier) -> None:
    tier.put([])
    assert tier.get([]) == []
    assert tier.touch([]) == []


def test_the_newest_write_wins(tier: Tier, new_key: NewKey) -> None:
    key = new_key()
    tier.put([(key, b"old"), (key, b"new")])
    assert tier.get([key]) == [b"new"]
    tier.put([(key, b"newest")])
    assert tier.get([key]) == [b"newest"]


def test_touch_says_what_is_here(tier: Tier, new_key: NewKey) -> None:
    one, two = new_key(), new_key()
    tier.put([(one, b"x")])
    assert tier.touch([two, one, two]) == [False, True, False]


def test_many_blocks(tier: Tier, new_key: NewKey) -> None:
    """More than go in one batch to a server."""
    blocks = [(new_key(), b"%d" % number) for number in range(1000)]
    tier.put(blocks)
    keys = [key for key, _ in blocks]
    assert tier.get(keys) == [stored for _, stored in blocks]
    assert all(tier.touch(keys))


# Memory: a budget, and the order of use.


class Model:
    """The same promises, kept in the plainest way: a list, the last used at its end."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: list[tuple[int, int]] = []

    def put(self, key: int, size: int) -> None:
        self.held = [pair for pair in self.held if pair[0] != key]
        if size <= self.budget:
            self.held.append((key, size))
        while sum(size for _, size in self.held) > self.budget:
            self.held.pop(0)

    def use(self, key: int) -> None:
        self.held.sort(key=lambda pair: pair[0] == key)


KEYS = st.integers(0, 7)
STEPS = st.lists(st.tuples(st.sampled_from(["put", "get", "touch"]), KEYS, st.integers(0, 12)), max_size=60)


@given(st.integers(0, 30), STEPS)
def test_memory_keeps_its_budget_and_forgets_what_was_used_longest_ago(
    budget: int, steps: list[tuple[str, int, int]]
) -> None:
    tier, model = MemoryTier(budget), Model(budget)
    for action, key, size in steps:
        name = bytes([key])
        if action == "put":
            tier.put([(name, bytes(size))])
            model.put(key, size)
        else:
            found = tier.get([name])[0] is not None if action == "get" else tier.touch([name])[0]
            assert found == (key in dict(model.held))
            model.use(key)
        held = {key: len(stored) for key, stored in tier._blocks.items()}
        assert held == {bytes([key]): size for key, size in model.held}
        assert sum(held.values()) == tier._used_bytes <= budget


# Redis: a time to live, and a server that may be away.


def test_blocks_in_redis_have_their_time_and_touching_renews_it(redis_url: str, new_key: NewKey) -> None:
    one, two = new_key(), new_key()
    RedisTier(redis_url, keep_s=10).put([(one, b"x"), (two, b"x")])
    RedisTier(redis_url, keep_s=1000).touch([one])
    with redis.Redis.from_url(redis_url) as client:
        renewed, left = client.pttl(kv_key(one)), client.pttl(kv_key(two))
        assert 0 < left <= 10_000 < renewed <= 1_000_000


def test_a_key_of_another_type_is_nothing(redis_url: str, new_key: NewKey) -> None:
    key = new_key()
    with redis.Redis.from_url(redis_url) as client:
        client.rpush(kv_key(key), "not a block")
        tier = RedisTier(redis_url, keep_s=60)
        assert tier.get([key]) == [None]
        tier.put([(key, b"x")])
        assert tier.get([key]) == [b"x"]


def test_batches_are_limited_by_bytes(redis_url: str, new_key: NewKey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_tier, "BATCH_BYTES", 1000)
    blocks = [(new_key(), bytes(400)) for _ in range(5)]
    writer, reader = RedisTier(redis_url, keep_s=60), RedisTier(redis_url, keep_s=60)
    writer.put(blocks)
    assert writer._batch == 2
    assert reader.get([key for key, _ in blocks]) == [stored for _, stored in blocks]
    assert reader._batch == 2


def check_away(tier: RedisTier, key: bytes) -> None:
    before = tier.counters.errors
    assert tier.get([key, key]) == [None, None]
    tier.put([(key, b"x")])
    assert tier.touch([key]) == [False]
    assert tier.counters.errors == before + 3


def test_a_server_that_is_not_there(new_key: NewKey) -> None:
    tier = RedisTier(f"redis://127.0.0.1:{free_port()}/0", keep_s=60)
    check_away(tier, new_key())
    assert tier.counters.bytes_written == 0


def test_a_server_that_dies_and_comes_back(own_server: ValkeyServer, new_key: NewKey) -> None:
    key = new_key()
    tier = RedisTier(own_server.url, keep_s=60)
    tier.put([(key, b"x")])
    assert tier.get([key]) == [b"x"]
    own_server.kill()
    check_away(tier, key)
    own_server.start()

    def back() -> bool:
        tier.put([(key, b"x")])
        return tier.get([key]) == [b"x"]

    wait_until(back, 10, "the server is asked again")


@pytest.fixture(params=[b"", b"what?\r\n", b"-ERR no\r\n"], ids=["silent", "nonsense", "refusing"])
def broken_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that accepts connections and answers nothing, or nonsense, or that it will not."""
    monkeypatch.setattr(redis_tier, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []

        def answer(connection: socket.socket) -> None:
            try:
                while connection.recv(65536):
                    connection.sendall(request.param)
            except OSError:
                return

        def accept() -> None:
            try:
                while True:
                    accepted.append(server.accept()[0])
                    threading.Thread(target=answer, args=(accepted[-1],), daemon=True).start()
            except OSError:
                return

        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"
        server.shutdown(socket.SHUT_RDWR)
        acceptor.join()
        for connection in accepted:
            connection.close()


def test_a_server_that_is_broken(broken_url: str, new_key: NewKey) -> None:
    check_away(RedisTier(broken_url, keep_s=60), new_key())


def test_a_server_without_room(own_server: ValkeyServer, new_key: NewKey) -> None:
    """It refuses the write; that is an error counted, nothing more."""
    tier, key = RedisTier(own_server.url, keep_s=60), new_key()
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1)
    tier.put([(key, bytes(100))])
    assert (tier.counters.errors, tier.counters.bytes_written) == (1, 0)
    assert tier.get([key]) == [None]
