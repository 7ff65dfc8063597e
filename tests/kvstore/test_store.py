"""The store: tiers in order, the prefix up to the first block nobody has, and never a wrong block."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import pack
from kvstore.store import KVStore, Layout
from kvstore.tiers.contract import Counters
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier
from penstock.local.processes import free_port
from penstock.settings import KVSettings

SIZE = 4
LAYOUT = Layout(fingerprint="5a" * 32, block_size=SIZE, payload_bytes=24)
PROMPT = list(range(100, 118))
"""18 tokens: four full blocks and one of two."""


def new_store(num_tiers: int = 2, layout: Layout = LAYOUT) -> KVStore:
    return KVStore(layout, [MemoryTier(2**20) for _ in range(num_tiers)], "secret")


def payloads(tokens: Sequence[int]) -> list[tuple[int, bytes]]:
    """A payload for each block, made of the tokens up to its end: what a model would make of them."""
    ends = range(SIZE, len(tokens) + SIZE, SIZE)
    return [
        (index, hashlib.sha256(repr(tokens[:end]).encode()).digest()[: LAYOUT.payload_bytes])
        for index, end in enumerate(ends)
    ]


def fill(store: KVStore, tokens: Sequence[int] = PROMPT, tenant: str = "t") -> list[bytes]:
    keys = store.keys(tenant, tokens)
    store.put(keys, len(tokens), payloads(tokens))
    return keys


def read(store: KVStore, tokens: Sequence[int] = PROMPT, tenant: str = "t", start: int = 0) -> list[bytes]:
    return [bytes(payload) for payload in store.get_prefix(store.keys(tenant, tokens), len(tokens), start)]


def expected(tokens: Sequence[int] = PROMPT) -> list[bytes]:
    return [payload for _, payload in payloads(tokens)]


def blocks_of(store: KVStore, depth: int) -> dict[bytes, bytes]:
    tier = store.tiers[depth]
    assert isinstance(tier, MemoryTier)
    return tier._blocks


def test_an_empty_store_has_nothing() -> None:
    store = new_store()
    assert read(store) == []
    assert [tier.counters for tier in store.tiers] == [Counters(misses=5), Counters(misses=5)]
    assert read(store, []) == []


def test_what_is_put_is_read_from_the_first_tier() -> None:
    store = new_store()
    fill(store)
    assert read(store) == expected()
    assert store.tiers[0].counters.hits == 5
    assert store.tiers[0].counters.bytes_read == store.tiers[0].counters.bytes_written
    assert store.tiers[1].counters.hits == store.tiers[1].counters.misses == 0


def test_reading_may_start_later() -> None:
    store = new_store()
    fill(store)
    assert read(store, start=3) == expected()[3:]
    assert read(store, start=5) == []


@given(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)), st.integers(0, 5))
def test_the_prefix_ends_at_the_first_block_that_no_tier_has(upper: set[int], lower: set[int], start: int) -> None:
    store = new_store()
    keys = fill(store)
    for depth, missing in ((0, upper), (1, lower)):
        for index in missing:
            del blocks_of(store, depth)[keys[index]]
    gone = upper & lower
    end = next((index for index in range(start, 5) if index in gone), 5)
    assert read(store, start=start) == expected()[start:end]


def test_what_a_lower_tier_has_is_put_into_those_above() -> None:
    store = new_store(3)
    keys = fill(store)
    for depth in (0, 1):
        blocks_of(store, depth).clear()
    assert read(store) == expected()
    assert [tier.counters.hits for tier in store.tiers] == [0, 0, 5]
    for depth in (0, 1):
        assert dict(blocks_of(store, depth)) == dict(blocks_of(store, 2))
    assert read(store) == expected()
    assert [tier.counters.hits for tier in store.tiers] == [5, 0, 5]
    assert len(keys) == len(blocks_of(store, 0))


@given(st.integers(0, 4), st.data())
def test_a_damaged_block_is_counted_and_the_next_tier_is_asked(index: int, data: st.DataObject) -> None:
    store = new_store()
    keys = fill(store)
    held = blocks_of(store, 0)
    whole = held[keys[index]]
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    held[keys[index]] = data.draw(st.sampled_from([changed, whole[:place], whole + b"x", b""]))
    assert read(store) == expected()
    upper, lower = (tier.counters for tier in store.tiers)
    assert (upper.hits, upper.misses, upper.damaged) == (4, 1, 1)
    assert (lower.hits, lower.misses, lower.damaged) == (1, 0, 0)
    assert held[keys[index]] == whole


def test_damaged_everywhere_is_a_miss() -> None:
    store = new_store()
    keys = fill(store)
    for depth in (0, 1):
        blocks_of(store, depth)[keys[2]] = b"PKVB" + bytes(200)
    assert read(store) == expected()[:2]
    assert [tier.counters.damaged for tier in store.tiers] == [1, 1]


def test_a_block_under_another_key_is_not_used() -> None:
    """A server that mixes up its keys, or a writer that means ill."""
    store = new_store(1)
    keys = fill(store)
    held = blocks_of(store, 0)
    held[keys[1]] = held[keys[2]]
    assert read(store) == expected()[:1]
    other = bytes.fromhex("5b" * 32)
    held[keys[1]] = pack(keys[1], other, SIZE, expected()[1])
    assert read(store) == expected()[:1]


def test_another_tenant_or_model_or_prompt_reads_nothing_of_it() -> None:
    store = new_store()
    fill(store)
    assert read(store, tenant="u") == []
    assert read(store, [7, *PROMPT[1:]]) == []
    assert read(store, [*PROMPT[:7], 7]) == expected()[:1]
    other = KVStore(Layout("5b" * 32, SIZE, LAYOUT.payload_bytes), store.tiers, "secret")
    assert other.get_prefix(store.keys("t", PROMPT), len(PROMPT)) == []
    assert other.get_prefix(other.keys("t", PROMPT), len(PROMPT)) == []


def test_a_partial_block_is_not_used_for_a_longer_prompt() -> None:
    store = new_store()
    fill(store)
    assert read(store, [*PROMPT, 118]) == expected()[:4]
    assert read(store, PROMPT[:17]) == expected()[:4]


@given(st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=6), st.lists(st.integers(0, 2), max_size=14))
def test_a_hit_is_always_what_the_tokens_make(stored: list[list[int]], asked: list[int]) -> None:
    """Prompts of three kinds of token overlap in every way; a payload tells which tokens it was made of."""
    store = new_store(1)
    for tokens in stored:
        fill(store, tokens)
    found = read(store, asked)
    assert found == expected(asked)[: len(found)]
    shared = [tokens for tokens in stored if tokens[:SIZE] == asked[:SIZE] and len(asked) >= SIZE]
    assert not shared or found


def test_absent_asks_the_tier_that_all_share() -> None:
    store = new_store()
    keys = fill(store)
    del blocks_of(store, 1)[keys[1]]
    blocks_of(store, 0).clear()
    assert store.absent(keys, [0, 1, 2]) == [1]
    assert store.absent(keys, []) == []


# With Redis.


def test_one_workers_blocks_are_read_by_another(redis_url: str, request: pytest.FixtureRequest) -> None:
    secret = request.node.nodeid + redis_url
    settings = KVSettings(memory_mb=1, salt_secret=secret)
    writer, reader = (KVStore.open(LAYOUT, settings, redis_url) for _ in range(2))
    fill(writer)
    assert read(reader) == expected()
    assert read(reader) == expected()
    assert [tier.counters.hits for tier in reader.tiers] == [5, 5]
    assert reader.absent(reader.keys("t", PROMPT), range(5)) == []


def test_without_its_server_a_store_lives_from_memory() -> None:
    store = KVStore.open(LAYOUT, KVSettings(memory_mb=1), f"redis://127.0.0.1:{free_port()}/0")
    keys = fill(store)
    assert read(store) == expected()
    assert store.absent(keys, range(5)) == list(range(5))
    assert store.tiers[1].counters.errors == 2
    other = KVStore.open(LAYOUT, KVSettings(memory_mb=0), f"redis://127.0.0.1:{free_port()}/0")
    fill(other)
    assert read(other) == []
    assert isinstance(other.tiers[1], RedisTier)
    assert (other.tiers[1].counters.misses, other.tiers[1].counters.errors) == (5, 2)
