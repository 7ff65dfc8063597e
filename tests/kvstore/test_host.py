"""The tiers of the host, in memory and on disk: any sequence of calls, and what may happen between their steps."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock import failpoints
from penstock.kvstore.arena.check import check_integrity
from penstock.kvstore.arena.layout import W_DIRTY
from penstock.kvstore.block import Block, BlockKey
from penstock.kvstore.tiers.host import HostTier
from sim.waiting import PATIENCE_S
from tests.kvstore.blocks import (
    FORM,
    PAYLOAD_BYTES,
    TAG,
    block,
    content,
    is_here,
    make_form,
    new_name,
    new_names,
    put,
    read,
)
from tests.kvstore.places import open_host, overwrite_block, peek_slot, wait_until_mapped

NUM_SLOTS = 4

# Any sequence of calls

KEYS = st.integers(0, 6)
PICKS = st.integers(0, 20)
"""A key, or mostly one of those that are there: see `pick`."""
OWNERS = st.sampled_from(["one", "two", "three"])
TIERS = st.integers(0, 1)
NAMES = [BlockKey(bytes([number % 3]) * 8 + bytes([number]) * 24, 16, TAG) for number in range(10)]
"""Their keys collide in the index."""


class ArenaMachine(RuleBasedStateMachine):
    """Two openings that change an arena by turns, and the plainest model of it.

    The model: keys in the order of their use, and the owners of leases on each.
    """

    medium = "shared"

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.tiers = [self.open(), self.open()]
        self.order: list[int] = []
        self.leases: dict[int, set[str]] = {}

    def open(self) -> HostTier:
        return open_host(self.medium, Path(self.directory.name), FORM, NUM_SLOTS)

    @initialize()
    def fill(self) -> None:
        self.put_some(0, list(range(NUM_SLOTS)))

    def pick(self, number: int) -> int:
        """The key that a number stands for, or that of its place in the order of use."""
        return number if number < 7 else self.order[number % len(self.order)] if self.order else number % 7

    def use(self, key: int) -> None:
        self.order.remove(key)
        self.order.append(key)

    @rule(tier=TIERS, keys=st.lists(KEYS, min_size=1, max_size=6))
    def put_some(self, tier: int, keys: list[int]) -> None:
        for key in keys:
            self.put(tier, key, is_valid=True)

    @rule(tier=TIERS, key=KEYS, is_valid=st.booleans())
    def put(self, tier: int, key: int, is_valid: bool) -> None:
        stored = self.tiers[tier].put([block(NAMES[key], is_valid=lambda: is_valid)])
        if key in self.order:
            self.use(key)
            assert stored == [True]
            return
        if len(self.order) == NUM_SLOTS:
            victim = next((other for other in self.order if not self.leases.get(other)), None)
            if victim is None:
                assert stored == [False]
                return
            self.order.remove(victim)
        assert stored == [is_valid]
        if is_valid:
            self.order.append(key)

    @rule(tier=TIERS, numbers=st.lists(PICKS, max_size=4))
    def get(self, tier: int, numbers: list[int]) -> None:
        keys = [self.pick(number) for number in numbers]
        found = read(self.tiers[tier], [NAMES[key] for key in keys])
        assert found == [content(NAMES[key]) if key in self.order else None for key in keys]
        for key in keys:
            if key in self.order:
                self.use(key)

    @rule(tier=TIERS, number=PICKS)
    def has(self, tier: int, number: int) -> None:
        key = self.pick(number)
        assert self.tiers[tier].has_blocks([NAMES[key].hash]) == [key in self.order]
        if key in self.order:
            self.use(key)

    @rule(tier=TIERS, owner=OWNERS, numbers=st.lists(PICKS, max_size=3))
    def lease(self, tier: int, owner: str, numbers: list[int]) -> None:
        keys = [self.pick(number) for number in numbers]
        self.tiers[tier].lease_blocks(owner, [NAMES[key].hash for key in keys], 600)
        for key in keys:
            if key in self.order:
                self.leases.setdefault(key, set()).add(owner)

    @rule(tier=TIERS, owner=OWNERS, numbers=st.lists(PICKS, max_size=3))
    def release(self, tier: int, owner: str, numbers: list[int]) -> None:
        keys = [self.pick(number) for number in numbers]
        self.tiers[tier].release_leases(owner, [NAMES[key].hash for key in keys])
        for key in keys:
            self.leases.get(key, set()).discard(owner)

    @rule(tier=TIERS, owner=OWNERS, number=PICKS)
    def lease_that_is_over(self, tier: int, owner: str, number: int) -> None:
        key = self.pick(number)
        self.tiers[tier].lease_blocks(owner, [NAMES[key].hash], 0)
        self.tiers[tier].arena.reclaim_stale()
        self.leases.get(key, set()).discard(owner)

    @rule(tier=TIERS, number=PICKS)
    def remove(self, tier: int, number: int) -> None:
        key = self.pick(number)
        assert self.tiers[tier].remove_blocks([NAMES[key].hash]) == (key in self.order)
        self.forget(key)

    @rule(tier=TIERS, number=PICKS, at=st.integers(0, PAYLOAD_BYTES + 143))
    def damage(self, tier: int, number: int, at: int) -> None:
        key = self.pick(number)
        if overwrite_block(
            self.tiers[tier], NAMES[key].hash, lambda stored: stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
        ):
            assert read(self.tiers[tier], [NAMES[key]]) == [None]
            self.forget(key)

    def forget(self, key: int) -> None:
        if key in self.order:
            self.order.remove(key)
        self.leases.pop(key, None)

    @rule(tier=TIERS)
    def somebody_died(self, tier: int) -> None:
        """The tables that follow from the others are made again."""
        self.tiers[tier].arena.tables.words[W_DIRTY] = 1

    @rule(tier=TIERS)
    def reopen(self, tier: int) -> None:
        self.tiers[tier].close()
        self.tiers[tier] = self.open()

    @invariant()
    def everything_agrees(self) -> None:
        entries = sorted(self.tiers[0].list_entries(), key=lambda entry: entry.used_s)
        seen = {next(key for key in range(10) if NAMES[key].hash == entry.key): entry.leases for entry in entries}
        assert seen == {key: len(self.leases.get(key, ())) for key in self.order}
        usage = self.tiers[1].read_usage()
        assert (usage.blocks, usage.leased) == (len(self.order), sum(map(bool, self.leases.values())))
        assert check_integrity(self.tiers[0].arena) == []

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        self.directory.cleanup()


class DiskMachine(ArenaMachine):
    """The same, with tables that may be lost: then the order is that of the slots, and no leases are left."""

    medium = "disk"

    @rule()
    def host_started_anew(self) -> None:
        slots = {key: peek_slot(self.tiers[0], NAMES[key].hash) for key in self.order}
        for tier in self.tiers:
            tier.close()
        for path in Path(self.directory.name).glob("penstock-kvdisk-*"):
            path.unlink()
        self.tiers = [self.open(), self.open()]
        for tier in self.tiers:
            assert wait_until_mapped(tier, PATIENCE_S)
        self.order.sort(key=lambda key: -1 if (slot := slots[key]) is None else slot)
        self.leases.clear()


for machine in (ArenaMachine, DiskMachine):
    machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
test_any_sequence_in_memory = ArenaMachine.TestCase
test_any_sequence_on_disk = DiskMachine.TestCase


# Between the steps of calls


@pytest.fixture(params=["shared", "disk"])
def which(request: pytest.FixtureRequest) -> str:
    """The name of the tier."""
    return str(request.param)


@pytest.fixture
def openings(tmp_path: Path, which: str, exits: ExitStack) -> list[HostTier]:
    """Two openings of an arena, as of two workers."""
    return [exits.enter_context(closing(open_host(which, tmp_path, FORM, NUM_SLOTS))) for _ in range(2)]


@pytest.fixture
def tier(openings: list[HostTier]) -> HostTier:
    return openings[0]


@pytest.fixture
def other(openings: list[HostTier]) -> HostTier:
    return openings[1]


AtStep = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def at_step(which: str) -> Iterator[AtStep]:
    """Does something the first time that a step is reached."""
    yield lambda step, action: failpoints.arm_action(f"{which}.{step}", action, passage=1)
    failpoints.disarm()


def test_the_order_of_use_is_one_of_the_host(tier: HostTier) -> None:
    """Even many uses in one tick of the clock have an order."""
    put(tier, NAMES[:4])
    for _ in range(200):
        is_here(tier, NAMES[:4])
    assert len({used_ns for _, used_ns, _ in tier.arena.list_blocks()}) == 4


def take_the_slot(other: HostTier, name: BlockKey) -> list[BlockKey]:
    put(other, usurpers := new_names(NUM_SLOTS))
    return usurpers


def give_it_away_and_back(other: HostTier, name: BlockKey) -> list[BlockKey]:
    """The same block in the same slot is another generation."""
    assert other.remove_blocks([name.hash]) == 1
    assert put(other, [name]) == [True]
    return [name]


def overwrite_half(other: HostTier, name: BlockKey) -> list[BlockKey]:
    """The next owner has copied its payload, and not yet written its header."""
    others = new_names(NUM_SLOTS - 1)
    put(other, others)
    other.remove_blocks([name.hash])
    usurper = new_name()
    (place,) = other.arena.allocate_slots([usurper.hash])
    assert place is not None
    other.arena.medium.write_payload(place.slot, memoryview(content(usurper)))
    other.arena.publish_slots([(place, usurper.hash, False)])
    return others


@pytest.mark.parametrize(
    ("step", "action"),
    [
        *((f"get.{number}", take_the_slot) for number in (1, 2, 3)), ("get.3", give_it_away_and_back),
        ("get.1", overwrite_half),
    ],
)  # fmt: skip
def test_a_slot_that_changes_under_a_reader_is_a_plain_miss(
    tier: HostTier, other: HostTier, at_step: AtStep, step: str, action: Callable[[HostTier, BlockKey], list[BlockKey]]
) -> None:
    """Nothing was damaged, and the blocks that came meanwhile stay."""
    name, there = new_name(), list[BlockKey]()
    put(tier, [name])
    at_step(step, lambda: there.extend(action(other, name)))
    assert read(tier, [name]) == [None]
    assert (tier.counters.misses, tier.counters.damaged) == (1, 0)
    assert read(tier, there) == [content(one) for one in there]
    assert is_here(tier, [name]) == [name in there]
    assert check_integrity(tier.arena) == []


@pytest.mark.parametrize("step", ["put.1", "put.2", "put.3", "put.4"])
def test_nobody_finds_a_block_before_it_is_published_and_two_writers_store_it_once(
    tier: HostTier, other: HostTier, at_step: AtStep, step: str
) -> None:
    name, seen = new_name(), list[bytes | None]()

    def read_and_put() -> None:
        seen.extend(read(other, [name]))
        if step == "put.4":
            put(other, [name])

    at_step(step, read_and_put)
    assert put(tier, [name]) == [True]
    assert (seen, other.counters.damaged, tier.read_usage().blocks) == ([None], 0, 1)
    assert read(tier, [name]) == [content(name)]
    assert check_integrity(tier.arena) == []


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


def test_calls_that_raise_take_no_slot_away(tier: HostTier) -> None:
    """A payload or a target of another size is the caller's mistake; a page tag may be broken."""

    def broken() -> bool:
        raise RuntimeError("broken")

    with pytest.raises(ValueError, match="bytes"):
        tier.put([Block(new_name(), memoryview(b"short"))])
    with pytest.raises(RuntimeError):
        tier.put([block(new_name(), is_valid=broken)])
    good = new_names(NUM_SLOTS)
    assert put(tier, good) == [True] * NUM_SLOTS
    with pytest.raises(ValueError, match="bytes"):
        read(tier, good, make_form(payload_bytes=10))
    assert tier.read_usage().blocks == NUM_SLOTS
    assert check_integrity(tier.arena) == []


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
