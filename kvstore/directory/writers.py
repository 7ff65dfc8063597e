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

from kvstore.directory.layout import Layout, folders, make_folder

RESERVED = "reserved"
_COUNT = struct.Struct("<Q")


class Writer:
    """The folder of a tier that is open. Its methods are called under the directory's lock, except `new_file`."""

    def __init__(self, layout: Layout) -> None:
        self._folder = f"{layout.writers}/{secrets.token_hex(8)}"
        self._num_reserved = 0
        self._fd = self._make()
        self.reserve(0)

    def reserve(self, num_bytes: int) -> None:
        """So many bytes more (or less) are for what is being written."""
        if not os.path.exists(f"{self._folder}/{RESERVED}"):  # somebody deleted it
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
            self._fd = self._make()
        self._num_reserved += num_bytes
        os.pwrite(self._fd, _COUNT.pack(self._num_reserved), 0)

    def new_file(self) -> str:
        """A path that nobody else uses."""
        return f"{self._folder}/{secrets.token_hex(8)}"

    def close(self) -> int:
        """Give it up; how many bytes were still reserved."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
        return self._num_reserved

    def _make(self) -> int:
        """The folder, and its lock in our hands."""
        make_folder(self._folder)
        fd = os.open(f"{self._folder}/{RESERVED}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd


def bury(layout: Layout) -> int:
    """Remove the folders of dead processes; how many bytes they had reserved."""
    total = 0
    for folder in folders(layout.writers):
        with _claimed(folder.path) as reserved:
            if reserved is not None:
                shutil.rmtree(folder.path)
                total += reserved
    return total


def reserved(layout: Layout) -> int:
    """How many bytes all writers have reserved, dead or alive."""
    return sum(_reserved(f"{folder.path}/{RESERVED}") for folder in folders(layout.writers))


def dead(layout: Layout) -> list[str]:
    """The folders of dead processes, for checks."""
    found = []
    for folder in folders(layout.writers):
        with _claimed(folder.path) as reserved:
            if reserved is not None:
                found.append(folder.path)
    return found


class _claimed(contextlib.AbstractContextManager["int | None"]):  # noqa: N801 (used as a function)
    """A writer's lock, if nobody has it: what it had reserved, or None for one that lives."""

    def __init__(self, folder: str) -> None:
        self._path, self._fd = f"{folder}/{RESERVED}", -1

    def __enter__(self) -> int | None:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return 0  # it died while it was made
        except BlockingIOError:
            return None
        return _reserved(self._path)

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _reserved(path: str) -> int:
    try:
        with open(path, "rb") as file:
            found = file.read(_COUNT.size)
    except FileNotFoundError:
        return 0
    return int(_COUNT.unpack(found)[0]) if len(found) == _COUNT.size else 0
