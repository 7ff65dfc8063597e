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
from penstock.failpoints import failpoint
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
        self.allocator = ArenaAllocator(fd, self.tables, self._slots, self._locks, self._changing)
        self.owner = self._become_owner()

    @classmethod
    def open(cls, form: BlockFormat, pipeline: str, budget_bytes: int, directory: str = "") -> "Arena":
        """The host's arena for this pipeline and form: the steps in file.py. Raises `KVStoreError`."""
        geometry = Geometry.fit_budget(form.payload_bytes, budget_bytes)
        if not geometry.num_slots:
            raise KVStoreError(f"{SETTING}: {budget_bytes} bytes hold no block of {geometry.slot_bytes} bytes")
        path = arena_path(directory, pipeline, form, geometry)
        remove_stale_arenas(directory, pipeline, keep=path)
        fd = open_in_use(path, create=True)
        with closing_on_error(fd, path):
            failpoint("shared.open.1")
            initialize_arena(fd, path, geometry, form, pipeline)
            arena = cls(path, fd, geometry, form)
        arena.allocator.start()
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
    def num_usable_slots(self) -> int:
        """Slots that have memory, or will."""
        return self.tables.words[W_ALLOCATED] if self.allocator.is_finished else self.geometry.num_slots

    def find_slots(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Where blocks are that can be read. Those were used now."""
        with self._guard as is_open:
            if not is_open:
                return [None] * len(keys)
            return [self._touch_slot(slot) if slot >= 0 else None for slot in self._look_up(keys)]

    def peek_slot(self, key: bytes) -> SlotRef | None:
        """Where a block is; it was not used by that."""
        with self._guard as is_open:
            (slot,) = self._look_up([key]) if is_open else (-1,)
            return SlotRef(slot, self.tables.generation[slot]) if slot >= 0 else None

    def allocate_slots(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Slots to write these blocks in; `HERE` for those that are here, None where all room is taken.

        They are this process's alone until it publishes them.
        """
        self.allocator.ensure_free_slots(len(keys))
        with self._changing as is_open:
            if not is_open:
                return [None] * len(keys)
            if self.tables.words[W_NUM_FREE] < len(keys):
                self._reclaim_stale()
            places = [self._allocate_slot(key) for key in keys]
            self._guard.num_writing += sum(place is not None and place is not ALREADY_STORED for place in places)
            return places

    def publish_slots(self, places: Sequence[tuple[SlotRef, bytes, bool]]) -> list[bool]:
        """Each slot taken, with its key and whether the block is whole there: now it is found, or the slot is free."""
        with self._changing:
            self._guard.finish_writes(len(places))
            return [self._publish_slot(*one) for one in places]

    def is_current(self, place: SlotRef) -> bool:
        """Whether the slot was not given to another block meanwhile. Without the lock."""
        return self.tables.generation[place.slot] == place.generation

    def drop_slots(self, places: Sequence[SlotRef]) -> int:
        """Forget the blocks that lie there still, leased or not; how many did."""
        with self._changing as is_open:
            num_dropped = 0
            for place in places if is_open else ():
                if self.tables.state[place.slot] == READY and self.is_current(place):
                    self._slots.forget_slot(place.slot)
                    num_dropped += 1
            return num_dropped

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Forget blocks; how many were here."""
        with self._changing as is_open:
            num_removed = 0
            for key in keys if is_open else ():
                if (slot := self._slots.index.find_slot(key)) >= 0:
                    self._slots.forget_slot(slot)
                    num_removed += 1
            return num_removed

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Keep these blocks from eviction."""
        with self._changing as is_open:
            if is_open:
                self._expire_leases()
                self._slots.leases.lease_slots(owner, [slot for slot in self._look_up(keys) if slot >= 0], seconds)

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """End leases."""
        with self._changing as is_open:
            if is_open:
                self._slots.leases.release_slots(owner, [slot for slot in self._look_up(keys) if slot >= 0])

    def count_blocks(self) -> tuple[int, int]:
        """How many blocks there are, and how many of them are leased."""
        with self._changing as is_open:
            if not is_open:
                return 0, 0
            self._expire_leases()
            return self.tables.words[W_NUM_READY], int((self.tables.lease_count_array > 0).sum())

    def list_blocks(self) -> list[tuple[bytes, int, int]]:
        """Key, time of last use (ns, monotonic) and leases of every block."""
        with self._changing as is_open:
            if not is_open:
                return []
            self._expire_leases()
            tables = self.tables
            ready = [slot for slot, state in enumerate(tables.state.tolist()) if state == READY]
            return [(tables.slot_key(slot), tables.used[slot], tables.lease_count[slot]) for slot in ready]

    def reclaim_stale(self) -> None:
        """Free what dead owners were writing and end leases whose time is over, as is done when room is wanted."""
        with self._changing as is_open:
            if is_open:
                self._reclaim_stale()

    @contextmanager
    def hold_tables(self) -> Iterator[ByteLocks]:
        """Nothing changes meanwhile: for who looks at the tables."""
        with self._guard:
            yield self._locks

    def close(self) -> None:
        """Let go, once what is being written is published. The blocks stay."""
        self.allocator.stop()
        if self._guard.close():
            self._locks.unlock_all()
            os.close(self._fd)

    def _look_up(self, keys: Sequence[bytes]) -> list[int]:
        find = self._slots.index.find_slot
        return [find(key) for key in keys]

    def _touch_slot(self, slot: int) -> SlotRef:
        """The block there was used now."""
        tables = self.tables
        now = tables.words[W_CLOCK] = max(tables.words[W_CLOCK] + 1, time.monotonic_ns())
        tables.used[slot] = now
        return SlotRef(slot, tables.generation[slot])

    def _allocate_slot(self, key: bytes) -> SlotRef | None:
        if (slot := self._slots.index.find_slot(key)) >= 0:
            self._touch_slot(slot)
            return ALREADY_STORED
        if not self.tables.words[W_NUM_FREE]:
            self.num_evicted += self._slots.evict_oldest()
        slot = self._slots.allocate_slot(key, self.owner)
        return SlotRef(slot, self.tables.generation[slot]) if slot >= 0 else None

    def _publish_slot(self, place: SlotRef, key: bytes, is_whole: bool) -> bool:
        tables, slot = self.tables, place.slot
        if tables.state[slot] != WRITING or tables.owner[slot] != self.owner or not self.is_current(place):
            return False
        before = self._slots.index.find_slot(key)
        if is_whole and before < 0:
            self._touch_slot(slot)
            self._slots.publish_slot(slot)
            return True
        self._slots.free_slot(slot)
        if is_whole:
            self._touch_slot(before)
        return is_whole

    def _reclaim_stale(self) -> None:
        self._expire_leases()
        for owner in self._slots.find_writers():
            if owner != self.owner and not self._locks.is_held_elsewhere(FIRST_OWNER_BYTE + owner):
                self._slots.reclaim_slots(owner)

    def _expire_leases(self) -> None:
        if self._slots.leases.has_expired():
            self._slots.leases.remove_expired()

    def _become_owner(self) -> int:
        """Lock a byte of one's own, and free what its former owner and other dead ones were writing."""
        with self._changing:
            mine = next((owner for owner in range(MAX_OWNERS) if self._locks.try_lock(FIRST_OWNER_BYTE + owner)), None)
            if mine is None:
                raise KVStoreError(f"shared memory: {self.path} is open in {MAX_OWNERS} processes")
            self._slots.reclaim_slots(mine)
            self.owner = mine
            self._reclaim_stale()
            return mine
