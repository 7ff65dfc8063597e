"""Changes of a directory of blocks, each under its lock. The steps are those of `tiers/disk.py`."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.failpoints import failpoint
from penstock.kvstore.directory import leases, writers
from penstock.kvstore.directory.eviction import Eviction
from penstock.kvstore.directory.layout import PAGE_BYTES, DirectoryLayout, make_folder, remove_file, round_to_pages
from penstock.kvstore.directory.ledger import Ledger, UsageRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a file system that is full."""
FOLDER_BYTES = 4 * PAGE_BYTES
"""Space that folders and a small file take."""


class Draft(NamedTuple):
    """A file that has space reserved and is not published yet."""

    path: str
    size: int
    """Bytes that are reserved for it."""


class Directory:
    """A directory of blocks within a budget. Methods raise `OSError` if the file system fails."""

    def __init__(self, root: Path, budget: int, *, writes: bool) -> None:
        self.layout, self.budget = DirectoryLayout(root), budget
        self.is_writable = writes
        """Whether blocks can be written. Tools cannot, and after closing nothing can."""
        self.ledger = Ledger(self.layout, makes=writes)
        self._eviction = Eviction(self.layout, self.ledger, budget)
        self._writer: writers.Writer | None = None
        try:
            if writes:
                self._start_writing()
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS:
                with contextlib.suppress(OSError):
                    self.close()
                raise
            log.warning("the disk is full, no KV blocks are written to %s until it has room: %s", root, error)

    @property
    def num_evicted(self) -> int:
        """Blocks evicted by this object."""
        return self._eviction.num_evicted

    def _start_writing(self) -> None:
        """Open for writing: 1. make a folder of our own; 2. remove dead processes' folders; 3. evict to the budget."""
        with self.ledger.hold_lock() as record:
            if self._writer is not None or not self.is_writable:
                return
            self.ledger.mark_uncertain()
            self._writer = self._call_with_room(partial(writers.Writer, self.layout))
            failpoint("disk.open.1")
            record.used_bytes -= writers.remove_dead_writers(self.layout)
            leases.remove_expired_leases(self.layout)
            failpoint("disk.open.2")
            record.budget_bytes = self.budget
            self._eviction.make_space(0)
            failpoint("disk.open.3")

    def reserve_drafts(self, lengths: Sequence[int]) -> list[Draft | None]:
        """Do step 1 of a put: return drafts for files of these lengths, None for one that does not fit."""
        drafts = list[Draft | None]()
        if self._writer is None:
            self._start_writing()
        with self._lock_for_drafts(drafts) as (writer, record):
            record.used_bytes += writer.update_reservation()
            for size in map(round_to_pages, lengths):
                if not self._eviction.make_space(size):
                    drafts.append(None)
                    continue
                drafts.append(Draft(writer.new_draft(size), size))
                more = writer.update_reservation()
                failpoint("disk.put.1.1")
                record.used_bytes += more
                failpoint("disk.put.1.2")
        return drafts

    def publish_drafts(self, drafts: Mapping[Draft, bytes | None]) -> int:
        """Do step 4 of a put: rename each draft to its key's path, or remove it. Return how many blocks are new.

        Raise `OSError` after all of them if one could not be renamed.
        """
        num_new, failure = 0, None
        with self._lock_for_drafts(drafts) as (writer, record):
            failpoint("disk.put.4.1")
            for draft, key in drafts.items():
                try:
                    is_new = key is not None and self._call_with_room(partial(self._name_draft, draft, key))
                except OSError as error:
                    is_new, failure = False, error
                if is_new:
                    writer.remove_published(draft.path)
                    num_new, record.num_blocks, record.used_bytes = (
                        num_new + 1,
                        record.num_blocks + 1,
                        record.used_bytes + draft.size,
                    )
                    failpoint("disk.put.4.2")
                else:
                    writer.give_up_drafts([draft.path])
                record.used_bytes += writer.update_reservation()
                failpoint("disk.put.4.3")
            record.num_changes += 1
        if failure is not None:
            raise failure
        return num_new

    def free_disk_space(self, draft: Draft, num_bytes: int) -> bool:
        """Remove a draft that did not fit on the full disk, and evict `num_bytes`. Return whether any were evicted."""
        with self.ledger.hold_lock():
            remove_file(draft.path)
            return self._eviction.evict_bytes(num_bytes)

    @contextlib.contextmanager
    def _lock_for_drafts(self, drafts: Iterable[Draft | None]) -> Iterator[tuple[writers.Writer, UsageRecord]]:
        """Hold the lock for a change of our drafts. If the change fails as a whole, give the drafts up."""
        writer = self._writer
        try:
            with self.ledger.hold_lock() as record:
                if writer is None or writer is not self._writer:
                    raise FileNotFoundError("closed meanwhile, and the drafts are gone")
                self.ledger.mark_uncertain()
                try:
                    yield writer, record
                except BaseException:
                    writer.give_up_drafts(draft.path for draft in drafts if draft is not None)
                    with contextlib.suppress(OSError):
                        writer.update_reservation()  # the next holder of the lock counts anew
                    raise
        except BaseException:  # the lock or the record failed: the drafts are removed at the next put
            if writer is not None:
                writer.give_up_drafts(draft.path for draft in drafts if draft is not None)
            raise

    def _call_with_room(self, call: Callable[[], T]) -> T:
        """Call `call`, and once more after evicting blocks if the disk is full. Called under the lock."""
        try:
            return call()
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS or not self._eviction.evict_bytes(FOLDER_BYTES):
                raise
        return call()

    def _name_draft(self, draft: Draft, key: bytes) -> bool:
        """Rename a draft to its block's path. Return False if another process wrote the same block meanwhile."""
        path = self.layout.block_path(key)
        if os.path.exists(path):
            return False
        make_folder(os.path.dirname(path))
        os.rename(draft.path, path)
        return True

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Implement `Tier.lease_blocks`."""
        with self.ledger.hold_lock() as record:
            self.ledger.mark_uncertain()
            self._call_with_room(partial(leases.create_leases, self.layout, owner, keys, seconds))
            record.num_changes += 1
            failpoint("disk.lease.2")

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """Implement `Tier.release_leases`."""
        with self.ledger.hold_lock() as record:
            self.ledger.mark_uncertain()
            leases.remove_leases(self.layout, owner, keys)
            record.num_changes += 1
            failpoint("disk.release.2")

    def drop_blocks(self, keys: Mapping[bytes, int | None]) -> int:
        """Remove blocks, leased or not, and return how many. With an inode number, only if it is still that file."""
        with self.ledger.hold_lock() as record:
            mine = {}
            for key, number in keys.items():
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(self.layout.block_path(key))
                    if number is None or number == stat.st_ino:
                        mine[key] = stat
            if not mine:
                return 0
            self.ledger.mark_uncertain()
            failpoint("disk.remove.1")
            if any(stat.st_nlink > 1 for stat in mine.values()):
                leases.remove_leases_of_all_owners(self.layout, set(mine))
            failpoint("disk.remove.2")
            for key, stat in mine.items():
                remove_file(self.layout.block_path(key))
                record.used_bytes -= round_to_pages(stat.st_size)
                record.num_blocks -= 1
                failpoint("disk.remove.3")
            record.num_changes += 1
            if any(keys.values()):
                self.ledger.recount_usage()  # a damaged file may have had another size when it was written
            return len(mine)

    def close(self) -> None:
        """Remove our folder and reservation. Calling it twice is harmless."""
        writer, self._writer, self.is_writable = self._writer, None, False
        try:
            if writer is not None:
                with self.ledger.hold_lock() as record:
                    self.ledger.mark_uncertain()
                    record.used_bytes -= writer.close()
        finally:
            self.ledger.close()
