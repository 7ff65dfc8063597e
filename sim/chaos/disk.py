"""A small disk of the workers' own, which can be filled.

Where that is allowed (user namespaces, or root) it is a file system in memory which only the nursery and its workers
see, and it is really full. Elsewhere it is a folder, and the write of a block fails as it does on a full disk.
"""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from penstock.kvstore import steps
from sim.small_disk import ALONE

SIZE_MB, BUDGET_MB = 16, 64
"""The disk is full before the workers' budget is."""
MOUNT = f'mount -t tmpfs -o size={SIZE_MB}m none "$0"'


class Disk:
    """The disk of a nursery's workers, at `path` as they see it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "disk"
        self.path.mkdir()
        with contextlib.suppress(FileNotFoundError):
            tried = subprocess.run([*ALONE, MOUNT, str(self.path)], capture_output=True, check=False)
            self.is_real = tried.returncode == 0
        self._seen = self.path

    is_real = False
    """Whether it is a file system of its own."""

    def command(self, command: Sequence[str]) -> list[str]:
        """How a program is started that has the disk."""
        return [*ALONE, MOUNT + ' && exec "$@"', str(self.path), *command] if self.is_real else list(command)

    def look_from(self, pid: int) -> None:
        """The program that has it."""
        if self.is_real:
            self._seen = Path(f"/proc/{pid}/root{self.path}")

    @property
    def _others(self) -> Path:
        return self._seen / "another's"

    def fill(self) -> None:
        """Take all the room that there is."""
        with self._others.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while self.is_real and file.write(bytes(2**16)):
                pass

    def free(self) -> None:
        """Give it back."""
        self._others.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all that is there."""
        self.free()
        for path in self._seen.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def num_blocks(self) -> int:
        """KV blocks that are there."""
        return sum(1 for _ in self._seen.rglob("*.kv"))

    def settings(self) -> dict[str, str]:
        """For workers that keep KV blocks on it."""
        return {"PENSTOCK_KV_STORE_DISK_MB": str(BUDGET_MB), "PENSTOCK_KV_STORE_DISK_DIR": str(self.path / "blocks")}


def pretend(disk: str) -> None:
    """In a worker: its writes of blocks fail while the disk is said to be full."""

    def reached(step: str) -> None:
        if step == "put 2.1" and os.path.exists(f"{disk}/another's"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps.reached = reached
