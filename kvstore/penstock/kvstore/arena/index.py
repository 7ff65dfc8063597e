"""From a key to its slot: open addressing with linear probing, in shared memory. All of it under the metadata lock,
but for a look-up whose answer may be wrong.

An entry holds a slot's number + 1, or 0. Keys are SHA-256 digests, so their first bytes serve as their hash. Deleting
moves later entries of a run back, so there are no tombstones and runs stay short.
"""

import numpy as np

from penstock.kvstore.arena.layout import READY, Tables


class SlotIndex:
    """Index of the READY slots by key."""

    def __init__(self, tables: Tables) -> None:
        self._places, self._keys = tables.index, tables.key
        self._tables = tables
        self._mask = tables.geometry.index_size - 1

    def find_slot(self, key: bytes) -> int:
        """Return the slot of a key, or -1."""
        places, keys, mask = self._places, self._keys, self._mask
        at = int.from_bytes(key[:8], "little") & mask
        while place := places[at]:
            start = 32 * (place - 1)
            if keys[start : start + 32] == key:
                return place - 1
            at = (at + 1) & mask
        return -1

    def insert_slot(self, slot: int) -> None:
        """Add a slot whose key is not in the index."""
        at = self._home_position(slot)
        while self._places[at]:
            at = (at + 1) & self._mask
        self._places[at] = slot + 1

    def delete_slot(self, slot: int) -> None:
        """Remove a slot."""
        places, mask = self._places, self._mask
        hole = self._home_position(slot)
        while places[hole] != slot + 1:
            hole = (hole + 1) & mask
        at = (hole + 1) & mask
        while place := places[at]:
            if (at - self._home_position(place - 1)) & mask >= (at - hole) & mask:  # the entry may move to the hole
                places[hole] = place
                hole = at
            at = (at + 1) & mask
        places[hole] = 0

    def rebuild_index(self) -> None:
        """Rebuild the index from the slot table."""
        self._tables.index_array[:] = 0
        for slot in np.flatnonzero(self._tables.state_array == READY).tolist():
            self.insert_slot(slot)

    def _home_position(self, slot: int) -> int:
        return int.from_bytes(self._keys[32 * slot : 32 * slot + 8], "little") & self._mask
