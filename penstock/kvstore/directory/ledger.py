"""The directory's lock and usage: the number of bytes and blocks, exact while the lock is held.

1. A process that changes something takes the lock, and marks the record as uncertain before the first change.
2. Files are linked, renamed, removed.
3. The new usage is written and marked as certain; the lock is released.

After a crash between 1 and 3 the lock is free, and its next holder counts all files, and removes leases without a block
and files of dead writers. A record of another boot is uncertain as well: the machine may have lost changes that were
not on the disk yet.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.kvstore.copying import compute_checksum
from penstock.kvstore.directory import leases, writers
from penstock.kvstore.directory.layout import DirectoryLayout, make_folder, round_to_pages

MAGIC = b"PKVD\0\0\0\1"
_RECORD = struct.Struct("<8s16sQQQQQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass
class UsageRecord:
    """The usage of the directory."""

    used_bytes: int = 0
    """Bytes that count against the budget: blocks in whole pages, and space reserved for blocks being written."""
    num_blocks: int = 0
    budget_bytes: int = 0
    """Budget of the process that opened the directory last, for tools."""
    num_changes: int = 0
    """Counts changes after which there may be a block to evict: blocks written or removed, leases changed."""


class Ledger:
    """The lock of a directory, and its usage. Methods raise `OSError` if the directory fails."""

    def __init__(self, layout: DirectoryLayout, *, makes: bool) -> None:
        """With `makes`, the directory and the lock file are made when they are needed and do not exist."""
        self._layout, self._makes = layout, makes
        self._threads = threading.Lock()
        self._fd, self._is_closed = -1 if makes else self._open_lock_file(), False
        self._boot = _read_boot_id()
        self._is_changing = False
        self.record = UsageRecord()

    @contextlib.contextmanager
    def hold_lock(self) -> Iterator[UsageRecord]:
        """Hold the lock. Yields the usage; call `mark_uncertain` before the first change."""
        with self._threads:
            self._acquire_lock()
            try:
                found = self._read_record()
                self._is_changing = False
                if found is None:
                    self.mark_uncertain()
                    self.recount_usage()
                else:
                    self.record = found
                yield self.record
                if self._is_changing:
                    self._write_record(is_certain=True)
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _acquire_lock(self) -> None:
        """Wait for the lock. If its file was deleted meanwhile, lock the new one, as other processes do."""
        if self._is_closed:
            raise OSError(errno.EBADF, "closed")
        while True:
            if self._fd < 0:
                self._fd = self._open_lock_file()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            is_named = False
            try:
                is_named = os.path.samestat(os.stat(self._layout.lock), os.fstat(self._fd))
            except FileNotFoundError:
                pass
            finally:
                if not is_named:
                    os.close(self._fd)
                    self._fd = -1
            if is_named:
                return

    def mark_uncertain(self) -> None:
        """Mark the record as uncertain until the lock is released, before a change."""
        if not self._is_changing:
            self._is_changing = True
            self._write_record(is_certain=False)

    def recount_usage(self) -> None:
        """Count all files, and remove what dead writers and expired leases left."""
        writers.remove_dead_writers(self._layout)
        leases.remove_expired_leases(self._layout, everything=True)
        sizes = [round_to_pages(stat.st_size) for _, stat in self._layout.list_blocks()]
        self.record.used_bytes = sum(sizes) + writers.count_reserved_bytes(self._layout)
        self.record.num_blocks = len(sizes)

    def read_usage(self) -> UsageRecord:
        """Return the usage; after closing, the last one known."""
        if self._is_closed:
            return self.record
        with self.hold_lock() as record:
            return record

    def close(self) -> None:
        """Close the lock file."""
        with self._threads:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._is_closed = -1, True

    def _open_lock_file(self) -> int:
        """Open the lock file. Tools do not make it: they may run as another user, and workers could not open it."""
        if self._makes:
            make_folder(self._layout.root)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if self._makes else 0)
        return os.open(self._layout.lock, flags, 0o600)

    def _read_record(self) -> UsageRecord | None:
        stored = os.pread(self._fd, _RECORD.size + _CHECKSUM.size, 0)
        if len(stored) != _RECORD.size + _CHECKSUM.size:
            return None
        fields = stored[: _RECORD.size]
        magic, boot, is_certain, used, blocks, budget, changes = _RECORD.unpack(fields)
        if _CHECKSUM.unpack_from(stored, _RECORD.size)[0] != compute_checksum(fields) or magic != MAGIC:
            return None
        if not is_certain or boot != self._boot:
            # The files are counted anew, the rest is still right.
            self.record.budget_bytes, self.record.num_changes = budget, changes + 1
            return None
        return UsageRecord(used, blocks, budget, changes)

    def _write_record(self, *, is_certain: bool) -> None:
        now = self.record
        used, blocks = max(0, now.used_bytes), max(0, now.num_blocks)
        fields = _RECORD.pack(MAGIC, self._boot, is_certain, used, blocks, now.budget_bytes, now.num_changes)
        os.pwrite(self._fd, fields + _CHECKSUM.pack(compute_checksum(fields)), 0)


def _read_boot_id() -> bytes:
    """Return an id of the machine's boot."""
    try:
        return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).digest()[:16]
    except OSError:
        return bytes(16)
