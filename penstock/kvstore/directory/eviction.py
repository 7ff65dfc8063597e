"""Eviction: the least recently used block goes first, unless it is leased.

The directory is not listed for every put: one listing gives many of the oldest blocks in order. A block that is used
later has a later time than the listing, so listed blocks that are unchanged are still the oldest.
"""

import os
from collections import deque
from itertools import islice
from typing import NamedTuple

from penstock.failpoints import failpoint
from penstock.kvstore.directory import leases, writers
from penstock.kvstore.directory.layout import DirectoryLayout, remove_file, round_to_pages
from penstock.kvstore.directory.ledger import Ledger

MIN_VICTIMS = 64


class Victim(NamedTuple):
    """A block to evict, as it was listed."""

    used_ns: int
    key: bytes
    size: int


class Eviction:
    """Evicts blocks, under the directory's lock."""

    def __init__(self, layout: DirectoryLayout, ledger: Ledger, budget: int) -> None:
        self._layout, self._ledger, self._budget = layout, ledger, budget
        self._victims: deque[Victim] = deque()
        self._empty_listing: tuple[int, int] | None = None
        """After a listing that found nothing: the count of changes then, and when the next lease ends."""
        self.num_evicted = 0

    def make_space(self, size: int) -> bool:
        """Evict until `size` more bytes are within the budget. Return False if that is impossible."""
        record = self._ledger.record
        if size > self._budget:
            return False
        if record.used_bytes + size > self._budget:
            self._ledger.mark_uncertain()
            record.used_bytes -= writers.remove_dead_writers(self._layout)
        while record.used_bytes + size > self._budget:
            if not self._victims and not self._list_victims():
                return False
            self._evict_victim(self._victims.popleft())
        return True

    def evict_bytes(self, num_bytes: int) -> bool:
        """Evict `num_bytes`, or all there are, although they are within the budget. Return whether any were evicted."""
        self._ledger.mark_uncertain()
        num_freed = 0
        while num_freed < num_bytes and (self._victims or self._list_victims()):
            num_freed += self._evict_victim(self._victims.popleft())
        return num_freed > 0

    def _evict_victim(self, victim: Victim) -> int:
        """Evict a block. Return its bytes, or 0 if it was used or leased since it was listed."""
        path = self._layout.block_path(victim.key)
        try:
            now = os.stat(path)
        except FileNotFoundError:
            return 0
        if now.st_mtime_ns != victim.used_ns or now.st_nlink > 1:
            return 0
        failpoint("disk.evict.1")
        remove_file(path)
        self._ledger.record.used_bytes -= victim.size
        self._ledger.record.num_blocks -= 1
        self.num_evicted += 1
        failpoint("disk.evict.2")
        return victim.size

    def _list_victims(self) -> bool:
        """List the oldest blocks without a lease, and count the usage on the way. Return whether there are any."""
        record = self._ledger.record
        if self._empty_listing is not None:
            changes, next_end = self._empty_listing
            if changes == record.num_changes and not 0 < next_end <= leases.now_ms():
                return False
        next_end = leases.remove_expired_leases(self._layout)
        found, used, num_blocks = list[Victim](), 0, 0
        for key, stat in self._layout.list_blocks():
            size = round_to_pages(stat.st_size)
            used, num_blocks = used + size, num_blocks + 1
            if stat.st_nlink == 1:
                found.append(Victim(stat.st_mtime_ns, key, size))
        record.used_bytes, record.num_blocks = used + writers.count_reserved_bytes(self._layout), num_blocks
        found.sort()
        self._victims.extend(islice(found, max(MIN_VICTIMS, len(found) // 8)))
        self._empty_listing = None if found else (record.num_changes, next_end)
        return bool(found)
