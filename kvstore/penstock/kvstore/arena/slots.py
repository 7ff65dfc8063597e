"""The slot table of an arena, its free list and eviction. Used under the metadata lock."""

import time
from collections.abc import Sequence

import numpy as np

from penstock.failpoints import tier_failpoint
from penstock.kvstore.arena.index import SlotIndex
from penstock.kvstore.arena.layout import (
    FREE,
    NO_SLOT,
    READY,
    W_ALLOCATED,
    W_FREE_HEAD,
    W_NUM_FREE,
    W_NUM_READY,
    W_NUM_UNLEASED,
    WRITING,
    Tables,
)
from penstock.kvstore.arena.leases import LeaseTable


class SlotTable:
    """The slot table of an arena, with the index and the leases that go with it."""

    def __init__(self, tables: Tables) -> None:
        self._tables, self.words, self.tier = tables, tables.words, tables.tier
        self.index, self.leases = SlotIndex(tables), LeaseTable(tables)
        self._victims: list[tuple[int, int]] = []
        """Slots to evict next and the time of their last use; the last one goes first."""
        self._chosen_at = 0

    def allocate_slot(self, key: bytes, owner: int) -> int:
        """Return a free slot to write this block to, or -1."""
        tables = self._tables
        slot = self._pop_free()
        if slot < 0:
            return -1
        start = 32 * slot
        tables.key[start : start + 32] = key
        tables.generation[slot] += 1
        tables.owner[slot], tables.used[slot] = owner, 0
        tier_failpoint(self.tier, "put.1.1")
        tables.state[slot] = WRITING
        tier_failpoint(self.tier, "put.1.2")
        return slot

    def publish_slot(self, slot: int) -> None:
        """Make a written block findable."""
        self._tables.state[slot] = READY
        tier_failpoint(self.tier, "put.5.1")
        self.index.insert_slot(slot)
        self.words[W_NUM_READY] += 1
        tier_failpoint(self.tier, "put.5.2")

    def free_slot(self, slot: int) -> None:
        """Free a slot whose block is not published."""
        self._tables.state[slot] = FREE
        self._push_free(slot)

    def forget_slot(self, slot: int) -> None:
        """Remove a READY block, leased or not."""
        self._clear_slot(slot)
        self._push_free(slot)
        tier_failpoint(self.tier, "forget.3")

    def evict_oldest(self) -> bool:
        """Evict the least recently used block without a lease. Return False if there is none."""
        tables, words = self._tables, self.words
        if self._chosen_at != words[W_NUM_UNLEASED]:
            self._victims.clear()
        while self._victims or self._choose_victims():
            slot, used = self._victims.pop()
            if tables.state[slot] == READY and tables.used[slot] == used and not tables.lease_count[slot]:
                self.forget_slot(slot)
                return True
        return False

    def adopt_slots(self, first: int, keys: Sequence[bytes | None]) -> list[int]:
        """Add slots of a file that were written before these tables were made: each with its block's key, or None.

        They count as used before all others. Return the slots of blocks that are in another slot, too.
        """
        tables, words, doubled = self._tables, self.words, list[int]()
        for slot, key in reversed(list(enumerate(keys, first))):
            if key is None or self.index.find_slot(key) >= 0:
                self._push_free(slot)
                doubled += [slot] if key is not None else []
                continue
            tables.key[32 * slot : 32 * slot + 32] = key
            tables.generation[slot] += 1
            tables.used[slot] = slot + 1
            tables.state[slot] = READY
            self.index.insert_slot(slot)
            words[W_NUM_READY] += 1
        tier_failpoint(self.tier, "allocate.3")
        words[W_NUM_UNLEASED] += 1
        words[W_ALLOCATED] = first + len(keys)
        return doubled

    def find_slots_of(self, owner: int) -> list[int]:
        """Return the slots that an owner is writing."""
        tables = self._tables
        slots: list[int] = np.flatnonzero((tables.state_array == WRITING) & (tables.owner_array == owner)).tolist()
        return slots

    def find_writers(self) -> list[int]:
        """Return the owners of slots that are being written."""
        tables, words = self._tables, self.words
        if words[W_ALLOCATED] == words[W_NUM_FREE] + words[W_NUM_READY]:
            return []
        owners: list[int] = np.unique(tables.owner_array[tables.state_array == WRITING]).tolist()
        return owners

    def rebuild_tables(self) -> None:
        """Rebuild free list, leases and index from the slot table, after a process crashed while changing them."""
        tables, words = self._tables, self.words
        tables.state_array[words[W_ALLOCATED] :] = FREE  # slots that were being adopted
        self.leases.rebuild_counts()
        tier_failpoint(self.tier, "rebuild.1")
        words[W_FREE_HEAD], words[W_NUM_FREE] = NO_SLOT, 0
        states = tables.state_array[: words[W_ALLOCATED]]
        for slot in np.flatnonzero(states == FREE).tolist()[::-1]:
            self._push_free(slot)
        tier_failpoint(self.tier, "rebuild.2")
        self.index.rebuild_index()
        words[W_NUM_READY] = int(np.count_nonzero(states == READY))
        tier_failpoint(self.tier, "rebuild.3")

    def _clear_slot(self, slot: int) -> None:
        self.index.delete_slot(slot)
        tier_failpoint(self.tier, "forget.1")
        self.leases.clear_slot(slot)
        self._tables.state[slot] = FREE
        self.words[W_NUM_READY] -= 1
        tier_failpoint(self.tier, "forget.2")

    def _choose_victims(self) -> bool:
        """Choose a few blocks to evict next, so that not every eviction scans all slots."""
        tables = self._tables
        slots = np.flatnonzero((tables.state_array == READY) & (tables.lease_count_array == 0))
        used = tables.used_array[slots]
        # Of retained blocks one at most, as blocks that are stored meanwhile go before the next one.
        num_unretained = int(np.count_nonzero(used <= time.monotonic_ns()))
        count = min(max(16, tables.geometry.num_slots // 64), max(1, num_unretained))
        if len(slots) > count:
            oldest = np.argpartition(used, count - 1)[:count]
            slots, used = slots[oldest], used[oldest]
        order = np.argsort(used)[::-1]
        self._victims = list(zip(slots[order].tolist(), used[order].tolist(), strict=True))
        self._chosen_at = self.words[W_NUM_UNLEASED]
        return bool(self._victims)

    def _push_free(self, slot: int) -> None:
        words = self.words
        self._tables.next_free[slot] = words[W_FREE_HEAD]
        words[W_FREE_HEAD] = slot
        words[W_NUM_FREE] += 1

    def _pop_free(self) -> int:
        words = self.words
        slot = words[W_FREE_HEAD]
        if slot == NO_SLOT:
            return -1
        words[W_FREE_HEAD] = self._tables.next_free[slot]
        words[W_NUM_FREE] -= 1
        return slot
