"""Growth of an arena, a chunk at a time: touching all its memory, or reading all its file, takes too long to wait for.

Every process that has the arena open runs a thread. For an arena in memory, the thread maps allocated memory into the
process, and allocates the next chunk if no other process does. For a file that is older than its tables, the thread
adopts the file's slots. If that process crashes, another process continues. A file grows when a block needs space.

1. The allocation lock is taken, which one process can hold at a time.
2. The next chunk is allocated; if it does not fit, a part that does. After a crash here the next process allocates it
   again, which costs nothing. If the file has the chunk already, the headers of its slots are read instead.
3. Under the metadata lock its slots are put on the free list or, with their block, in the index, and then counted.
   After a crash in between, the tables are rebuilt without the chunk, and it is allocated again.
4. The lock is released.

If nothing more fits, memory stays as small as it is; space on disk is tried again later.
"""

import logging
import threading
import time
from contextlib import AbstractContextManager

from penstock.failpoints import tier_failpoint
from penstock.kvstore.arena.layout import W_ALLOCATED, W_NUM_FREE, Tables
from penstock.kvstore.arena.locks import ALLOCATION_BYTE, ByteLocks
from penstock.kvstore.arena.medium import SlotMedium
from penstock.kvstore.arena.slots import SlotTable

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
ADOPTED_CHUNK = 256
"""Slots whose headers are read at a time."""
_ALLOCATION_POLL_S = 0.02
"""Seconds between two checks whether another process has allocated memory."""


class ArenaAllocator:
    """Gives the slots of an arena memory or space, and finds those that have blocks already."""

    def __init__(
        self,
        medium: SlotMedium,
        tables: Tables,
        slots: SlotTable,
        locks: ByteLocks,
        changing: AbstractContextManager[object],
    ) -> None:
        self._medium, self._tables, self._slots = medium, tables, slots
        self._locks, self._changing = locks, changing
        self._one_at_a_time = threading.Lock()
        self._stopped = threading.Event()
        self._retry_at_s = 0.0
        """The time before which no more is allocated: there is no room, or this opening is closed."""
        self._problem: OSError | None = None
        """The error for which slots got no space; None if they did."""
        self._warned = False
        self._thread = threading.Thread(target=self._map_and_allocate, name="kv arena", daemon=True)

    @property
    def is_finished(self) -> bool:
        """Whether no more will be allocated, at least for a while."""
        is_whole = self._tables.words[W_ALLOCATED] >= self._tables.geometry.num_slots
        return is_whole or time.monotonic() < self._retry_at_s

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the background thread, and allocate no more."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        with self._one_at_a_time:
            self._retry_at_s = float("inf")

    def ensure_free_slots(self, count: int) -> None:
        """Allocate until `count` slots are free, or all have memory, so that blocks are not evicted before that.

        If slots remain to be adopted, one chunk of them is adopted, and blocks are then evicted from it. Raise
        `OSError` if no slot has space.
        """
        words = self._tables.words
        while words[W_NUM_FREE] < count and not self.is_finished:
            allocated = words[W_ALLOCATED]
            is_adopted = allocated < self._medium.num_present
            self._try_allocate_chunk(wait=True)
            if is_adopted or words[W_ALLOCATED] == allocated:
                break
        if self._problem is not None and not words[W_ALLOCATED]:
            raise self._problem

    def _map_and_allocate(self) -> None:
        mapped, chunk, end = 0, self._slots_per_chunk(), self._medium.num_eager
        while mapped < end and not self._stopped.is_set():
            allocated = self._tables.words[W_ALLOCATED]
            if mapped < allocated:
                self._medium.map_slots(mapped, count := min(chunk, allocated - mapped))
                mapped += count
            elif self.is_finished:
                return
            elif not self._try_allocate_chunk(wait=False):
                self._stopped.wait(_ALLOCATION_POLL_S)

    def _slots_per_chunk(self) -> int:
        return max(1, CHUNK_BYTES // self._tables.geometry.slot_bytes)

    def _try_allocate_chunk(self, *, wait: bool) -> bool:
        """Allocate the next chunk. Return False if another thread or process is allocating."""
        if not self._one_at_a_time.acquire(blocking=wait):
            return False
        try:
            if self.is_finished:
                return True
            if wait:
                self._locks.lock_byte(ALLOCATION_BYTE)
            elif not self._locks.try_lock(ALLOCATION_BYTE):
                return False
            try:
                self._allocate_chunk()
            finally:
                self._locks.unlock_byte(ALLOCATION_BYTE)
        finally:
            self._one_at_a_time.release()
        tier_failpoint(self._tables.tier, "allocate.4")
        return True

    def _allocate_chunk(self) -> None:
        geometry, first, medium = self._tables.geometry, self._tables.words[W_ALLOCATED], self._medium
        wanted = min(self._slots_per_chunk(), geometry.num_slots - first)
        tier_failpoint(self._tables.tier, "allocate.1")
        if (num_present := medium.num_present - first) > 0:
            count = min(ADOPTED_CHUNK, num_present)
            keys = medium.read_keys(first, count)
        else:
            count = self._reserve_slots(first, wanted)
            keys = [None] * count
        tier_failpoint(self._tables.tier, "allocate.2")
        if count:
            with self._changing:
                for slot in self._slots.adopt_slots(first, keys):
                    medium.erase_header(slot)
        elif wanted:
            self._retry_at_s = time.monotonic() + medium.retry_s
            self._warn_once(first)

    def _reserve_slots(self, first: int, count: int) -> int:
        """Give slots memory or space, as many of them as fit. Return how many do."""
        while count:
            try:
                count, self._problem = self._medium.reserve_slots(first, count), None
                break
            except OSError as error:  # fewer slots may fit; in memory the first one does, opening has reserved it
                count, self._problem = count // 2, error
        return count

    def _warn_once(self, num_slots: int) -> None:
        if not self._warned:
            self._warned = True
            why = self._problem.strerror if self._problem else "blocks of other models fill the budget"
            log.warning(
                "the %s tier does not get its full size (%s): it holds %d of %d blocks; %s sets its size",
                self._tables.tier, why, num_slots, self._tables.geometry.num_slots, self._medium.setting,
            )  # fmt: skip
