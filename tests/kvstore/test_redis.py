"""What is special about the Redis tier: time, the index, what else a server may have."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import pytest
import redis
import xxhash

from penstock.kvstore.block import HEADER_BYTES, Block, BlockFormat, BlockKey, Header, ReadRequest
from penstock.kvstore.codec import LOSSLESS, TierCodecs, make_codecs
from penstock.kvstore.codec.choice import AdaptiveCodec
from penstock.kvstore.codec.lossless import LosslessCodec
from penstock.kvstore.tiers import address as redis_address
from penstock.kvstore.tiers import index as redis_index
from penstock.kvstore.tiers.redis import RedisTier
from penstock.names import KV_INDEX, kv_key
from sim.waiting import wait_for
from tests.kvstore.blocks import FORM, PAYLOAD_BYTES, block, content, is_here, keys_of, make_form, new_names, put, read
from tests.kvstore.redis_checks import AMPLE, LARGE_FORM, STORED_BYTES

Open = Callable[..., RedisTier]


@pytest.fixture
def client(kv_url: str) -> Iterator[redis.Redis]:
    """The server, seen by somebody else; empty."""
    with redis.Redis.from_url(kv_url) as client:
        client.flushall()
        yield client


@pytest.fixture
def open_tier(client: redis.Redis, kv_url: str) -> Iterator[Open]:
    """Opens tiers; the index is whole when the test is over."""
    with contextlib.ExitStack() as stack:

        def make(budget: int = AMPLE, keep_s: float = 600, form: BlockFormat = FORM, *codec: TierCodecs) -> RedisTier:
            tier = RedisTier.open(form, [kv_url], budget, keep_s, *codec)
            stack.callback(tier.close)
            return tier

        yield make
        assert make().check_integrity() == []


@pytest.fixture
def tier(open_tier: Open) -> RedisTier:
    """A tier with room for all."""
    return open_tier()


# Time.


def ttls(client: redis.Redis) -> list[int]:
    return [client.pttl(key) for key in client.scan_iter()]


def test_nothing_stays_for_ever(tier: RedisTier, client: redis.Redis) -> None:
    names = new_names(5)
    put(tier, names)
    tier.lease_blocks("a job", keys_of(names[:2]), 60)
    assert len(ttls(client)) == 5 + len(KV_INDEX)
    assert all(0 < ttl <= 2 * 600_000 for ttl in ttls(client))


def test_use_renews_a_block_s_time(client: redis.Redis, open_tier: Open) -> None:
    brief, long = open_tier(keep_s=100), open_tier(keep_s=1000)
    names = new_names(4)
    put(brief, names)
    read(long, names[:1])
    is_here(long, names[1:2])
    put(long, names[2:3])
    left = [client.pttl(kv_key(name.hash)) for name in names]
    assert 0 < left[3] <= 100_000
    assert all(100_000 < time <= 1_000_000 for time in left[:3])


def test_a_lease_outlives_a_block_s_time(client: redis.Redis, open_tier: Open) -> None:
    tier, brief, names = open_tier(), open_tier(keep_s=0.05), new_names(2)
    put(tier, names[:1])
    tier.lease_blocks("a job", keys_of(names[:1]), 6000)
    assert client.pttl(kv_key(names[0].hash)) > 5_000_000
    put(brief, names[1:])
    wait_for(lambda: not client.exists(kv_key(names[1].hash)), "the other one's time is over")
    assert is_here(tier, names) == [True, False]
    wait_for(lambda: put(brief, new_names(1)) and tier.read_usage().blocks <= 2, "its entry is gone as well")
    assert tier.counters.evictions == brief.counters.evictions == 0


# The index.


def test_an_entry_without_block_is_forgotten(
    tier: RedisTier, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_index, "WRITE_GRACE_MS", 600_000)
    names = new_names(3)
    put(tier, names)
    client.delete(*(kv_key(name.hash) for name in names[:2]))
    assert is_here(tier, names) == [False, False, True]
    assert tier.read_usage().blocks == 3, "a writer may just be about to write them"
    monkeypatch.setattr(redis_index, "WRITE_GRACE_MS", -10)  # all of this may happen within one millisecond
    assert read(tier, names[:1]) == [None]
    assert tier.read_usage().blocks == 2
    assert is_here(tier, names) == [False, False, True]
    assert (tier.read_usage().blocks, tier.read_usage().bytes) == (1, STORED_BYTES)


@pytest.mark.parametrize("num_lost", range(1, len(KV_INDEX) + 1))
@pytest.mark.parametrize("num_leased", [0, 2])
def test_an_index_that_lost_parts_is_begun_anew(
    tier: RedisTier, client: redis.Redis, num_lost: int, num_leased: int
) -> None:
    """Whichever they are: a server that evicts may take several at once."""
    for lost in combinations(KV_INDEX, num_lost):
        client.flushall()
        check_begun_anew(tier, client, lost, num_leased)


def check_begun_anew(tier: RedisTier, client: redis.Redis, lost: Sequence[str], num_leased: int) -> None:
    names = new_names(4)
    put(tier, names)
    tier.lease_blocks("a job", keys_of(names[:num_leased]), 600)
    num_known = 3 if client.delete(*lost) else 4
    assert is_here(tier, names[:3]) == [True] * 3
    assert (tier.read_usage().blocks, tier.read_usage().bytes) == (num_known, num_known * STORED_BYTES)
    assert read(tier, names) == [content(name) for name in names]
    assert tier.read_usage().bytes == 4 * STORED_BYTES


def test_a_block_that_nobody_noted_is_put_out_where_there_is_no_room(client: redis.Redis, open_tier: Open) -> None:
    tier, names = open_tier(3 * STORED_BYTES), new_names(4)
    put(tier, names[:1])
    client.delete(*KV_INDEX)
    put(tier, names[1:])
    tier.lease_blocks("a job", keys_of(names[1:]), 600)
    assert is_here(tier, names) == [False, True, True, True]
    client.set(kv_key(names[0].hash), "what nobody noted", px=60_000)
    assert put(tier, names[:1]) == [False]
    assert tier.counters.refused == 1
    assert on_server(client, names) == [False, True, True, True]
    assert tier.read_usage().bytes == 3 * STORED_BYTES


def on_server(client: redis.Redis, names: Sequence[BlockKey]) -> list[bool]:
    return [client.exists(kv_key(name.hash)) == 1 for name in names]


def test_what_a_call_puts_out_again_it_does_not_say_is_here(
    client: redis.Redis, open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of more blocks than go in a batch, and than there is room for."""
    monkeypatch.setattr(redis_index, "MAX_SCRIPT_KEYS", 4)
    monkeypatch.setattr(redis_address, "MAX_SCRIPT_KEYS", 4)
    ample, small, names = open_tier(), open_tier(6 * STORED_BYTES), new_names(11)
    put(ample, names)
    client.delete(*KV_INDEX)
    assert is_here(small, names) == on_server(client, names)
    assert sum(on_server(client, names)) == 6
    put(ample, names)
    client.delete(*KV_INDEX)
    assert put(small, names) == on_server(client, names)
    client.flushall()
    assert put(small, names) == on_server(client, names)
    assert sum(on_server(client, names)) == 6


def test_a_batch_does_not_put_out_its_own(client: redis.Redis, open_tier: Open) -> None:
    """The first blocks of a prefix are the ones that others share."""
    tier, names = open_tier(3 * STORED_BYTES), new_names(5)
    put(tier, new_names(3))
    assert put(tier, names) == [True, True, True, False, False]
    assert (tier.counters.evictions, tier.counters.refused) == (3, 2)


def test_a_block_larger_than_the_budget(client: redis.Redis, open_tier: Open) -> None:
    tier, large, names = open_tier(), open_tier(100_000, form=LARGE_FORM), new_names(3)
    put(tier, names)
    assert put(large, new_names(1), LARGE_FORM) == [False]
    assert (large.counters.refused, large.counters.evictions) == (1, 0)
    assert is_here(tier, names) == [True] * 3


def test_the_index_stays_whole_whatever_happens(client: redis.Redis, open_tier: Open) -> None:
    rng, names = random.Random(3), new_names(30)
    tiers = [open_tier(12 * STORED_BYTES) for _ in range(2)]
    for step in range(300):
        tier, some, owner = rng.choice(tiers), rng.sample(names, rng.randrange(1, 6)), rng.choice("ab")
        match rng.randrange(8):
            case 0 | 1:
                put(tier, some)
            case 2:
                assert all(got in (None, content(name)) for name, got in zip(some, read(tier, some), strict=True))
            case 3:
                is_here(tier, some)
            case 4:
                tier.lease_blocks(owner, keys_of(some), rng.choice([0.001, 600]))
            case 5:
                tier.release_leases(owner, keys_of(some))
            case 6:
                tier.remove_blocks(keys_of(some[:1]))
            case 7:
                client.delete(kv_key(some[0].hash))
        usage = tier.read_usage()
        assert usage.bytes <= usage.budget
        if step % 10 == 0:
            assert tier.check_integrity() == []
    assert all(tier.counters.errors == tier.counters.damaged == 0 for tier in tiers)
    tiers[0].release_leases("a", keys_of(names))
    tiers[0].release_leases("b", keys_of(names))
    assert tiers[0].read_usage().leased == 0


def test_a_check_finds_what_does_not_agree(tier: RedisTier, client: redis.Redis) -> None:
    names = new_names(2)
    put(tier, names)
    client.hincrby(KV_INDEX[5], "sum", 7)
    client.persist(kv_key(names[0].hash))
    assert len(tier.check_integrity()) == 2
    client.hincrby(KV_INDEX[5], "sum", -7)
    client.pexpire(kv_key(names[0].hash), 1000)


# What a server may have under a block's key.


def test_a_key_of_another_type_is_damage(tier: RedisTier, client: redis.Redis) -> None:
    names = new_names(3)
    put(tier, names[2:])
    for name in names[:2]:
        client.rpush(kv_key(name.hash), "not a block")
    assert is_here(tier, names[:1]) == [False]
    assert read(tier, [names[0], names[2]]) == [None, content(names[2])]
    assert (tier.counters.damaged, tier.counters.errors) == (1, 0)
    assert put(tier, names[:2]) == [True, True]
    assert read(tier, names) == [content(name) for name in names]


@pytest.mark.parametrize("length", [STORED_BYTES - 1, STORED_BYTES + 1, 2 * STORED_BYTES, 2**20])
def test_a_value_of_another_length_is_not_taken_for_the_next_one(
    tier: RedisTier, client: redis.Redis, length: int
) -> None:
    names = new_names(3)
    put(tier, names)
    client.setrange(kv_key(names[1].hash), length - 3, b"\r\n$")
    value = client.get(kv_key(names[1].hash))
    assert isinstance(value, bytes)
    client.set(kv_key(names[1].hash), value[:length], keepttl=True)
    assert read(tier, names) == [content(names[0]), None, content(names[2])]
    assert (tier.counters.damaged, tier.counters.errors) == (1, 0)


@pytest.mark.parametrize("leased", [False, True])
def test_a_leased_block_that_became_larger(client: redis.Redis, open_tier: Open, leased: bool) -> None:
    """One that was lost, and is stored again by somebody without its codec. `leased`: all others are, too."""
    budget, names = 3 * STORED_BYTES - 1, new_names(3)
    tier, coded = open_tier(budget), open_tier(budget, 600, FORM, ALWAYS_LOSSLESS)
    assert coded.put([Block(names[0], memoryview(bytes(PAYLOAD_BYTES)))]) == [True]
    assert put(tier, names[1:]) == [True, True]
    tier.lease_blocks("a job", keys_of(names if leased else names[:1]), 600)
    client.delete(kv_key(names[0].hash))
    assert put(tier, names[:1]) == [not leased]
    assert on_server(client, names) == [not leased, leased, True]
    assert (tier.read_usage().blocks, tier.read_usage().bytes) == (2, 2 * STORED_BYTES)
    assert (tier.read_usage().leased, tier.counters.evictions) == ((2, 0) if leased else (1, 1))


# Codecs.


ALWAYS_LOSSLESS = TierCodecs({LOSSLESS: LosslessCodec("float32")}, LosslessCodec("float32"))
"""Compresses whatever the link's speed."""


def test_blocks_of_any_codec_lie_side_by_side(tier: RedisTier, client: redis.Redis, open_tier: Open) -> None:
    coded, names = open_tier(AMPLE, 600, FORM, ALWAYS_LOSSLESS), new_names(3)
    payloads = [bytes(1500) + content(name)[1500:] for name in names]
    blocks = [Block(name, memoryview(payload)) for name, payload in zip(names, payloads, strict=True)]
    assert coded.put(blocks[:2]) == [True, True]
    assert tier.put(blocks[2:]) == [True]
    assert coded.read_usage().bytes < 3 * STORED_BYTES
    places = [bytearray(PAYLOAD_BYTES) for _ in names]
    wanted = [ReadRequest(name, memoryview(place)) for name, place in zip(names, places, strict=True)]
    assert coded.get(wanted) == [True] * 3
    assert places == payloads
    assert coded.counters.bytes_written == 2 * PAYLOAD_BYTES
    client.setrange(kv_key(names[0].hash), HEADER_BYTES + 50, b"damaged")
    assert coded.get(wanted) == [False, True, True]
    assert tier.get(wanted[1:]) == [False, True], "one who knows no codec"
    assert (coded.counters.damaged, tier.counters.damaged) == (1, 1)


def test_a_block_of_the_lossy_codec_of_an_older_version_is_a_miss(tier: RedisTier, client: redis.Redis) -> None:
    (name,) = new_names(1)
    assert put(tier, [name]) == [True]
    stored = client.get(kv_key(name.hash))
    assert isinstance(stored, bytes)
    older = replace(Header.unpack(stored), codec=2, content_bytes=900, checksum=xxhash.xxh3_64_intdigest(bytes(900)))
    client.set(kv_key(name.hash), older.pack() + bytes(900), keepttl=True)
    assert read(tier, [name]) == [None]
    assert tier.counters.errors == 0
    assert put(tier, [name]) == [True]
    assert read(tier, [name]) == [content(name)]


def test_a_codec_that_chooses_is_told_the_speed(client: redis.Redis, open_tier: Open) -> None:
    form, codec = make_form(payload_bytes=120_000), make_codecs("float32")
    tier, names = open_tier(AMPLE, 600, form, codec), new_names(6)
    assert all(put(tier, names, form))
    assert isinstance(codec._writer, AdaptiveCodec)
    written = codec._writer._link_s_per_byte.weight
    assert written >= 6 * 120_000
    assert read(tier, names, form) == [content(name, form) for name in names]
    assert codec._writer._link_s_per_byte.weight >= written


# Threads and what changes meanwhile.


def test_memory_that_changes_after_it_was_hashed_is_damage(tier: RedisTier) -> None:
    (name,) = new_names(1)
    payload = bytearray(content(name))

    def is_valid() -> bool:
        payload[100] ^= 1
        return True

    changed = block(name, is_valid=is_valid)
    changed = type(changed)(name, memoryview(payload), is_valid)
    assert tier.put([changed]) == [True]
    assert tier.get([ReadRequest(name, memoryview(bytearray(PAYLOAD_BYTES)))]) == [False]
    assert tier.counters.damaged == 1


def test_a_writer_that_gives_up_leaves_the_block_of_another(tier: RedisTier, open_tier: Open) -> None:
    other, names = open_tier(), new_names(3)

    def is_valid() -> bool:
        assert put(other, names[:2]) == [True, True]
        other.lease_blocks("a job", keys_of(names[:1]), 600)
        return False

    given_up = [block(names[0], is_valid=is_valid), *(block(name, is_valid=lambda: False) for name in names[1:])]
    assert tier.put(given_up) == [False] * 3
    assert read(other, names) == [content(names[0]), content(names[1]), None]
    assert (other.read_usage().blocks, other.read_usage().leased) == (2, 1)
