"""The processes that write: each has a folder with the files it is writing and a lock that ends when it does.

The lock's file says how many bytes of the budget are reserved for what it is writing. A folder whose lock can be taken
belongs to a dead process, however young it is, and goes. All this happens under the directory's lock.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import struct
from collections import deque
from collections.abc import Iterable

from penstock.kvstore.directory.layout import DirectoryLayout, list_folders, make_folder, remove_file

RESERVATION_NAME = "reserved"
_COUNT = struct.Struct("<Q")


class Writer:
    """The folder of a tier that is open. Its methods are called under the directory's lock, except `give_up`.

    What is reserved is what its drafts, files that have room and no name yet, are to take. `settle` brings the record
    in the folder to that, and says by how much it changed: so the directory's usage always has what the record says,
    also where a file could not be removed or the record not be written.
    """

    def __init__(self, layout: DirectoryLayout) -> None:
        self._folder = f"{layout.writers}/{secrets.token_hex(8)}"
        self._drafts: dict[str, int] = {}
        self._given_up: deque[str] = deque()
        self._num_recorded = 0
        self._fd = -1
        try:
            self._create_folder()
        except OSError:
            self.close()
            raise

    def new_draft(self, size: int) -> str:
        """A path that nobody else uses, for a file of so many bytes."""
        path = f"{self._folder}/{secrets.token_hex(8)}"
        self._drafts[path] = size
        return path

    def remove_published(self, path: str) -> None:
        """It is a block now."""
        del self._drafts[path]

    def give_up_drafts(self, paths: Iterable[str]) -> None:
        """No more is done with these files: they go when it is settled."""
        self._given_up.extend(paths)

    def update_reservation(self) -> int:
        """Remove what was given up and record what is reserved; how many bytes more than before."""
        if not os.path.exists(f"{self._folder}/{RESERVATION_NAME}"):  # somebody deleted it
            self._create_folder()
        for _ in range(len(self._given_up)):
            path = self._given_up.popleft()
            try:
                remove_file(path)
                self._drafts.pop(path, None)
            except OSError:  # as long as it is there, it counts
                self._given_up.append(path)
        num_reserved = sum(self._drafts.values())
        more = num_reserved - self._num_recorded
        if more:
            os.pwrite(self._fd, _COUNT.pack(num_reserved), 0)
            self._num_recorded = num_reserved
        return more

    def close(self) -> int:
        """Give it up; how many bytes were still recorded."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._close_lock()
        return self._num_recorded

    def _create_folder(self) -> None:
        """The folder, its lock in our hands, and the record."""
        self._close_lock()
        make_folder(self._folder)
        self._fd = os.open(f"{self._folder}/{RESERVATION_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.pwrite(self._fd, _COUNT.pack(self._num_recorded), 0)

    def _close_lock(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def remove_dead_writers(layout: DirectoryLayout) -> int:
    """Remove the folders of dead processes; how many bytes they had reserved."""
    total = 0
    for folder in list_folders(layout.writers):
        with _lock_if_dead(folder.path) as reserved_bytes:
            if reserved_bytes is not None:
                shutil.rmtree(folder.path)
                total += reserved_bytes
    return total


def count_reserved_bytes(layout: DirectoryLayout) -> int:
    """How many bytes all writers have reserved, dead or alive."""
    return sum(_read_reservation(f"{folder.path}/{RESERVATION_NAME}") for folder in list_folders(layout.writers))


def find_dead_writers(layout: DirectoryLayout) -> list[str]:
    """The folders of dead processes, for checks."""
    found = []
    for folder in list_folders(layout.writers):
        with _lock_if_dead(folder.path) as reserved_bytes:
            if reserved_bytes is not None:
                found.append(folder.path)
    return found


class _lock_if_dead(contextlib.AbstractContextManager["int | None"]):  # noqa: N801 (used as a function)
    """A writer's lock, if nobody has it: what it had reserved, or None for one that lives."""

    def __init__(self, folder: str) -> None:
        self._path, self._fd = f"{folder}/{RESERVATION_NAME}", -1

    def __enter__(self) -> int | None:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return 0  # it died while it was made
        except BlockingIOError:
            return None
        return _read_reservation(self._path)

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _read_reservation(path: str) -> int:
    try:
        with open(path, "rb") as file:
            found = file.read(_COUNT.size)
    except FileNotFoundError:
        return 0
    return int(_COUNT.unpack(found)[0]) if len(found) == _COUNT.size else 0
