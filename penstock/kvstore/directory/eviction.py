"""Making room: what was used longest ago goes first, except what is leased.

The directory is not listed for every put: a listing gives the oldest blocks in their order. Who is used later has a
later time than the listing, so as long as some of them are as they were, they are the oldest there are.
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
    """A block as it was listed."""

    used_ns: int
    key: bytes
    size: int


class Eviction:
    """Makes room under the directory's lock."""

    def __init__(self, layout: DirectoryLayout, ledger: Ledger, budget: int) -> None:
        self._layout, self._ledger, self._budget = layout, ledger, budget
        self._victims: deque[Victim] = deque()
        self._empty_listing: tuple[int, int] | None = None
        """When a listing found nothing: the count of changes then, and when the next lease ends."""
        self.num_evicted = 0

    def make_space(self, size: int) -> bool:
        """Evict until `size` bytes more are within the budget; False if that cannot be."""
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
        """Evict so many bytes, or all there are, though they are within the budget; whether any went."""
        self._ledger.mark_uncertain()
        num_freed = 0
        while num_freed < num_bytes and (self._victims or self._list_victims()):
            num_freed += self._evict_victim(self._victims.popleft())
        return num_freed > 0

    def _evict_victim(self, victim: Victim) -> int:
        """How many bytes that gave; 0 where it was used or leased since it was listed."""
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
        """List the oldest blocks without a lease; whether there are any. What is used is counted on the way."""
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
