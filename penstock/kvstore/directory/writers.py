"""The processes that write: each has a folder with the files that it is writing, and a lock that ends with the process.

The lock file contains how many bytes of the budget are reserved for these files. A folder whose lock is free belongs to
a dead process, however new it is, and is removed. All this happens under the directory's lock.
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
    """The folder of an open tier. Its methods are called under the directory's lock, except `give_up_drafts`.

    The reservation is the size of all drafts: files with reserved space that are not published yet.
    `update_reservation` writes it to the folder's lock file and returns by how much it changed. So the directory's
    usage always agrees with that file, also if a draft could not be removed or the file not be written.
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
        """Return a new path for a file of `size` bytes."""
        path = f"{self._folder}/{secrets.token_hex(8)}"
        self._drafts[path] = size
        return path

    def remove_published(self, path: str) -> None:
        """Forget a draft that is a block now."""
        del self._drafts[path]

    def give_up_drafts(self, paths: Iterable[str]) -> None:
        """Give these files up: they are removed by the next `update_reservation`."""
        self._given_up.extend(paths)

    def update_reservation(self) -> int:
        """Remove files that were given up, and record the reservation. Return how many bytes it grew."""
        if not os.path.exists(f"{self._folder}/{RESERVATION_NAME}"):  # the folder was deleted
            self._create_folder()
        for _ in range(len(self._given_up)):
            path = self._given_up.popleft()
            try:
                remove_file(path)
                self._drafts.pop(path, None)
            except OSError:  # as long as the file exists, it counts
                self._given_up.append(path)
        num_reserved = sum(self._drafts.values())
        more = num_reserved - self._num_recorded
        if more:
            os.pwrite(self._fd, _COUNT.pack(num_reserved), 0)
            self._num_recorded = num_reserved
        return more

    def close(self) -> int:
        """Remove the folder. Return how many bytes were still reserved."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._close_lock()
        return self._num_recorded

    def _create_folder(self) -> None:
        """Make the folder, take its lock, and write the reservation."""
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
    """Remove the folders of dead processes. Return how many bytes they had reserved."""
    total = 0
    for folder in list_folders(layout.writers):
        with _lock_if_dead(folder.path) as reserved_bytes:
            if reserved_bytes is not None:
                shutil.rmtree(folder.path)
                total += reserved_bytes
    return total


def count_reserved_bytes(layout: DirectoryLayout) -> int:
    """Return how many bytes all writers have reserved, dead or alive."""
    return sum(_read_reservation(f"{folder.path}/{RESERVATION_NAME}") for folder in list_folders(layout.writers))


def find_dead_writers(layout: DirectoryLayout) -> list[str]:
    """Return the folders of dead processes, for checks."""
    found = []
    for folder in list_folders(layout.writers):
        with _lock_if_dead(folder.path) as reserved_bytes:
            if reserved_bytes is not None:
                found.append(folder.path)
    return found


class _lock_if_dead(contextlib.AbstractContextManager["int | None"]):  # noqa: N801 (used as a function)
    """Takes a dead writer's lock. Yields what it had reserved, or None if the writer is alive."""

    def __init__(self, folder: str) -> None:
        self._path, self._fd = f"{folder}/{RESERVATION_NAME}", -1

    def __enter__(self) -> int | None:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return 0  # its process died while making it
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
