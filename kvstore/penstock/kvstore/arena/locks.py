"""Locks on single bytes of a file, which the kernel releases when their holder dies, however it dies.

They belong to the open file (Linux: open file description locks): two openings of one file exclude each other, also in
one process; threads that share an opening do not. Nothing is read or written at these bytes, which need not exist.
"""

import errno
import fcntl
import struct

METADATA_BYTE = 0
"""Locked while the tables are used."""
ALLOCATION_BYTE = 1
"""Locked while a chunk of memory is allocated."""
IN_USE_BYTE = 2
"""Locked shared by all processes that have the arena open, and exclusively by one that removes it."""
FIRST_OWNER_BYTE = 1024
"""First of the owners' bytes. Each opening locks a byte of its own, which shows that it is alive."""
MAX_OWNERS = 1024
FIRST_TABLES_BYTE, MAX_TABLES_ID = 4096, 2**32
"""Bytes of a slot file on disk: a process that uses the file locks the byte of its tables' id, shared."""

_FLOCK = struct.Struct("hhqqi4x")


class ByteLocks:
    """The locks that one opening of a file (`fd`) holds."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._metadata = (_pack_flock(fcntl.F_WRLCK, METADATA_BYTE), _pack_flock(fcntl.F_UNLCK, METADATA_BYTE))

    def lock_metadata(self) -> None:
        """Do `lock_byte(METADATA_BYTE)`, faster."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, self._metadata[0])

    def unlock_metadata(self) -> None:
        """Do `unlock_byte(METADATA_BYTE)`, faster."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._metadata[1])

    def lock_byte(self, byte: int, *, shared: bool = False) -> None:
        """Wait for the lock of a byte, exclusive or shared."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _pack_flock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte))

    def try_lock(self, byte: int) -> bool:
        """Take the exclusive lock of a byte if it is free. Return whether it was."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack_flock(fcntl.F_WRLCK, byte))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def unlock_byte(self, byte: int) -> None:
        """Release the lock of a byte."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack_flock(fcntl.F_UNLCK, byte))

    def unlock_all(self) -> None:
        """Release all locks. Closing the file is not enough while it is mapped."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack_flock(fcntl.F_UNLCK, 0, length=0))

    def is_held_elsewhere(self, byte: int, length: int = 1) -> bool:
        """Return whether another opening holds a lock of a byte, or of one of the `length` bytes from it on."""
        return self.find_held_elsewhere(byte, length) is not None

    def find_held_elsewhere(self, byte: int, length: int) -> int | None:
        """Return a byte of these that another opening holds a lock of; None if there is none."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _pack_flock(fcntl.F_WRLCK, byte, length))
        kind, _, held, *_ = _FLOCK.unpack(answer)
        return held if kind != fcntl.F_UNLCK else None


def _pack_flock(kind: int, byte: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, 0, byte, length, 0)
