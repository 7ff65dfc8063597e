"""Locks on single bytes of a file, which the kernel gives back when their holder dies, however it dies.

They belong to the open file (Linux: open file description locks): two openings of one file exclude each other, in one
process too; threads that share an opening do not. Nothing is read or written at the bytes; they need not even exist.
"""

import errno
import fcntl
import struct

METADATA_BYTE = 0
"""Held for every change of the tables."""
ALLOCATION_BYTE = 1
"""Held while a piece of memory is allocated."""
IN_USE_BYTE = 2
"""Shared by all who have the arena open; who removes it holds it alone."""
FIRST_OWNER_BYTE = 1024
"""The first of the owners' bytes: each opening holds one of its own, which shows that it lives."""
MAX_OWNERS = 1024

_FLOCK = struct.Struct("hhqqi4x")


class ByteLocks:
    """The locks that one opening of a file (`fd`) holds."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._metadata = (_pack_flock(fcntl.F_WRLCK, METADATA_BYTE), _pack_flock(fcntl.F_UNLCK, METADATA_BYTE))

    def lock_metadata(self) -> None:
        """`lock(METADATA)`, faster."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, self._metadata[0])

    def unlock_metadata(self) -> None:
        """`unlock(METADATA)`, faster."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._metadata[1])

    def lock_byte(self, byte: int, *, shared: bool = False) -> None:
        """Wait for the lock, alone or shared with others."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _pack_flock(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte))

    def try_lock(self, byte: int) -> bool:
        """Take the lock, alone, if nobody else holds it."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack_flock(fcntl.F_WRLCK, byte))
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def unlock_byte(self, byte: int) -> None:
        """Give it back."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack_flock(fcntl.F_UNLCK, byte))

    def unlock_all(self) -> None:
        """Give back all of them; closing the file is not enough while it is mapped."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _pack_flock(fcntl.F_UNLCK, 0, length=0))

    def is_held_elsewhere(self, byte: int) -> bool:
        """Whether another opening holds it, shared or alone."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _pack_flock(fcntl.F_WRLCK, byte))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _pack_flock(kind: int, byte: int, length: int = 1) -> bytes:
    return _FLOCK.pack(kind, 0, byte, length, 0)
