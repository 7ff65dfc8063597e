"""An arena, in memory or on disk, that two openings change by turns does what the plainest model of it does."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.kvstore.arena.check import check_integrity
from penstock.kvstore.arena.layout import W_DIRTY, Geometry
from penstock.kvstore.block import BlockKey
from penstock.kvstore.tiers.host import HostTier
from sim.waiting import PATIENCE_S
from tests.kvstore.blocks import PAYLOAD_BYTES, TAG, block, content, make_form, read
from tests.kvstore.places import overwrite_block

NUM_SLOTS = 4
KEYS = st.integers(0, 6)
PICKS = st.integers(0, 20)
"""A key, or mostly one of those that are there: see `pick`."""
OWNERS = st.sampled_from(["one", "two", "three"])
TIERS = st.integers(0, 1)
FORM = make_form("a machine")
NAMES = [BlockKey(bytes([number % 3]) * 8 + bytes([number]) * 24, 16, TAG) for number in range(10)]
"""Their keys collide in the index."""


def open_machine(directory: Path, medium: str) -> HostTier:
    budget = Geometry(PAYLOAD_BYTES, NUM_SLOTS, on_disk=medium == "disk").total_bytes
    if medium == "disk":
        return HostTier.open_disk(FORM, directory / "kv", budget, str(directory))
    return HostTier.open_shared(FORM, "demo", budget, str(directory))


class ArenaMachine(RuleBasedStateMachine):
    """The model: keys in the order of their use, and the owners of leases on each."""

    medium = "shared"

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.tiers = [self.open(), self.open()]
        self.order: list[int] = []
        self.leases: dict[int, set[str]] = {}

    def open(self) -> HostTier:
        return open_machine(Path(self.directory.name), self.medium)

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
        stored = self.tiers[tier].put([block(NAMES[key], FORM, lambda: is_valid)])
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
        found = read(self.tiers[tier], [NAMES[key] for key in keys], FORM)
        assert found == [content(NAMES[key], FORM) if key in self.order else None for key in keys]
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
        if overwrite_block(self.tiers[tier], NAMES[key].hash, lambda stored: flip_bit(stored, at)):
            assert read(self.tiers[tier], [NAMES[key]], FORM) == [None]
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
        refs = {key: self.tiers[0].arena.peek_slot(NAMES[key].hash) for key in self.order}
        for tier in self.tiers:
            tier.close()
        for path in Path(self.directory.name).glob("penstock-kvdisk-*"):
            path.unlink()
        self.tiers = [self.open(), self.open()]
        for tier in self.tiers:
            assert tier.arena.allocator.wait_until_mapped(PATIENCE_S)
        self.order.sort(key=lambda key: refs[key].slot if refs[key] else -1)  # type: ignore[union-attr]
        self.leases.clear()


def flip_bit(stored: bytes, at: int) -> bytes:
    return stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]


for machine in (ArenaMachine, DiskMachine):
    machine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
test_any_sequence_in_memory = ArenaMachine.TestCase
test_any_sequence_on_disk = DiskMachine.TestCase


@pytest.mark.parametrize("medium", ["shared", "disk"])
def test_the_order_of_use_is_one_of_the_host(tmp_path: Path, medium: str) -> None:
    """Even many uses in one tick of the clock have an order."""
    tier = open_machine(tmp_path, medium)
    tier.put([block(name, FORM) for name in NAMES[:4]])
    for _ in range(200):
        tier.has_blocks([name.hash for name in NAMES[:4]])
    used = [used_ns for _, used_ns, _ in tier.arena.list_blocks()]
    assert len(set(used)) == 4
    tier.close()
