"""What every tier does, whatever is behind it."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from penstock.kvstore.block import HEADER_BYTES, BlockFormat, BlockKey, ReadRequest
from penstock.kvstore.tiers.contract import Tier
from sim.waiting import wait_for
from tests.draws import draw_cases
from tests.kvstore.blocks import (
    FORM,
    NUM_TOKENS,
    PAYLOAD_BYTES,
    block,
    content,
    is_here,
    keys_of,
    make_form,
    new_name,
    new_names,
    put,
    read,
)
from tests.kvstore.conftest import Damage, MakeTier
from tests.kvstore.places import Place, read_stored

pytestmark = pytest.mark.proof
AMPLE = 2**20
"""Room for all that a test puts there, unless it is about room."""
SMALL = 40 * 2**10
"""Room for a few blocks."""
STORED_BYTES = HEADER_BYTES + PAYLOAD_BYTES


@pytest.fixture
def tier(make_tier: MakeTier) -> Tier:
    return make_tier(FORM, AMPLE)


def fill(tier: Tier) -> list[BlockKey]:
    """Put blocks, one at a time, until there is no room for another one; what is there then, the oldest first."""
    names: list[BlockKey] = []
    while not tier.counters.evictions:
        names += new_names(1)
        assert put(tier, names[-1:]) == [True]
        assert len(names) < 1000
    kept = {entry.key for entry in tier.list_entries()}
    return [name for name in names if name.hash in kept]


# Put and get.


def test_what_is_put_is_got_in_the_order_asked(tier: Tier) -> None:
    one, two, three = new_name(), new_name(num_tokens=1), new_name()
    assert put(tier, [one, two]) == [True, True]
    assert read(tier, [two, three, one, two]) == [content(two), None, content(one), content(two)]
    counters = tier.counters
    assert (counters.hits, counters.misses, counters.damaged, counters.errors) == (3, 1, 0, 0)
    assert (counters.bytes_written, counters.bytes_read) == (2 * PAYLOAD_BYTES, 3 * PAYLOAD_BYTES)


def test_nothing_is_a_batch(tier: Tier) -> None:
    assert (tier.put([]), tier.get([]), tier.has_blocks([]), tier.remove_blocks([])) == ([], [], [], 0)
    for keys in ([], keys_of(new_names(3))):  # nor are there leases on what is not here
        tier.lease_blocks("a job", keys, 600)
        tier.release_leases("another", keys)
        assert tier.read_usage().leased == 0
    assert (tier.counters.hits, tier.counters.misses) == (0, 0)


def test_what_one_worker_puts_another_one_gets_also_when_the_first_has_closed(make_tier: MakeTier) -> None:
    writer, reader = make_tier(FORM, AMPLE), make_tier(FORM, AMPLE)
    names = new_names(5)
    assert read(reader, names) == [None] * 5
    put(writer, names)
    assert read(reader, names) == [content(name) for name in names]
    for tier in (writer, reader, writer):  # to close twice is harmless
        tier.close()
    assert read(make_tier(FORM, AMPLE), names) == [content(name) for name in names]


def test_a_block_that_is_here_already_counts_as_stored(tier: Tier) -> None:
    name = new_name()
    assert put(tier, [name]) == [True]
    assert put(tier, [name, name]) == [True, True]
    assert read(tier, [name]) == [content(name)]
    assert tier.read_usage().blocks == 1


def test_a_view_of_something_larger(tier: Tier) -> None:
    """As the pool's blocks are: read from, and written to, the middle of something."""
    name, payload = new_name(), bytearray(b"\7" * 3 * PAYLOAD_BYTES)
    payload[PAYLOAD_BYTES : 2 * PAYLOAD_BYTES] = content(name)
    middle = memoryview(payload)[PAYLOAD_BYTES : 2 * PAYLOAD_BYTES]
    tier.put([replace(block(name), payload=middle)])
    middle[:] = bytes(PAYLOAD_BYTES)
    assert tier.get([ReadRequest(name, middle)]) == [True]
    assert payload == b"\7" * PAYLOAD_BYTES + content(name) + b"\7" * PAYLOAD_BYTES


def test_many_blocks(make_tier: MakeTier) -> None:
    """More than go in one batch to a server."""
    tier, names = make_tier(FORM, 16 * AMPLE), new_names(1000)
    assert all(put(tier, names))
    assert all(is_here(tier, names))
    assert read(tier, names) == [content(name) for name in names]


def test_large_blocks(make_tier: MakeTier) -> None:
    form = make_form("a large model", 3 * 2**20 + 8)
    tier, names = make_tier(form, 2**25), new_names(5)
    assert all(put(tier, names, form))
    assert read(tier, names, form) == [content(name, form) for name in names]


# What is not the block asked for.


@pytest.mark.parametrize(
    "other",
    [lambda name: replace(name, tenant_tag=bytes(16)), lambda name: replace(name, num_tokens=NUM_TOKENS - 1)],
    ids=["another tenant", "another number of tokens"],
)
def test_a_block_of_the_same_key_that_is_another_one(tier: Tier, other: Callable[[BlockKey], BlockKey]) -> None:
    name = new_name()
    put(tier, [name])
    assert read(tier, [other(name)]) == [None]
    check_damage_was_removed(tier, name)


@pytest.mark.parametrize(
    "form",
    [replace(FORM, fingerprint=bytes(32)), replace(FORM, layout=bytes(16)), replace(FORM, payload_bytes=2992)],
    ids=["another model", "another layout", "another size"],
)
def test_a_block_of_another_model_is_a_miss(make_tier: MakeTier, form: BlockFormat) -> None:
    ours, theirs, name = make_tier(FORM, AMPLE), make_tier(form, AMPLE), new_name()
    put(ours, [name])
    assert read(theirs, [name], form) == [None]
    assert theirs.counters.misses == 1


def check_damage_was_removed(tier: Tier, *names: BlockKey) -> None:
    """Each of the blocks was asked for once, found damaged, and is gone; it can be put again."""
    counters = tier.counters
    assert (counters.hits, counters.misses, counters.damaged) == (0, len(names), len(names))
    assert is_here(tier, names) == [False] * len(names)
    assert read(tier, names) == [None] * len(names)
    assert counters.damaged == len(names)
    assert put(tier, names) == [True] * len(names)
    assert read(tier, names) == [content(name) for name in names]


FLIPPED = [*range(0, HEADER_BYTES - 48, 9), HEADER_BYTES - 49, HEADER_BYTES, STORED_BYTES // 2, STORED_BYTES - 1]
"""Places in a stored block. A header ends with 48 bytes that say nothing."""


def flip_bit(stored: bytes, at: int) -> bytes:
    assert len(stored) == STORED_BYTES
    return stored[:at] + bytes([stored[at] ^ 1 << random.Random(at).randrange(8)]) + stored[at + 1 :]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    **{f"bit of {at}": lambda stored, other, at=at: flip_bit(stored, at) for at in FLIPPED},  # type: ignore[misc]
    **{
        f"cut at {length}": lambda stored, other, length=length: stored[:length]  # type: ignore[misc]
        for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, STORED_BYTES - 1)
    },
    "another block": lambda stored, other: other,
    "header of one, content of another": lambda stored, other: stored[:HEADER_BYTES] + other[HEADER_BYTES:],
}
"""What becomes of a stored block, from it and another one."""


@pytest.mark.parametrize("what", draw_cases(DAMAGES, 9))
def test_a_damaged_block_is_a_miss(tier: Tier, place: Place, damage: Damage, what: str) -> None:
    one, two = new_names(2)
    put(tier, [one, two])
    first, second = read_stored(place, tier, one.hash), read_stored(place, tier, two.hash)
    damage(tier, one.hash, lambda stored: DAMAGES[what](stored, second))
    damage(tier, two.hash, lambda stored: DAMAGES[what](stored, first))
    assert read(tier, [one, two]) == [None, None]
    check_damage_was_removed(tier, one, two)


@pytest.mark.parametrize("is_leased", [False, True])
def test_damage_does_not_spread_and_ends_leases(tier: Tier, damage: Damage, is_leased: bool) -> None:
    names = new_names(7)
    put(tier, names)
    tier.lease_blocks("a job", keys_of(names[3:4]) * is_leased, 60)
    damage(tier, names[3].hash, lambda stored: bytes(len(stored)))
    assert read(tier, names) == [content(name) if name is not names[3] else None for name in names]
    assert (tier.counters.hits, tier.counters.misses, tier.counters.damaged) == (6, 1, 1)
    assert is_here(tier, names[3:4]) == [False]
    assert put(tier, names[3:4]) == [True]
    assert tier.read_usage().leased == 0


# The page tag.


def test_memory_that_became_another_block_s_is_not_stored(tier: Tier) -> None:
    good, bad = new_names(2)
    assert tier.put([block(bad, is_valid=lambda: False), block(good)]) == [False, True]
    assert read(tier, [bad, good]) == [None, content(good)]
    assert tier.counters.damaged == 0
    assert tier.counters.bytes_written == PAYLOAD_BYTES
    assert [entry.key for entry in tier.list_entries()] == [good.hash]
    assert put(tier, [bad]) == [True]


def test_the_page_tag_is_asked_when_nobody_can_find_the_block_yet(make_tier: MakeTier) -> None:
    writer, reader, name = make_tier(FORM, AMPLE), make_tier(FORM, AMPLE), new_name()
    seen: list[list[bytes | None]] = []

    def is_valid() -> bool:
        seen.append(read(reader, [name]))
        return True

    assert writer.put([block(name, is_valid=is_valid)]) == [True]
    assert seen == [[None]]
    assert read(reader, [name]) == [content(name)]


# Room.


def test_the_budget_is_kept(make_tier: MakeTier) -> None:
    tier, names = make_tier(FORM, SMALL), new_names(60)
    for start in range(0, 60, 3):
        assert all(put(tier, names[start : start + 3]))
        usage = tier.read_usage()
        assert 0 < usage.blocks * STORED_BYTES <= usage.bytes <= usage.budget <= SMALL
        assert usage.blocks == sum(1 for _ in tier.list_entries())
    assert tier.counters.evictions >= 60 - SMALL // STORED_BYTES
    assert tier.counters.refused == 0
    assert is_here(tier, names[-2:]) == [True, True]


def test_a_batch_larger_than_the_budget(make_tier: MakeTier) -> None:
    tier, names = make_tier(FORM, SMALL), new_names(60)
    put(tier, names)
    assert tier.read_usage().bytes <= SMALL
    found = read(tier, names)
    assert any(found)
    assert all(got in (None, content(name)) for got, name in zip(found, names, strict=True))
    assert tier.counters.damaged == 0


@pytest.mark.parametrize("use", [read, is_here, put])
def test_what_was_used_longest_ago_goes_first(make_tier: MakeTier, use: Callable[..., list[object]]) -> None:
    tier = make_tier(FORM, 2 * SMALL)
    names = fill(tier)
    used = names[::2]
    for name in used:
        assert all(use(tier, [name]))
    order = [name for name in names if name not in used] + used
    order += (added := new_names(len(names) // 4))
    for name in added:
        assert put(tier, [name]) == [True]
    kept = {entry.key for entry in tier.list_entries()}
    here = [name.hash in kept for name in order]
    assert here == sorted(here), "something went before what was used longer ago"
    assert not here[0]
    assert all(here[-len(added) - 1 :])


# Leases.


def test_leased_blocks_stay_and_go_when_they_are_released(make_tier: MakeTier) -> None:
    tier = make_tier(FORM, SMALL)
    names = fill(tier)
    leased = names[:2]
    tier.lease_blocks("a job", keys_of(leased), 600)
    assert tier.read_usage().leased == 2
    for name in new_names(30):
        assert put(tier, [name]) == [True]
    kept = {entry.key: entry.leases for entry in tier.list_entries()}
    assert [kept.get(name.hash) for name in leased] == [1, 1]
    assert sum(kept.values()) == 2
    tier.release_leases("a job", keys_of(leased))
    tier.release_leases("a job", keys_of(leased))
    assert tier.read_usage().leased == 0
    for name in new_names(30):
        assert put(tier, [name]) == [True]
    assert is_here(tier, leased) == [False, False]


def test_a_lease_ends_with_its_time(make_tier: MakeTier) -> None:
    tier = make_tier(FORM, SMALL)
    names = fill(tier)
    tier.lease_blocks("a job", keys_of(names), 0.05)
    wait_for(lambda: tier.read_usage().leased == 0, "leases run out")
    assert put(tier, new_names(2)) == [True, True]
    assert tier.counters.refused == 0


def test_a_second_lease_of_the_same_owner_moves_the_end(make_tier: MakeTier) -> None:
    tier, (longer, shorter) = make_tier(FORM, AMPLE), new_names(2)
    put(tier, [longer, shorter])
    tier.lease_blocks("a job", [longer.hash], 0.05)
    tier.lease_blocks("a job", [longer.hash], 600)
    tier.lease_blocks("a job", [shorter.hash], 600)
    tier.lease_blocks("a job", [shorter.hash], 0.05)
    wait_for(lambda: tier.read_usage().leased == 1, "the shorter lease runs out")
    assert {entry.key: entry.leases for entry in tier.list_entries()} == {longer.hash: 1, shorter.hash: 0}
    tier.release_leases("a job", [longer.hash])
    assert tier.read_usage().leased == 0


def test_owners_are_independent(make_tier: MakeTier) -> None:
    tier, other, name = make_tier(FORM, AMPLE), make_tier(FORM, AMPLE), new_name()
    put(tier, [name])
    tier.lease_blocks("one", [name.hash], 600)
    other.lease_blocks("two", [name.hash], 600)
    assert [entry.leases for entry in tier.list_entries()] == [2]
    assert tier.read_usage().leased == 1
    other.release_leases("one", [name.hash])
    assert [entry.leases for entry in tier.list_entries()] == [1]
    tier.release_leases("three", [name.hash])
    assert tier.read_usage().leased == 1
    tier.release_leases("two", [name.hash])
    assert tier.read_usage().leased == 0


def test_when_all_is_leased_a_block_is_refused(make_tier: MakeTier) -> None:
    tier = make_tier(FORM, SMALL)
    names = fill(tier)
    while put(tier, extra := new_names(1)) == [True]:  # a tier may put out more than it must at a time
        tier.lease_blocks("a job", keys_of(names + extra), 600)
        names = [*(name for name in names if name.hash in {entry.key for entry in tier.list_entries()}), *extra]
        assert len(names) < 100
    assert tier.counters.refused == 1
    assert is_here(tier, extra) == [False]
    assert read(tier, names) == [content(name) for name in names]
    tier.release_leases("a job", keys_of(names[:1]))
    assert put(tier, extra) == [True]
    assert is_here(tier, [names[0], *extra]) == [False, True]


def test_a_lease_ends_with_its_block(tier: Tier) -> None:
    name = new_name()
    put(tier, [name])
    tier.lease_blocks("a job", [name.hash], 600)
    assert tier.remove_blocks([name.hash]) == 1
    assert tier.read_usage().leased == 0
    put(tier, [name])
    assert [entry.leases for entry in tier.list_entries()] == [0]


# Looking and removing.


def test_what_is_removed_is_gone_and_to_look_counts_nothing(tier: Tier) -> None:
    names = new_names(4)
    put(tier, names)
    assert tier.remove_blocks(keys_of([names[0], new_name(), names[2]])) == 2
    assert tier.remove_blocks(keys_of([names[0]])) == 0
    assert is_here(tier, [names[0], *names]) == [False, False, True, False, True]
    assert (tier.counters.hits, tier.counters.misses, tier.counters.evictions) == (0, 0, 0)
    assert tier.read_usage().blocks == 2
    tier.remove_blocks(keys_of(names))
    assert tier.read_usage().blocks == 0


def test_usage_follows_what_is_there(make_tier: MakeTier) -> None:
    tier, other, names = make_tier(FORM, AMPLE), make_tier(FORM, AMPLE), new_names(10)
    before = tier.read_usage()
    assert (before.blocks, before.leased) == (0, 0)
    assert before.budget <= AMPLE
    put(tier, names)
    after = other.read_usage()
    assert after.blocks == 10
    assert after.bytes - before.bytes >= 10 * STORED_BYTES
    tier.remove_blocks(keys_of(names))
    assert other.read_usage() == before


def test_entries_and_stored_show_what_is_there_and_the_order_of_use(tier: Tier, place: Place) -> None:
    names = new_names(4)
    for name in names:
        put(tier, [name])
    is_here(tier, names[:1])
    entries = {entry.key: entry for entry in tier.list_entries()}
    assert entries.keys() == set(keys_of(names))
    assert entries[names[0].hash].used_s >= entries[names[3].hash].used_s >= entries[names[1].hash].used_s
    for name in names:
        assert entries[name.hash].bytes >= STORED_BYTES
        stored = read_stored(place, tier, name.hash)
        assert len(stored) == STORED_BYTES
        assert stored[HEADER_BYTES:] == content(name)
    assert (tier.counters.hits, tier.counters.misses) == (0, 0)


def test_tools_look_and_change_nothing_but_what_they_remove(tier: Tier, place: Place) -> None:
    names = new_names(3)
    put(tier, names)
    before = sorted((entry.key, entry.bytes, entry.leases) for entry in tier.list_entries())
    tool = place.attach()
    assert tool.read_usage() == tier.read_usage()
    assert sorted((entry.key, entry.bytes, entry.leases) for entry in tool.list_entries()) == before
    assert tool.remove_blocks(keys_of(names[:2])) == 2
    assert is_here(tier, names) == [False, False, True]
    tool.close()


def test_a_closed_tier_has_nothing_and_takes_nothing(make_tier: MakeTier) -> None:
    tier, other, names = make_tier(FORM, AMPLE), make_tier(FORM, AMPLE), new_names(2)
    put(tier, names[:1])
    tier.close()
    assert read(tier, names) == [None, None]
    assert put(tier, names) == is_here(tier, names) == [False, False]
    tier.lease_blocks("a job", keys_of(names), 600)
    tier.release_leases("a job", keys_of(names))
    assert tier.remove_blocks(keys_of(names)) == tier.read_usage().blocks == len(list(tier.list_entries())) == 0
    assert is_here(other, names) == [True, False]
    assert other.read_usage().leased == 0


# Threads.


def test_threads_at_once(make_tier: MakeTier) -> None:
    """Four threads on two tiers of a small budget put, get, lease, release and remove the same blocks."""
    tiers, names = [make_tier(FORM, SMALL) for _ in range(2)], new_names(20)

    def work(seed: int) -> None:
        rng, tier = random.Random(seed), tiers[seed % 2]
        for _ in range(60):
            some = rng.sample(names, 3)
            put(tier, some)
            for name, got in zip(some, read(tier, some), strict=True):
                assert got in (None, content(name))
            tier.lease_blocks(str(seed), keys_of(some), 600)
            tier.has_blocks(keys_of(some))
            if rng.random() < 0.2:
                tier.remove_blocks(keys_of(some[:1]))
            tier.release_leases(str(seed), keys_of(some))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    usage = tiers[0].read_usage()
    assert (usage.leased, usage.bytes <= SMALL) == (0, True)
    assert all(tier.counters.damaged == 0 for tier in tiers)
