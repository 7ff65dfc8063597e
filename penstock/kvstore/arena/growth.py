"""Allocation of an arena's memory, a piece at a time: touching all its pages takes too long to wait for.

Every process that has the arena open runs a thread that maps the allocated memory into the process, and allocates the
next piece if no other process does. So if the allocating process crashes, another one goes on.

1. The allocation lock is taken, which one process can hold at a time.
2. The next piece is allocated; if it does not fit, a part that does. After a crash here the next process allocates it
   again, which costs nothing.
3. Under the metadata lock its slots are put on the free list, then counted. After a crash in between, the free list is
   rebuilt, and the piece is allocated again.
4. The lock is released.
"""

import ctypes
import logging
import os
import threading
from contextlib import AbstractContextManager

import numpy as np

from penstock.failpoints import failpoint
from penstock.kvstore.arena.layout import PAGE_BYTES, W_ALLOCATED, W_NUM_FREE, Tables
from penstock.kvstore.arena.locks import ALLOCATION_BYTE, ByteLocks
from penstock.kvstore.arena.slots import SlotTable

log = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
_POPULATE_WRITE = 23
_ALLOCATION_POLL_S = 0.02
"""How often a thread checks whether another process has allocated memory."""


class ArenaAllocator:
    """Allocates and maps memory until all slots of an arena have it."""

    def __init__(
        self,
        fd: int,
        tables: Tables,
        slots: SlotTable,
        locks: ByteLocks,
        changing: AbstractContextManager[object],
    ) -> None:
        self._fd, self._tables, self._slots, self._locks, self._changing = fd, tables, slots, locks, changing
        self._one_at_a_time = threading.Lock()
        self._stopped = threading.Event()
        self._failed = False
        """No more can be allocated here: memory is full, or this opening is closed."""
        self._thread = threading.Thread(target=self._map_and_allocate, name="kv arena", daemon=True)
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise

    @property
    def is_finished(self) -> bool:
        """Whether no more memory will be allocated."""
        return self._failed or self._tables.words[W_ALLOCATED] >= self._tables.geometry.num_slots

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the background thread, and allocate no more."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._one_at_a_time:
            self._failed = True

    def wait_until_mapped(self, timeout_s: float) -> bool:
        """Wait until all slots have memory that is mapped here. Return whether they have."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def ensure_free_slots(self, count: int) -> None:
        """Allocate until `count` slots are free, or all have memory, so that blocks are not evicted before that."""
        while self._tables.words[W_NUM_FREE] < count and not self.is_finished:
            self._try_allocate_piece(wait=True)

    def _map_and_allocate(self) -> None:
        mapped, piece = 0, self._slots_per_piece()
        while mapped < self._tables.geometry.num_slots and not self._stopped.is_set():
            allocated = self._tables.words[W_ALLOCATED]
            if mapped < allocated:
                self._map_slots(mapped, count := min(piece, allocated - mapped))
                mapped += count
            elif self._failed:
                return
            elif not self._try_allocate_piece(wait=False):
                self._stopped.wait(_ALLOCATION_POLL_S)

    def _slots_per_piece(self) -> int:
        return max(1, PIECE_BYTES // self._tables.geometry.slot_bytes)

    def _try_allocate_piece(self, *, wait: bool) -> bool:
        """Allocate the next piece. Return False if another thread or process is allocating."""
        if not self._one_at_a_time.acquire(blocking=wait):
            return False
        try:
            if self._failed:
                return False
            if wait:
                self._locks.lock_byte(ALLOCATION_BYTE)
            elif not self._locks.try_lock(ALLOCATION_BYTE):
                return False
            try:
                self._allocate_piece()
            finally:
                self._locks.unlock_byte(ALLOCATION_BYTE)
        finally:
            self._one_at_a_time.release()
        failpoint("shared.allocate.4")
        return True

    def _allocate_piece(self) -> None:
        geometry, first = self._tables.geometry, self._tables.words[W_ALLOCATED]
        count = min(self._slots_per_piece(), geometry.num_slots - first)
        start, problem = geometry.metadata_bytes + first * geometry.slot_bytes, ""
        failpoint("shared.allocate.1")
        while count:
            try:
                os.posix_fallocate(self._fd, start, count * geometry.slot_bytes)
                break
            except OSError as error:  # less may fit: one slot surely does at first, opening has reserved it
                count, problem = count // 2, str(error.strerror)
        failpoint("shared.allocate.2")
        if count:
            with self._changing:
                self._slots.add_slots(first, count)
        elif problem:
            self._failed = True
            log.warning(
                "no room for all of the shared memory (%s): %d of %d blocks; PENSTOCK_KV_STORE_SHARED_MB sets its size",
                problem, first, geometry.num_slots,
            )  # fmt: skip

    def _map_slots(self, first: int, count: int) -> None:
        """Map slots that have memory, so that copies do not stop at page faults."""
        geometry = self._tables.geometry
        start = geometry.metadata_bytes + first * geometry.slot_bytes
        pages = np.frombuffer(self._tables.memory, np.uint8)[start : start + count * geometry.slot_bytes]
        address = ctypes.c_void_p(pages.ctypes.data)
        if self._madvise(address, ctypes.c_size_t(len(pages)), _POPULATE_WRITE):
            pages[::PAGE_BYTES].max()  # an older kernel: reading maps them too
