"""The tiers of the host, in memory and on disk: what may happen between the steps of a put and of a get."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import failpoints
from penstock.kvstore.arena.check import check_integrity
from penstock.kvstore.arena.layout import Geometry
from penstock.kvstore.block import Block
from penstock.kvstore.tiers.host import HostTier
from sim.waiting import PATIENCE_S
from tests.kvstore.blocks import FORM, PAYLOAD_BYTES, block, content, is_here, keys_of, new_name, new_names, put, read

NUM_SLOTS = 4


@pytest.fixture(params=["shared", "disk"])
def which(request: pytest.FixtureRequest) -> str:
    """The name of the tier."""
    return str(request.param)


@pytest.fixture
def make_tier(tmp_path: Path, which: str) -> Iterator[Callable[[], HostTier]]:
    opened: list[HostTier] = []

    def make() -> HostTier:
        budget = Geometry(PAYLOAD_BYTES, NUM_SLOTS, on_disk=which == "disk").total_bytes
        opened.append(
            HostTier.open_disk(FORM, tmp_path / "kv", budget, str(tmp_path))
            if which == "disk"
            else HostTier.open_shared(FORM, "demo", budget, str(tmp_path))
        )
        return opened[-1]

    yield make
    for tier in opened:
        tier.close()


@pytest.fixture
def tier(make_tier: Callable[[], HostTier]) -> HostTier:
    return make_tier()


@pytest.fixture
def other(make_tier: Callable[[], HostTier]) -> HostTier:
    """Another worker's opening of the same arena."""
    return make_tier()


@pytest.fixture
def at_step(which: str) -> Iterator[Callable[[str, Callable[[], object]], None]]:
    """Does something the first time that a step is reached."""

    def arm(step: str, action: Callable[[], object]) -> None:
        failpoints.arm_action(f"{which}.{step}", action, passage=1)

    yield arm
    failpoints.disarm()


AtStep = Callable[[str, Callable[[], object]], None]


# A get.


@pytest.mark.parametrize("step", ["get.1", "get.2", "get.3"])
def test_a_slot_that_is_given_to_another_block_under_a_reader(
    tier: HostTier, other: HostTier, at_step: AtStep, step: str
) -> None:
    """A plain miss: nothing was damaged, and the new block stays."""
    name, usurpers = new_name(), new_names(NUM_SLOTS)
    put(tier, [name])
    at_step(step, lambda: put(other, usurpers))
    assert read(tier, [name]) == [None]
    assert (tier.counters.misses, tier.counters.damaged) == (1, 0)
    assert read(tier, usurpers) == [content(usurper) for usurper in usurpers]
    assert check_integrity(tier.arena) == []


def test_a_slot_that_is_given_away_and_back_under_a_reader(tier: HostTier, other: HostTier, at_step: AtStep) -> None:
    """The same block in the same slot is another generation."""
    name = new_name()
    put(tier, [name])

    def away_and_back() -> None:
        assert other.remove_blocks([name.hash]) == 1
        assert put(other, [name]) == [True]

    at_step("get.3", away_and_back)
    assert read(tier, [name]) == [None]
    assert (tier.counters.misses, tier.counters.damaged) == (1, 0)
    assert read(tier, [name]) == [content(name)]


def test_a_half_overwritten_slot_is_a_miss(tier: HostTier, other: HostTier, at_step: AtStep) -> None:
    """The reader comes when the next owner has copied its payload, and not yet written its header."""
    name, usurper = new_name(), new_name()
    fill = new_names(NUM_SLOTS - 1)
    put(tier, [name, *fill])

    def while_it_reads() -> None:
        other.remove_blocks([name.hash])
        (place,) = other.arena.allocate_slots([usurper.hash])
        assert place is not None
        other.arena.medium.write_payload(place.slot, memoryview(content(usurper)))
        other.arena.publish_slots([(place, usurper.hash, False)])

    at_step("get.1", while_it_reads)
    assert read(tier, [name]) == [None]
    assert tier.counters.damaged == 0
    assert is_here(tier, [name, *fill]) == [False, True, True, True]


# A put.


def test_the_same_block_from_two_writers_at_once(tier: HostTier, other: HostTier, at_step: AtStep) -> None:
    name = new_name()
    at_step("put.4", lambda: put(other, [name]))
    assert put(tier, [name]) == [True]
    assert tier.read_usage().blocks == 1
    assert read(tier, [name]) == [content(name)]
    assert check_integrity(tier.arena) == []


@pytest.mark.parametrize("step", ["put.1", "put.2", "put.3", "put.4"])
def test_nobody_finds_a_block_before_it_is_published(
    tier: HostTier, other: HostTier, at_step: AtStep, step: str
) -> None:
    name, seen = new_name(), list[bytes | None]()
    at_step(step, lambda: seen.extend(read(other, [name])))
    assert put(tier, [name]) == [True]
    assert seen == [None]
    assert other.counters.damaged == 0


def test_memory_that_changes_while_it_is_copied(tier: HostTier, at_step: AtStep) -> None:
    """The page tag says so: neither the old nor the new content is stored under the key."""
    name, is_valid, payload = new_name(), [True], bytearray(PAYLOAD_BYTES)

    def recycled() -> None:
        payload[:] = b"\1" * PAYLOAD_BYTES
        is_valid[0] = False

    at_step("put.1", recycled)
    assert tier.put([Block(name, memoryview(payload), lambda: is_valid[0])]) == [False]
    assert tier.read_usage().blocks == 0
    assert check_integrity(tier.arena) == []


def test_a_payload_of_another_size_is_the_caller_s_mistake(tier: HostTier) -> None:
    """It raises, and takes no slot away."""
    good = new_names(NUM_SLOTS)
    with pytest.raises(ValueError, match="bytes"):
        tier.put([Block(new_name(), memoryview(b"short"))])
    assert put(tier, good) == [True] * NUM_SLOTS
    assert tier.read_usage().blocks == NUM_SLOTS
    assert check_integrity(tier.arena) == []


def test_a_page_tag_that_raises_takes_no_slot_away(tier: HostTier) -> None:
    def broken() -> bool:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        tier.put([block(new_name(), is_valid=broken)])
    assert put(tier, new_names(NUM_SLOTS)) == [True] * NUM_SLOTS
    assert check_integrity(tier.arena) == []


def test_slots_that_others_write_are_not_taken(tier: HostTier, other: HostTier, at_step: AtStep) -> None:
    """Where all others are leased a block is refused; the writer keeps its slot."""
    names = new_names(NUM_SLOTS - 1)
    put(tier, names)
    tier.lease_blocks("a job", keys_of(names), 600)
    refused: list[bool] = []
    at_step("put.2", lambda: refused.extend(put(other, new_names(1))))
    mine = new_name()
    assert put(tier, [mine]) == [True]
    assert refused == [False]
    assert other.counters.refused == 1
    assert read(tier, [mine]) == [content(mine)]


# Closing.


def test_closing_waits_for_what_is_being_written(tier: HostTier, other: HostTier) -> None:
    name, begun, go_on = new_name(), threading.Event(), threading.Event()

    def is_valid() -> bool:
        begun.set()
        return go_on.wait(PATIENCE_S)

    stored: list[bool] = []
    writer = threading.Thread(target=lambda: stored.extend(tier.put([block(name, is_valid=is_valid)])))
    writer.start()
    assert begun.wait(PATIENCE_S)
    closer = threading.Thread(target=tier.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    other.arena.reclaim_stale()
    assert [state for state in other.arena.tables.state.tolist() if state] == [1]
    go_on.set()
    closer.join(PATIENCE_S)
    writer.join(PATIENCE_S)
    assert stored == [True]
    assert read(other, [name]) == [content(name)]


def test_a_closed_tier_has_nothing_and_takes_nothing(tier: HostTier, other: HostTier) -> None:
    names = new_names(2)
    put(tier, names[:1])
    tier.close()
    assert read(tier, names) == [None, None]
    assert put(tier, names) == [False, False]
    assert is_here(tier, names) == [False, False]
    tier.lease_blocks("a job", keys_of(names), 600)
    tier.release_leases("a job", keys_of(names))
    assert tier.remove_blocks(keys_of(names)) == 0
    assert list(tier.list_entries()) == []
    assert tier.read_stored(names[0].hash) is None
    assert tier.read_usage().blocks == 0
    assert is_here(other, names) == [True, False]
    assert other.read_usage().leased == 0
