"""The slot table of an arena, its free list and eviction. Used under the metadata lock."""

import numpy as np

from penstock.failpoints import failpoint
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
        self._tables, self.words = tables, tables.words
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
        tables.owner[slot] = owner
        failpoint("shared.put.1.1")
        tables.state[slot] = WRITING
        failpoint("shared.put.1.2")
        return slot

    def publish_slot(self, slot: int) -> None:
        """Make a written block findable."""
        self._tables.state[slot] = READY
        failpoint("shared.put.5.1")
        self.index.insert_slot(slot)
        self.words[W_NUM_READY] += 1
        failpoint("shared.put.5.2")

    def free_slot(self, slot: int) -> None:
        """Free a slot whose block is not published."""
        self._tables.state[slot] = FREE
        self._push_free(slot)

    def forget_slot(self, slot: int) -> None:
        """Remove a READY block, leased or not."""
        self._clear_slot(slot)
        self._push_free(slot)
        failpoint("shared.forget.3")

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

    def add_slots(self, first: int, count: int) -> None:
        """Add slots that have memory now to the free list."""
        for slot in range(first + count - 1, first - 1, -1):
            self._push_free(slot)
        failpoint("shared.allocate.3")
        self.words[W_ALLOCATED] = first + count

    def reclaim_slots(self, owner: int) -> None:
        """Free the slots that a dead owner was writing."""
        tables = self._tables
        for slot in np.flatnonzero((tables.state_array == WRITING) & (tables.owner_array == owner)).tolist():
            self.free_slot(slot)

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
        self.leases.rebuild_counts()
        failpoint("shared.rebuild.1")
        words[W_FREE_HEAD], words[W_NUM_FREE] = NO_SLOT, 0
        states = tables.state_array[: words[W_ALLOCATED]]
        for slot in np.flatnonzero(states == FREE).tolist()[::-1]:
            self._push_free(slot)
        failpoint("shared.rebuild.2")
        self.index.rebuild_index()
        words[W_NUM_READY] = int(np.count_nonzero(states == READY))
        failpoint("shared.rebuild.3")

    def _clear_slot(self, slot: int) -> None:
        self.index.delete_slot(slot)
        failpoint("shared.forget.1")
        self.leases.clear_slot(slot)
        self._tables.state[slot] = FREE
        self.words[W_NUM_READY] -= 1
        failpoint("shared.forget.2")

    def _choose_victims(self) -> bool:
        """Choose a few blocks to evict next, so that not every eviction scans all slots."""
        tables = self._tables
        slots = np.flatnonzero((tables.state_array == READY) & (tables.lease_count_array == 0))
        used = tables.used_array[slots]
        count = max(16, tables.geometry.num_slots // 64)
        if len(slots) > count:
            oldest = np.argpartition(used, count)[:count]
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
