"""The lease table of an arena: which blocks are kept for whom, and until when. Used under the metadata lock.

A lease is one row: owner (a hash of its name), slot, generation, end (nanoseconds of the host's monotonic clock; 0: the
row is free). The number of leases of a slot follows from the rows. The table is bounded: without a free row, no lease.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from penstock.failpoints import tier_failpoint
from penstock.kvstore.arena.layout import NEVER, READY, W_LEASE_TOP, W_NEXT_LEASE_END, W_NUM_UNLEASED, Tables

log = logging.getLogger(__name__)


class LeaseTable:
    """The lease table of an arena."""

    def __init__(self, tables: Tables) -> None:
        self._tables, self._words = tables, tables.words
        self._warned = False

    def lease_slots(self, owner: str, slots: Sequence[int], seconds: float) -> None:
        """Lease READY slots. If the owner has a lease already, its end moves."""
        tables, now = self._tables, time.monotonic_ns()
        end = min(now + int(seconds * 1e9), NEVER - 1)
        hashed, rows, holes = _hash_owner(owner), self._find_rows(owner), self._free_rows()
        for slot in slots:
            row = rows.get(slot)
            if row is None:
                row = next(holes, None)
                if row is None:
                    self._warn_once()
                    continue
                rows[slot] = row
                tables.lease_owner[row], tables.lease_slot[row] = hashed, slot
                tables.lease_generation[row] = tables.generation[slot]
                self._words[W_LEASE_TOP] = max(self._words[W_LEASE_TOP], row + 1)
                tables.lease_end[row] = end
                tier_failpoint(self._tables.tier, "lease.1")
                tables.lease_count[slot] += 1
            else:
                tables.lease_end[row] = end
            self._words[W_NEXT_LEASE_END] = min(self._words[W_NEXT_LEASE_END], end)
            tier_failpoint(self._tables.tier, "lease.2")

    def release_slots(self, owner: str, slots: Sequence[int]) -> None:
        """End the owner's leases on these slots."""
        rows = self._find_rows(owner)
        for slot in slots:
            row = rows.pop(slot, None)
            if row is not None:
                self._tables.lease_end[row] = 0
                tier_failpoint(self._tables.tier, "release.1")
                self._decrement_count(slot)
                tier_failpoint(self._tables.tier, "release.2")

    def clear_slot(self, slot: int) -> None:
        """Remove all leases on the block in this slot."""
        tables = self._tables
        if tables.lease_count[slot]:
            top = self._words[W_LEASE_TOP]
            tables.lease_end_array[:top][tables.lease_slot_array[:top] == slot] = 0
            tables.lease_count[slot] = 0

    def has_expired(self) -> bool:
        """Return whether some lease may have expired."""
        return time.monotonic_ns() >= self._words[W_NEXT_LEASE_END]

    def remove_expired(self) -> None:
        """Remove expired leases."""
        tables, top = self._tables, self._words[W_LEASE_TOP]
        ends = tables.lease_end_array[:top]
        over = np.flatnonzero((ends > 0) & (ends <= time.monotonic_ns()))
        slots = tables.lease_slot_array[over].tolist()
        ends[over] = 0
        for slot in slots:
            self._decrement_count(slot)
        self._update_bounds()

    def rebuild_counts(self) -> None:
        """Remove leases of blocks that are gone, and count the leases of each slot again."""
        tables = self._tables
        ends, slots = tables.lease_end_array, tables.lease_slot_array
        rows = np.flatnonzero(ends)
        held = slots[rows]
        valid = (tables.state_array[held] == READY) & (
            tables.generation_array[held] == tables.lease_generation_array[rows]
        )
        ends[rows[~valid]] = 0
        tables.lease_count_array[:] = np.bincount(held[valid], minlength=tables.geometry.num_slots)
        self._words[W_LEASE_TOP] = tables.geometry.num_leases
        self._words[W_NUM_UNLEASED] += 1
        self._update_bounds()

    def _update_bounds(self) -> None:
        """Update how far the table is in use, and when the next lease ends."""
        ends = self._tables.lease_end_array[: self._words[W_LEASE_TOP]]
        rows = np.flatnonzero(ends)
        self._words[W_LEASE_TOP] = int(rows[-1]) + 1 if len(rows) else 0
        self._words[W_NEXT_LEASE_END] = int(ends[rows].min()) if len(rows) else NEVER

    def _decrement_count(self, slot: int) -> None:
        self._tables.lease_count[slot] -= 1
        if not self._tables.lease_count[slot]:
            self._words[W_NUM_UNLEASED] += 1

    def _find_rows(self, owner: str) -> dict[int, int]:
        """Return the owner's leases: slot → row."""
        tables, top = self._tables, self._words[W_LEASE_TOP]
        mine = (tables.lease_owner_array[:top] == _hash_owner(owner)) & (tables.lease_end_array[:top] > 0)
        rows = np.flatnonzero(mine)
        return dict(zip(tables.lease_slot_array[rows].tolist(), rows.tolist(), strict=True))

    def _free_rows(self) -> Iterator[int]:
        """Yield the free rows: first those between others, then those after all."""
        tables, top = self._tables, self._words[W_LEASE_TOP]
        between = np.flatnonzero(tables.lease_end_array[:top] == 0).tolist()
        return chain(between, range(top, tables.geometry.num_leases))

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the lease table of the %s tier is full: some leased blocks may be evicted", self._tables.tier)


def _hash_owner(owner: str) -> int:
    return int.from_bytes(hashlib.blake2b(owner.encode(), digest_size=8).digest(), "little")
