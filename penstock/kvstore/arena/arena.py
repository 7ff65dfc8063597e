"""An arena: memory for blocks that all processes of a host share, and that survives the death of any of them.

The tables are read and changed under one lock, which the kernel gives back when its holder dies; if that was in the
middle of a change, the next one makes again what follows from the slot table (guard.py). So a death between any two
instructions costs at most the blocks that were being written. Payload is copied outside the lock.

Each opening owns a byte that it keeps locked while it lives. Slots of owners whose byte is not locked are taken back.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import KVStoreError
from penstock.kvstore import steps
from penstock.kvstore.arena.file import (
    SETTING,
    arena_path,
    closing_on_error,
    initialize_arena,
    open_in_use,
    read_file_superblock,
    remove_stale_arenas,
)
from penstock.kvstore.arena.growth import ArenaAllocator
from penstock.kvstore.arena.guard import TablesChange, TablesLock
from penstock.kvstore.arena.layout import (
    READY,
    W_ALLOCATED,
    W_CLOCK,
    W_NUM_FREE,
    W_NUM_READY,
    WRITING,
    Geometry,
    Tables,
)
from penstock.kvstore.arena.locks import FIRST_OWNER_BYTE, MAX_OWNERS, ByteLocks
from penstock.kvstore.arena.slots import SlotTable
from penstock.kvstore.block import BlockFormat


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot, as long as it holds the same block: its generation changes when it is given to another one."""

    slot: int
    generation: int


ALREADY_STORED = SlotRef(-1, 0)
"""What `take` answers for a block that is in the arena already."""


class Arena:
    """One opening of an arena. Methods may be called from several threads."""

    def __init__(self, path: Path, fd: int, geometry: Geometry, form: BlockFormat) -> None:
        self.path, self.geometry, self.form = path, geometry, form
        self.num_evicted = 0
        """Blocks that this process put out to make room."""
        self._fd, self._locks = fd, ByteLocks(fd)
        self.tables = Tables(mmap.mmap(fd, geometry.total_bytes), geometry)
        self._slots = SlotTable(self.tables)
        self._guard = TablesLock(self._slots, self._locks)
        self._changing = TablesChange(self._guard)
        self.growth = ArenaAllocator(fd, self.tables, self._slots, self._locks, self._changing)
        self.owner = self._become_owner()

    @classmethod
    def open(cls, form: BlockFormat, pipeline: str, budget_bytes: int, directory: str = "") -> "Arena":
        """The host's arena for this pipeline and form: the steps in file.py. Raises `KVStoreError`."""
        geometry = Geometry.within(form.payload_bytes, budget_bytes)
        if not geometry.num_slots:
            raise KVStoreError(f"{SETTING}: {budget_bytes} bytes hold no block of {geometry.slot_bytes} bytes")
        path = arena_path(directory, pipeline, form, geometry)
        remove_stale_arenas(directory, pipeline, keep=path)
        fd = open_in_use(path, create=True)
        with closing_on_error(fd, path):
            steps.reached("open 1")
            initialize_arena(fd, path, geometry, form, pipeline)
            arena = cls(path, fd, geometry, form)
        arena.growth.start()
        return arena

    @classmethod
    def attach(cls, path: Path) -> "Arena":
        """An arena that is there already, whatever its form. Raises `KVStoreError`."""
        fd = open_in_use(path, create=False)
        with closing_on_error(fd, path):
            described = read_file_superblock(fd)
            if described is None:
                raise KVStoreError(f"shared memory: {path} is not an arena of this version")
            return cls(path, fd, *described)

    @property
    def num_usable(self) -> int:
        """Slots that have memory, or will."""
        return self.tables.words[W_ALLOCATED] if self.growth.is_over else self.geometry.num_slots

    def find(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Where blocks are that can be read. Those were used now."""
        with self._guard as is_open:
            if not is_open:
                return [None] * len(keys)
            return [self._use(slot) if slot >= 0 else None for slot in self._find(keys)]

    def peek(self, key: bytes) -> SlotRef | None:
        """Where a block is; it was not used by that."""
        with self._guard as is_open:
            (slot,) = self._find([key]) if is_open else (-1,)
            return SlotRef(slot, self.tables.generation[slot]) if slot >= 0 else None

    def take(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Slots to write these blocks in; `HERE` for those that are here, None where all room is taken.

        They are this process's alone until it publishes them.
        """
        self.growth.provide(len(keys))
        with self._changing as is_open:
            if not is_open:
                return [None] * len(keys)
            if self.tables.words[W_NUM_FREE] < len(keys):
                self._tidy()
            places = [self._take(key) for key in keys]
            self._guard.num_writing += sum(place is not None and place is not ALREADY_STORED for place in places)
            return places

    def publish(self, places: Sequence[tuple[SlotRef, bytes, bool]]) -> list[bool]:
        """Each slot taken, with its key and whether the block is whole there: now it is found, or the slot is free."""
        with self._changing:
            self._guard.wrote(len(places))
            return [self._publish(*one) for one in places]

    def is_still(self, place: SlotRef) -> bool:
        """Whether the slot was not given to another block meanwhile. Without the lock."""
        return self.tables.generation[place.slot] == place.generation

    def drop(self, places: Sequence[SlotRef]) -> int:
        """Forget the blocks that lie there still, leased or not; how many did."""
        with self._changing as is_open:
            num_dropped = 0
            for place in places if is_open else ():
                if self.tables.state[place.slot] == READY and self.is_still(place):
                    self._slots.forget(place.slot)
                    num_dropped += 1
            return num_dropped

    def remove(self, keys: Sequence[bytes]) -> int:
        """Forget blocks; how many were here."""
        with self._changing as is_open:
            num_removed = 0
            for key in keys if is_open else ():
                if (slot := self._slots.index.find(key)) >= 0:
                    self._slots.forget(slot)
                    num_removed += 1
            return num_removed

    def lease(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Keep these blocks from eviction."""
        with self._changing as is_open:
            if is_open:
                self._expire()
                self._slots.leases.take(owner, [slot for slot in self._find(keys) if slot >= 0], seconds)

    def release(self, owner: str, keys: Sequence[bytes]) -> None:
        """End leases."""
        with self._changing as is_open:
            if is_open:
                self._slots.leases.release(owner, [slot for slot in self._find(keys) if slot >= 0])

    def count(self) -> tuple[int, int]:
        """How many blocks there are, and how many of them are leased."""
        with self._changing as is_open:
            if not is_open:
                return 0, 0
            self._expire()
            return self.tables.words[W_NUM_READY], int((self.tables.lease_count_array > 0).sum())

    def rows(self) -> list[tuple[bytes, int, int]]:
        """Key, time of last use (ns, monotonic) and leases of every block."""
        with self._changing as is_open:
            if not is_open:
                return []
            self._expire()
            tables = self.tables
            ready = [slot for slot, state in enumerate(tables.state.tolist()) if state == READY]
            return [(tables.key_of(slot), tables.used[slot], tables.lease_count[slot]) for slot in ready]

    def tidy(self) -> None:
        """Free what dead owners were writing and end leases whose time is over, as is done when room is wanted."""
        with self._changing as is_open:
            if is_open:
                self._tidy()

    @contextmanager
    def holding(self) -> Iterator[ByteLocks]:
        """Nothing changes meanwhile: for who looks at the tables."""
        with self._guard:
            yield self._locks

    def close(self) -> None:
        """Let go, once what is being written is published. The blocks stay."""
        self.growth.stop()
        if self._guard.close():
            self._locks.unlock_all()
            os.close(self._fd)

    def _find(self, keys: Sequence[bytes]) -> list[int]:
        find = self._slots.index.find
        return [find(key) for key in keys]

    def _use(self, slot: int) -> SlotRef:
        """The block there was used now."""
        tables = self.tables
        now = tables.words[W_CLOCK] = max(tables.words[W_CLOCK] + 1, time.monotonic_ns())
        tables.used[slot] = now
        return SlotRef(slot, tables.generation[slot])

    def _take(self, key: bytes) -> SlotRef | None:
        if (slot := self._slots.index.find(key)) >= 0:
            self._use(slot)
            return ALREADY_STORED
        if not self.tables.words[W_NUM_FREE]:
            self.num_evicted += self._slots.evict()
        slot = self._slots.take(key, self.owner)
        return SlotRef(slot, self.tables.generation[slot]) if slot >= 0 else None

    def _publish(self, place: SlotRef, key: bytes, is_whole: bool) -> bool:
        tables, slot = self.tables, place.slot
        if tables.state[slot] != WRITING or tables.owner[slot] != self.owner or not self.is_still(place):
            return False
        before = self._slots.index.find(key)
        if is_whole and before < 0:
            self._use(slot)
            self._slots.publish(slot)
            return True
        self._slots.free(slot)
        if is_whole:
            self._use(before)
        return is_whole

    def _tidy(self) -> None:
        self._expire()
        for owner in self._slots.writers():
            if owner != self.owner and not self._locks.is_held_elsewhere(FIRST_OWNER_BYTE + owner):
                self._slots.reclaim(owner)

    def _expire(self) -> None:
        if self._slots.leases.is_due():
            self._slots.leases.expire()

    def _become_owner(self) -> int:
        """Lock a byte of one's own, and free what its former owner and other dead ones were writing."""
        with self._changing:
            mine = next((owner for owner in range(MAX_OWNERS) if self._locks.try_lock(FIRST_OWNER_BYTE + owner)), None)
            if mine is None:
                raise KVStoreError(f"shared memory: {self.path} is open in {MAX_OWNERS} processes")
            self._slots.reclaim(mine)
            self.owner = mine
            self._tidy()
            return mine
