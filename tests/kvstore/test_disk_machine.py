"""A directory that two tiers change by turns does what the plainest model of it does."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from penstock.kvstore.tiers.disk import DiskTier

from penstock.kvstore.block import HEADER_BYTES, BlockKey
from tests.kvstore.blocks import TAG, block, content, make_form, read

SIZES = [1, 2]
"""Pages a block has, by model: they share the budget."""
FORMS = [make_form(f"model {pages}", pages * 4096 - HEADER_BYTES) for pages in SIZES]
NUM_PAGES = 6
NAMES = [BlockKey(bytes([number]) * 32, 16, TAG) for number in range(8)]
KEYS, TIERS = st.integers(0, 7), st.integers(0, 1)
MANY = st.sampled_from([range(8), range(0, 8, 2), range(3)]) | st.lists(KEYS, max_size=4)
OWNERS = st.sampled_from(["one", "two"])


class DiskMachine(RuleBasedStateMachine):
    """The model: the pages of each block that is there, and the owners of leases on it. Key n is one of model n % 2."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.tiers = [self.open(0), self.open(1)]
        self.here: set[int] = set()
        self.leases: dict[int, set[str]] = {}

    def open(self, which: int) -> DiskTier:
        return DiskTier.open(FORMS[which], Path(self.directory.name), NUM_PAGES * 4096)

    def pages(self) -> int:
        return sum(SIZES[key % 2] for key in self.here)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=8, unique=True))
    def put_some(self, keys: list[int]) -> None:
        for key in keys:
            self.put(key, is_valid=True)

    @rule(key=KEYS, is_valid=st.booleans())
    def put(self, key: int, is_valid: bool) -> None:
        """What must go, goes; nothing does that is leased, or that there was room for."""
        tier, form = self.tiers[key % 2], FORMS[key % 2]
        (stored,) = tier.put([block(NAMES[key], form, lambda: is_valid)])
        if key in self.here:
            assert stored
            return
        size, kept = SIZES[key % 2], {key for key in self.here if self.leases.get(key)}
        fits = sum(SIZES[other % 2] for other in kept) + size <= NUM_PAGES
        assert stored == (fits and is_valid)
        left = {other for other in self.here if NAMES[other].hash in self.listed()}
        assert kept <= left
        evicted = sorted(SIZES[other % 2] for other in self.here - left)
        if evicted and fits:
            assert self.pages() + size - sum(evicted) + evicted[-1] > NUM_PAGES, "the last one need not have gone"
        self.here = left | ({key} if stored else set())

    @rule(which=TIERS, keys=st.lists(KEYS, max_size=4))
    def get(self, which: int, keys: list[int]) -> None:
        keys = [key for key in keys if key % 2 == which]
        found = read(self.tiers[which], [NAMES[key] for key in keys], FORMS[which])
        assert found == [content(NAMES[key], FORMS[which]) if key in self.here else None for key in keys]

    @rule(which=TIERS, key=KEYS)
    def has(self, which: int, key: int) -> None:
        assert self.tiers[which].has_blocks([NAMES[key].hash]) == [key in self.here]

    @rule(which=TIERS, owner=OWNERS, keys=MANY, seconds=st.sampled_from([600, 600, 0]))
    def lease(self, which: int, owner: str, keys: Sequence[int], seconds: float) -> None:
        self.tiers[which].lease_blocks(owner, [NAMES[key].hash for key in keys], seconds)
        for key in self.here.intersection(keys):
            owners = self.leases.setdefault(key, set())
            (owners.add if seconds else owners.discard)(owner)

    @rule(which=TIERS, owner=OWNERS, keys=MANY)
    def release(self, which: int, owner: str, keys: Sequence[int]) -> None:
        self.tiers[which].release_leases(owner, [NAMES[key].hash for key in keys])
        for key in keys:
            self.leases.get(key, set()).discard(owner)

    @rule(which=TIERS, key=KEYS)
    def remove(self, which: int, key: int) -> None:
        assert self.tiers[which].remove_blocks([NAMES[key].hash]) == (key in self.here)
        self.forget(key)

    @rule(key=KEYS, length=st.integers(0, 9000))
    def damage(self, key: int, length: int) -> None:
        """Files that are cut off, or grow, are found and gone, and the usage is right."""
        path = Path(self.directory.name, NAMES[key].hash.hex()[:2], f"{NAMES[key].hash.hex()}.kv")
        if key in self.here and length != path.stat().st_size:
            os.truncate(path, length)
            assert read(self.tiers[key % 2], [NAMES[key]], FORMS[key % 2]) == [None]
            self.forget(key)

    def forget(self, key: int) -> None:
        self.here.discard(key)
        self.leases.pop(key, None)

    @rule()
    def somebody_died(self) -> None:
        """The usage is not known."""
        Path(self.directory.name, "lock").write_bytes(b"torn")

    @rule(which=TIERS)
    def reopen(self, which: int) -> None:
        self.tiers[which].close()
        self.tiers[which] = self.open(which)

    def listed(self) -> dict[bytes, int]:
        return {entry.key: entry.leases for entry in self.tiers[0].list_entries()}

    @invariant()
    def everything_agrees(self) -> None:
        assert self.listed() == {NAMES[key].hash: len(self.leases.get(key, ())) for key in self.here}
        usage = self.tiers[1].read_usage()
        assert usage.bytes == self.pages() * 4096 <= usage.budget
        assert (usage.blocks, usage.leased) == (len(self.here), sum(map(bool, self.leases.values())))
        assert self.tiers[0].check_integrity() == []
        assert all(tier.counters.errors == 0 for tier in self.tiers)

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        self.directory.cleanup()


DiskMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
test_any_sequence = pytest.mark.timeout(120)(DiskMachine.TestCase)
