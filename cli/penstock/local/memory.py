"""Shared memory of one stack: a directory that is removed with it, or when the next stack starts.

The owner of a directory holds a lock on it. The kernel releases the lock however the owner dies, and then any stack of
the same user may remove the directory.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY_DIRECTORY = Path("/dev/shm")
USUAL_BYTES = 2**28
"""The share of it that workers take where nothing else is set, or half of what there is."""
_DIRECTORY_PREFIX = f"penstock-stack-{os.geteuid()}-"


class StackMemory:
    """A new directory in memory, where the system has such a place."""

    def __init__(self) -> None:
        base = SHARED_MEMORY_DIRECTORY
        if not base.is_dir() or (usage := shutil.disk_usage(base)).free < min(USUAL_BYTES, usage.total // 2):
            base = Path(tempfile.gettempdir())
        _remove_abandoned(base)
        self.path, self._fd = _create_locked_directory(base)

    def close(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


def _create_locked_directory(base: Path) -> tuple[Path, int]:
    """Return a new directory, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=base))
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists():
                return path, fd
            os.close(fd)
        # Another stack removed it as abandoned before it was locked.


def _remove_abandoned(base: Path) -> None:
    """Remove this user's directories whose owners are dead."""
    for path in base.glob(f"{_DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
