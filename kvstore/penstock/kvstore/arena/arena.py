"""An arena: slots for blocks that all processes of a host share, and that survive a crash of any of them.

The slots are in memory or in a file on disk (`medium.py`). The tables that say what is in them are always in memory.

The tables are read and changed under one lock, which the kernel releases when its holder dies. If that was in the
middle of a change, the next holder rebuilds what follows from the slot table (`guard.py`). So a crash between any two
instructions costs at most the blocks that were being written. Payloads are copied outside the lock.

Each opening keeps a byte of its own locked while it lives. Slots of owners whose byte is not locked are reclaimed.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import KVStoreError
from penstock.failpoints import failpoint, tier_failpoint
from penstock.kvstore.arena import directory
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
from penstock.kvstore.arena.medium import SlotFile, SlotMedium, SlotMemory
from penstock.kvstore.arena.slots import SlotTable
from penstock.kvstore.block import BlockFormat


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot that holds a certain block. The slot's generation changes when it is given to another block."""

    slot: int
    generation: int


ALREADY_STORED = SlotRef(-1, 0)
"""Returned by `Arena.allocate_slots` for a block that is stored already."""


class Arena:
    """One opening of an arena. Methods may be called from several threads."""

    def __init__(
        self, path: Path, fd: int, geometry: Geometry, form: BlockFormat, slot_file: SlotFile | None = None
    ) -> None:
        self.path, self.geometry, self.form = path, geometry, form
        self.num_evicted = 0
        """Blocks that this process evicted."""
        self._fd, self._locks = fd, ByteLocks(fd)
        self.tables = Tables(mmap.mmap(fd, geometry.tables_file_bytes), geometry)
        self.medium: SlotMedium = slot_file or SlotMemory(fd, self.tables.memory, geometry)
        self._slots = SlotTable(self.tables)
        self._guard = TablesLock(self._slots, self._locks)
        self._changing = TablesChange(self._guard)
        self.allocator = ArenaAllocator(self.medium, self.tables, self._slots, self._locks, self._changing)
        self.owner = self._become_owner()

    @classmethod
    def open(cls, form: BlockFormat, pipeline: str, budget_bytes: int, directory: str = "") -> "Arena":
        """Open or make the host's arena in memory for a pipeline and format, in the steps of `file.py`.

        The budget covers the whole file; memory is allocated in the background. Raise `KVStoreError` if it does not
        fit, or the directory cannot be used.
        """
        geometry = _fit_budget(form, budget_bytes, SETTING, on_disk=False)
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
        """Open an existing arena in memory, of any format, for tools. Raise `KVStoreError` if it cannot be opened."""
        fd = open_in_use(path, create=False)
        with closing_on_error(fd, path):
            described = read_file_superblock(fd)
            if described is None:
                raise KVStoreError(f"shared memory: {path} is not an arena of this version")
            return cls(path, fd, *described)

    @classmethod
    def open_on_disk(cls, form: BlockFormat, root: Path, budget_bytes: int, tables_directory: str = "") -> "Arena":
        """Open or make a format's slot file in a directory, in the steps of `directory.py`; `tables_directory` is that
        of the shared memory.

        The budget covers all slot files of the directory. Raise `KVStoreError` if it cannot be used. A full disk
        raises nothing: its blocks are read, and new ones are written as soon as it has space.
        """
        wanted = _fit_budget(form, budget_bytes, directory.SIZE_SETTING, on_disk=True)
        try:
            folder = directory.SlotDirectory(root, budget_bytes, tables_directory, create=True)
            try:
                with folder.hold_lock():
                    slots, tables, path, geometry = folder.open_slots(form, wanted)
            except BaseException:
                folder.close()
                raise
        except OSError as error:
            raise KVStoreError(f"{directory.DIRECTORY_SETTING}: {root} cannot hold KV blocks: {error}") from error
        arena = cls._open_slot_file(path, tables, geometry, form, SlotFile(slots, geometry, form, folder))
        arena.allocator.start()
        return arena

    @classmethod
    def attach_on_disk(cls, slot_path: Path, tables_directory: str = "") -> "Arena":
        """Open an existing slot file, of any format, with the tables that workers have made, for tools.

        Raise `KVStoreError` if it cannot be opened.
        """
        try:
            folder = directory.SlotDirectory(slot_path.parent, 0, tables_directory, create=False)
            try:
                with folder.hold_lock():
                    slots, tables, path, geometry, form = folder.attach_slots(slot_path)
            except BaseException:
                folder.close()
                raise
        except OSError as error:
            raise KVStoreError(f"{slot_path}: its KV blocks cannot be read: {error}") from error
        return cls._open_slot_file(path, tables, geometry, form, SlotFile(slots, geometry, form, folder))

    @classmethod
    def _open_slot_file(
        cls, path: Path, tables: int, geometry: Geometry, form: BlockFormat, slot_file: SlotFile
    ) -> "Arena":
        try:
            with closing_on_error(tables, path, directory.SIZE_SETTING):
                return cls(path, tables, geometry, form, slot_file)
        except BaseException:
            slot_file.close()
            raise

    @property
    def num_usable_slots(self) -> int:
        """Slots that have memory, or will get it."""
        return self.tables.words[W_ALLOCATED] if self.allocator.is_finished else self.geometry.num_slots

    def find_slots(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Return the slots of blocks that can be read. It counts as a use."""
        with self._guard as is_open:
            if not is_open:
                return [None] * len(keys)
            return [self._touch_slot(slot) if slot >= 0 else None for slot in self._look_up(keys)]

    def lacks_block(self, key: bytes) -> bool:
        """Return whether a block is not here. Takes no lock: while others change the tables the answer may be wrong."""
        return self._slots.index.find_slot(key) < 0

    def allocate_slots(self, keys: Sequence[bytes]) -> list[SlotRef | None]:
        """Return slots to write these blocks to: `ALREADY_STORED` for those that are here, None if no slot is free.

        The slots belong to this process until it publishes them.
        """
        self.allocator.ensure_free_slots(len(keys))
        with self._changing as is_open:
            if not is_open:
                return [None] * len(keys)
            if self.tables.words[W_NUM_FREE] < len(keys):
                self._reclaim_stale()
            refs = [self._allocate_slot(key) for key in keys]
            self._guard.num_writing += sum(ref is not None and ref is not ALREADY_STORED for ref in refs)
            return refs

    def publish_slots(self, refs: Sequence[tuple[SlotRef, bytes, bool]]) -> list[bool]:
        """Publish each allocated slot whose block is whole, and free the others. Return which blocks are stored now."""
        with self._changing:
            self._guard.finish_writes(len(refs))
            return [self._publish_slot(*written) for written in refs]

    def is_current(self, ref: SlotRef) -> bool:
        """Return whether the slot still holds the same block. Takes no lock."""
        return self.tables.generation[ref.slot] == ref.generation

    def drop_slots(self, refs: Sequence[SlotRef]) -> int:
        """Remove the blocks that are still in these slots, leased or not. Return how many were."""
        with self._changing as is_open:
            num_dropped = 0
            for ref in refs if is_open else ():
                if self.tables.state[ref.slot] == READY and self.is_current(ref):
                    self._remove_slot(ref.slot)
                    num_dropped += 1
            return num_dropped

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Remove blocks, leased or not. Return how many were here."""
        with self._changing as is_open:
            num_removed = 0
            for key in keys if is_open else ():
                if (slot := self._slots.index.find_slot(key)) >= 0:
                    self._remove_slot(slot)
                    num_removed += 1
            return num_removed

    def retain_blocks(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Count blocks as used `seconds` from now, if that is later. 0 ends it. Return which are here."""
        with self._guard as is_open:
            if not is_open:
                return [False] * len(keys)
            used, slots = self.tables.used, self._look_up(keys)
            end = time.monotonic_ns() + int(seconds * 1e9)
            for place, slot in enumerate(slots):
                if slot >= 0 and seconds:
                    used[slot] = max(used[slot], end - place)
                elif slot >= 0:
                    used[slot] = 0
                    self._touch_slot(slot)
            return [slot >= 0 for slot in slots]

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Lease those of these blocks that are here."""
        with self._changing as is_open:
            if is_open:
                self._expire_leases()
                self._slots.leases.lease_slots(owner, [slot for slot in self._look_up(keys) if slot >= 0], seconds)

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """End the owner's leases on these blocks."""
        with self._changing as is_open:
            if is_open:
                self._slots.leases.release_slots(owner, [slot for slot in self._look_up(keys) if slot >= 0])

    def count_blocks(self) -> tuple[int, int, int]:
        """Return how many blocks there are, and how many of them are leased and retained."""
        with self._changing as is_open:
            if not is_open:
                return 0, 0, 0
            self._expire_leases()
            tables = self.tables
            retained = (tables.state_array == READY) & (tables.used_array > time.monotonic_ns())
            return tables.words[W_NUM_READY], int((tables.lease_count_array > 0).sum()), int(retained.sum())

    def list_blocks(self) -> list[tuple[bytes, int, int]]:
        """Return key, time of last use (monotonic, ns) and number of leases of every block."""
        with self._changing as is_open:
            if not is_open:
                return []
            self._expire_leases()
            tables = self.tables
            ready = [slot for slot, state in enumerate(tables.state.tolist()) if state == READY]
            return [(tables.slot_key(slot), tables.used[slot], tables.lease_count[slot]) for slot in ready]

    def reclaim_stale(self) -> None:
        """Free slots that dead owners were writing, and remove expired leases, as is done when space is needed."""
        with self._changing as is_open:
            if is_open:
                self._reclaim_stale()

    @contextmanager
    def hold_tables(self) -> Iterator[ByteLocks]:
        """Hold the lock, so that the tables can be checked."""
        with self._guard:
            yield self._locks

    def close(self) -> None:
        """Close the arena once all blocks being written are published. The blocks stay."""
        self.allocator.stop()
        if self._guard.close():
            self._locks.unlock_all()
            os.close(self._fd)
            self.medium.close()

    def _look_up(self, keys: Sequence[bytes]) -> list[int]:
        find = self._slots.index.find_slot
        return [find(key) for key in keys]

    def _touch_slot(self, slot: int) -> SlotRef:
        """Record that the block in this slot was used now. One that is retained counts as used later."""
        tables = self.tables
        now = tables.words[W_CLOCK] = max(tables.words[W_CLOCK] + 1, time.monotonic_ns())
        tables.used[slot] = max(tables.used[slot], now)
        return SlotRef(slot, tables.generation[slot])

    def _allocate_slot(self, key: bytes) -> SlotRef | None:
        if (slot := self._slots.index.find_slot(key)) >= 0:
            self._touch_slot(slot)
            return ALREADY_STORED
        if not self.tables.words[W_NUM_FREE]:
            self.num_evicted += self._slots.evict_oldest()
        slot = self._slots.allocate_slot(key, self.owner)
        return SlotRef(slot, self.tables.generation[slot]) if slot >= 0 else None

    def _publish_slot(self, ref: SlotRef, key: bytes, is_whole: bool) -> bool:
        tables, slot = self.tables, ref.slot
        if tables.state[slot] != WRITING or tables.owner[slot] != self.owner or not self.is_current(ref):
            return False
        before = self._slots.index.find_slot(key)
        if is_whole and before < 0:
            self._touch_slot(slot)
            self._slots.publish_slot(slot)
            return True
        self._free_slots([slot])
        if is_whole:
            self._touch_slot(before)
        return is_whole

    def _remove_slot(self, slot: int) -> None:
        """Remove a block for good: 1. its header is erased; 2. it is removed from the tables.

        After a crash between them the block is damaged, and the next reader removes it.
        """
        self.medium.erase_header(slot)
        tier_failpoint(self.tables.tier, "remove.1")
        self._slots.forget_slot(slot)

    def _free_slots(self, slots: Sequence[int]) -> None:
        """Free slots whose blocks are not published. They may still hold the blocks that were evicted from them."""
        for slot in slots:
            self.medium.erase_header(slot)
            self._slots.free_slot(slot)

    def _reclaim_stale(self) -> None:
        self._expire_leases()
        for owner in self._slots.find_writers():
            if owner != self.owner and not self._locks.is_held_elsewhere(FIRST_OWNER_BYTE + owner):
                self._free_slots(self._slots.find_slots_of(owner))

    def _expire_leases(self) -> None:
        if self._slots.leases.has_expired():
            self._slots.leases.remove_expired()

    def _become_owner(self) -> int:
        """Lock a byte of our own, and free the slots that its former owner and other dead owners were writing."""
        with self._changing:
            mine = next((owner for owner in range(MAX_OWNERS) if self._locks.try_lock(FIRST_OWNER_BYTE + owner)), None)
            if mine is None:
                raise KVStoreError(f"the {self.tables.tier} tier: {self.path} is open in {MAX_OWNERS} processes")
            self._free_slots(self._slots.find_slots_of(mine))
            self.owner = mine
            self._reclaim_stale()
            return mine


def _fit_budget(form: BlockFormat, budget_bytes: int, setting: str, *, on_disk: bool) -> Geometry:
    """Return the geometry of the largest arena within a budget. Raise `KVStoreError` if it has no slot."""
    geometry = Geometry.fit_budget(form.payload_bytes, budget_bytes, on_disk=on_disk)
    if not geometry.num_slots:
        raise KVStoreError(f"{setting}: {budget_bytes} bytes do not hold one KV block of {geometry.slot_bytes} bytes")
    return geometry
