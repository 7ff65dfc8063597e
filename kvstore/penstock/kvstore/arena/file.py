"""Arenas as files: their names, opening them, listing them, removing them.

The name contains the user, a hash over format, size, version and boot of the host, and the pipeline. For an arena on
disk, this file has the tables (`directory.py` says its name). An arena is opened in four steps:

1. The file is opened or created, and locked as in use. If it was removed before the lock, this step is repeated.
2. Under the metadata lock, a file that is not an arena yet gets its size and memory for the tables. If it also has the
   slots, it gets memory for the first one. After a crash here, the next process begins again.
3. The superblock is written. After a crash here the version is missing, and the next process begins again.
4. The version is written: the file is an arena.
"""

import fcntl
import hashlib
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from penstock.errors import KVStoreError
from penstock.failpoints import tier_failpoint
from penstock.kvstore.arena.layout import PAGE_BYTES, VERSION, W_TABLES_ID, Geometry, read_superblock, write_superblock
from penstock.kvstore.arena.locks import IN_USE_BYTE, ByteLocks
from penstock.kvstore.block import BlockFormat

SETTING = "PENSTOCK_KV_STORE_SHARED_MB"
_PREFIX = "penstock-kv"


@dataclass(frozen=True)
class ArenaFile:
    """The file of an arena."""

    path: Path
    pipeline: str
    bytes: int
    allocated_bytes: int
    """Those that the file system has given to it, of all that it may have."""
    is_in_use: bool
    """Whether a process has the arena open."""


def arena_directory(directory: str = "") -> Path:
    """Return where arenas are: the directory given, else shared memory, else the directory for temporary files."""
    shared = Path("/dev/shm")
    if directory or shared.is_dir():
        return Path(directory or shared)
    with suppress(OSError):
        return Path(tempfile.gettempdir())
    return shared  # the system has no such directory: opening the arena will say so


def arena_path(directory: str, pipeline: str, form: BlockFormat, geometry: Geometry) -> Path:
    """The file of an arena."""
    words = f"{VERSION}|{read_boot_id()}|{geometry.num_slots}|{geometry.slot_bytes}|{form.payload_bytes}"
    digest = hashlib.sha256(form.fingerprint + form.layout + words.encode()).hexdigest()[:16]
    return arena_directory(directory) / f"{_PREFIX}-{os.geteuid()}-{digest}-{quote(pipeline, safe='')}"


def find_arenas(directory: str = "") -> list[ArenaFile]:
    """Return this user's arenas."""
    found = []
    for path in sorted(arena_directory(directory).glob(f"{_PREFIX}-{os.geteuid()}-*")):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                pipeline = unquote(path.name.split("-", 4)[-1])
                held = ByteLocks(fd).is_held_elsewhere(IN_USE_BYTE)
                status = os.fstat(fd)
                found.append(ArenaFile(path, pipeline, status.st_size, 512 * status.st_blocks, held))
            finally:
                os.close(fd)
    return found


def remove_arena(path: Path) -> bool:
    """Remove an arena unless a process has it open. Return whether it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not ByteLocks(fd).try_lock(IN_USE_BYTE):
            return False
        if _is_same_file(fd, path):
            path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def remove_stale_arenas(directory: str, pipeline: str, keep: Path) -> None:
    """Remove the pipeline's arenas of other formats that no process has open: the memory of former models."""
    for arena in find_arenas(directory):
        if arena.pipeline == pipeline and arena.path != keep and not arena.is_in_use:
            remove_arena(arena.path)


def open_in_use(path: Path, *, create: bool, setting: str = SETTING) -> int:
    """Do step 1: open an arena's file and lock it as in use. Return the descriptor. Raise `KVStoreError`."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        raise KVStoreError(f"shared memory: this system has no open file locks; {setting}=0 turns shared memory off")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    while True:
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise KVStoreError(f"shared memory: {path}: {error.strerror}; {setting}=0 turns it off") from None
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not stat.S_ISREG(status.st_mode):
                raise KVStoreError(f"shared memory: {path} is not a private file of this user; remove it")
            ByteLocks(fd).lock_byte(IN_USE_BYTE, shared=True)
            if _is_same_file(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def initialize_arena(
    fd: int, path: Path, geometry: Geometry, form: BlockFormat, pipeline: str, tables_id: int = 0
) -> None:
    """Do steps 2 to 4, if no process has done them. Raise `KVStoreError`."""
    locks = ByteLocks(fd)
    locks.lock_metadata()
    if read_file_superblock(fd) is None:
        first_bytes = geometry.metadata_bytes + (0 if geometry.on_disk else geometry.slot_bytes)
        _reserve_file(fd, path, geometry.tables_file_bytes, first_bytes)
        tier_failpoint("disk" if geometry.on_disk else "shared", "open.2")
        with mmap.mmap(fd, geometry.metadata_bytes) as memory:
            write_superblock(memory, geometry, form, pipeline, tables_id)
        tier_failpoint("disk" if geometry.on_disk else "shared", "open.4")
    locks.unlock_metadata()


def read_file_superblock(fd: int) -> tuple[Geometry, BlockFormat] | None:
    """Return geometry and format of the arena in a file; None if it is no arena, or not one yet."""
    described = read_superblock(os.pread(fd, PAGE_BYTES, 0))
    return described if described and os.fstat(fd).st_size >= described[0].tables_file_bytes else None


def read_tables_id(fd: int) -> int:
    """Return the id of the tables in a file; 0 if the file has the slots, too."""
    return int.from_bytes(os.pread(fd, 8, 8 * W_TABLES_ID), "little")


@contextmanager
def closing_on_error(fd: int, path: Path, setting: str = SETTING) -> Iterator[None]:
    """Close the file if opening the arena fails, and turn `OSError` into `KVStoreError`."""
    try:
        yield
    except BaseException as error:
        is_empty = not os.fstat(fd).st_size
        ByteLocks(fd).unlock_all()
        os.close(fd)
        if is_empty:
            remove_arena(path)
        if isinstance(error, OSError):
            raise KVStoreError(f"shared memory: {path}: {error.strerror}; {setting}=0 turns it off") from None
        raise


def _reserve_file(fd: int, path: Path, num_bytes: int, first_bytes: int) -> None:
    """Do step 2: give the file its size, and memory for its first bytes. Raise `KVStoreError`."""
    os.ftruncate(fd, 0)
    system = os.fstatvfs(fd)
    free = system.f_bavail * system.f_frsize
    if free < num_bytes:
        raise KVStoreError(_no_space_message(path, num_bytes, f"{free // 2**20} MB are free"))
    os.ftruncate(fd, num_bytes)
    try:
        os.posix_fallocate(fd, 0, first_bytes)
    except OSError as error:
        os.ftruncate(fd, 0)
        raise KVStoreError(_no_space_message(path, num_bytes, str(error.strerror))) from None


def _no_space_message(path: Path, num_bytes: int, why: str) -> str:
    """Return the error message for an arena that does not fit."""
    setting = SETTING if path.name.startswith(f"{_PREFIX}-") else "PENSTOCK_KV_STORE_DISK_MB"
    return f"shared memory: no room for {num_bytes // 2**20} MB in {path.parent} ({why}): lower {setting}"


def _is_same_file(fd: int, path: Path) -> bool:
    """Return whether the open file is still the one at that path."""
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def read_boot_id() -> str:
    """Return the id of the host's boot: the monotonic clock starts again with each boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
