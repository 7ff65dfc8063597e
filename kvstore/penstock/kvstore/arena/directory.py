"""The directory of an arena on disk: a slot file for each model, within one budget.

A slot file begins with a page that says its format, and which tables describe its slots. The tables are in shared
memory, so that no error of the disk can damage them. All workers of a host share both, and the slot file outlives the
tables. Opening, under the directory's lock:

1. The slot file is opened, or made.
2. If another process uses it, the tables in our shared memory must be those that it uses, as its lock says. If they
   are not, that process has other shared memory, for example in another container, and the opening is refused.
3. If no process uses it, and the tables here are not those that it names, or not of our size, a new id is written to
   the slot file. After a crash here no tables have this id, and the next process begins again.
4. Tables with this id are made, as `file.py` makes them, without any slot. Its slots are adopted (`growth.py`).
5. The byte of the slot file that stands for this id is locked: it is in use.

The files together stay within the budget, as each grows under the lock. Where space is short, files of other models
that no process uses are removed, the oldest first.
"""

import errno
import hashlib
import logging
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from penstock.errors import KVStoreError
from penstock.failpoints import failpoint
from penstock.kvstore.arena.file import (
    arena_directory,
    closing_on_error,
    initialize_arena,
    open_in_use,
    read_boot_id,
    read_file_superblock,
    read_tables_id,
    remove_arena,
)
from penstock.kvstore.arena.layout import PAGE_BYTES, VERSION, Geometry
from penstock.kvstore.arena.locks import FIRST_TABLES_BYTE, MAX_TABLES_ID, ByteLocks
from penstock.kvstore.block import BlockFormat

log = logging.getLogger(__name__)

DIRECTORY_SETTING, SIZE_SETTING = "PENSTOCK_KV_STORE_DISK_DIR", "PENSTOCK_KV_STORE_DISK_MB"
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_MAGIC = b"PKVSLOTS"
_SUPERBLOCK = struct.Struct("<8sQQ32s16sQ")
_ID_AT = _SUPERBLOCK.size - 8
_LOCK_BYTE = 0


class SlotDirectory:
    """One opening of a directory, for one slot file. Raises `OSError` if the file system fails."""

    def __init__(self, root: Path, budget_bytes: int, tables_directory: str, *, create: bool) -> None:
        if create:
            root.mkdir(0o700, parents=True, exist_ok=True)
        self._root, self._budget, self._tables_directory = root, budget_bytes, tables_directory
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        self._fd = os.open(root / "lock", flags, 0o600)
        self._locks = ByteLocks(self._fd)

    @contextmanager
    def hold_lock(self) -> Iterator[None]:
        """Hold the directory's lock, which no two openings can."""
        self._locks.lock_byte(_LOCK_BYTE)
        try:
            yield
        finally:
            self._locks.unlock_byte(_LOCK_BYTE)

    def open_slots(self, form: BlockFormat, wanted: Geometry) -> tuple[int, int, Path, Geometry]:
        """Do steps 1 to 5, under the lock. Return descriptors of slot file and tables, the tables' path and geometry.

        Raise `OSError`, or `KVStoreError` if other processes have the slot file open with other tables.
        """
        slots = os.open(self._slot_path(form), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            failpoint("disk.open.1")
            path, locks = self._tables_path(slots), ByteLocks(slots)
            used, found = self._find_used_tables(slots)
            tables_id = used or _read_slot_superblock(slots, form)
            if not used and (found is None or (found.id, found.geometry) != (tables_id, wanted)):
                path.unlink(missing_ok=True)
                tables_id = 1 + secrets.randbelow(MAX_TABLES_ID)
                _write_slot_superblock(slots, form, tables_id)
                failpoint("disk.open.3")
                if os.fstat(slots).st_size > wanted.total_bytes:
                    os.ftruncate(slots, wanted.total_bytes)
            geometry = found.geometry if used and found else wanted
            tables = open_in_use(path, create=True, setting=SIZE_SETTING)
            with closing_on_error(tables, path, SIZE_SETTING):
                initialize_arena(tables, path, geometry, form, str(self._root), tables_id)
                locks.lock_byte(FIRST_TABLES_BYTE + tables_id, shared=True)
                os.utime(slots)
                self.make_space(0)
                self._remove_stale_tables()
            return slots, tables, path, geometry
        except BaseException:
            os.close(slots)
            raise

    def check_tables(self) -> None:
        """Raise `KVStoreError` if other processes of this version have any model's slot file open with other tables."""
        with self.hold_lock():
            for path in find_slot_files(self._root):
                slots = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if read_format(slots):
                        self._find_used_tables(slots)
                finally:
                    os.close(slots)

    def _find_used_tables(self, slots: int) -> "tuple[int, _FoundTables | None]":
        """Return the id of the tables by which other processes use a slot file, or 0, and the tables that are here.

        Raise `KVStoreError` if they use other tables.
        """
        path = self._tables_path(slots)
        used, found = _find_tables_in_use(slots), _read_tables(path)
        if used and (found is None or found.id != used):
            raise KVStoreError(
                f"{DIRECTORY_SETTING}: processes with another shared memory use {self._root}: give all of them the "
                f"same {path.parent}, or give each its own directory"
            )
        return used, found

    def attach_slots(self, slot_path: Path) -> tuple[int, int, Path, Geometry, BlockFormat]:
        """Open a slot file and its tables as they are, under the lock. Raise `OSError` or `KVStoreError`."""
        slots = os.open(slot_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            path = self._tables_path(slots)
            found = _read_tables(path)
            if found is None or found.id != (_find_tables_in_use(slots) or _read_slot_superblock(slots, found.form)):
                raise KVStoreError(f"{slot_path}: no worker with this shared memory opened it since the host's boot")
            tables = open_in_use(path, create=False, setting=SIZE_SETTING)
            ByteLocks(slots).lock_byte(FIRST_TABLES_BYTE + found.id, shared=True)
            return slots, tables, path, found.geometry, found.form
        except BaseException:
            os.close(slots)
            raise

    def make_space(self, num_bytes: int) -> int:
        """Remove unused files until `num_bytes` more fit into the budget. Return how many bytes fit, at most those."""
        while (free := self._budget - sum(path.stat().st_size for path in find_slot_files(self._root))) < num_bytes:
            if not self.remove_oldest_unused():
                break
        return max(0, min(free, num_bytes))

    def remove_oldest_unused(self) -> bool:
        """Remove the slot file that was opened longest ago of those that no process uses. Return False if none is."""
        for path in sorted(find_slot_files(self._root), key=lambda path: path.stat().st_mtime_ns):
            with suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if not _find_tables_in_use(fd):
                        tables = self._tables_path(fd)
                        path.unlink()
                        remove_arena(tables)
                        return True
                finally:
                    os.close(fd)
        return False

    def close(self) -> None:
        """Close the directory. Calling it twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _slot_path(self, form: BlockFormat) -> Path:
        digest = hashlib.sha256(form.fingerprint + form.layout + f"{VERSION}|{form.payload_bytes}".encode())
        return self._root / f"{digest.hexdigest()[:16]}.slots"

    @property
    def _tables_prefix(self) -> str:
        status = self._root.stat()
        return f"penstock-kvdisk-{os.geteuid()}-{_digest(status.st_dev, status.st_ino)}"

    def _tables_path(self, slots: int) -> Path:
        """Return the path of the tables that describe a slot file, as all processes of the host see it."""
        status = os.fstat(slots)
        digest = _digest(VERSION, read_boot_id(), status.st_dev, status.st_ino)
        return arena_directory(self._tables_directory) / f"{self._tables_prefix}-{digest}"

    def _remove_stale_tables(self) -> None:
        """Remove tables of slot files of this directory that are gone."""
        current = set()
        for path in find_slot_files(self._root):
            with path.open("rb") as file:
                current.add(self._tables_path(file.fileno()))
        for path in arena_directory(self._tables_directory).glob(f"{self._tables_prefix}-*"):
            if path not in current:
                remove_arena(path)


def find_slot_files(root: Path) -> list[Path]:
    """Return the slot files of a directory."""
    return sorted(root.glob("????????????????.slots"))


def _digest(*words: object) -> str:
    return hashlib.sha256("|".join(map(str, words)).encode()).hexdigest()[:16]


class _FoundTables(NamedTuple):
    id: int
    geometry: Geometry
    form: BlockFormat


def _find_tables_in_use(slots: int) -> int:
    """Return the id of the tables by which another process uses a slot file; 0 if none does."""
    held = ByteLocks(slots).find_held_elsewhere(FIRST_TABLES_BYTE, MAX_TABLES_ID + 1)
    return 0 if held is None else held - FIRST_TABLES_BYTE


def _read_tables(path: Path) -> _FoundTables | None:
    """Return what tables at a path are of; None if there are none that are whole."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            described = read_file_superblock(fd)
            return _FoundTables(read_tables_id(fd), *described) if described else None
        finally:
            os.close(fd)
    return None


def _read_slot_superblock(slots: int, form: BlockFormat) -> int:
    """Return the id of the tables that a slot file names; 0 if it is not one of this format yet."""
    page = os.pread(slots, _SUPERBLOCK.size, 0)
    return int.from_bytes(page[_ID_AT:], "little") if page[:_ID_AT] == _pack_superblock(form, 0)[:_ID_AT] else 0


def read_format(slots: int) -> BlockFormat | None:
    """Return the format of a slot file; None if it is none of this version."""
    page = os.pread(slots, _SUPERBLOCK.size, 0)
    if len(page) < _SUPERBLOCK.size:
        return None
    magic, version, payload_bytes, fingerprint, layout, _ = _SUPERBLOCK.unpack(page)
    return BlockFormat(fingerprint, layout, payload_bytes) if (magic, version) == (_MAGIC, VERSION) else None


def _write_slot_superblock(slots: int, form: BlockFormat, tables_id: int) -> None:
    """Write a slot file's first page. If the disk is full, a new file has none until it is opened again."""
    try:
        os.pwrite(slots, _pack_superblock(form, tables_id).ljust(PAGE_BYTES, b"\0"), 0)
    except OSError as error:
        if error.errno not in FULL_DISK_ERRORS:
            raise
        log.warning("the disk is full, no KV blocks are written until space is freed: %s", error)


def _pack_superblock(form: BlockFormat, tables_id: int) -> bytes:
    return _SUPERBLOCK.pack(_MAGIC, VERSION, form.payload_bytes, form.fingerprint, form.layout, tables_id)
