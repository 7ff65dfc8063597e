"""A small disk of the workers' own, which can be filled.

Where user namespaces or root allow it, it is a file system in memory that only the fork server and its workers see,
and it is really full. Elsewhere it is a folder, and the write of a block fails as it does on a full disk.
"""

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from penstock import failpoints
from penstock.errors import DamagedBlock
from penstock.kvstore.arena.directory import read_format
from penstock.kvstore.arena.layout import Geometry
from penstock.kvstore.block import Header
from sim.small_disk import UNSHARE_COMMAND

SIZE_MB, BUDGET_MB = 16, 64
"""The disk is smaller than the workers' budget, so that it fills up first."""
MOUNT = f'mount -t tmpfs -o size={SIZE_MB}m none "$0"'


class SmallDisk:
    """The disk of a fork server's workers. `path` is where they see it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "disk"
        self.path.mkdir()
        with contextlib.suppress(FileNotFoundError):
            tried = subprocess.run([*UNSHARE_COMMAND, MOUNT, str(self.path)], capture_output=True, check=False)
            self.is_real = tried.returncode == 0
        self._seen = self.path

    is_real = False
    """Whether it is a file system of its own."""

    def wrap_command(self, command: Sequence[str]) -> list[str]:
        """Return the command that starts a program which has the disk mounted."""
        return [*UNSHARE_COMMAND, MOUNT + ' && exec "$@"', str(self.path), *command] if self.is_real else list(command)

    def view_through(self, pid: int) -> None:
        """See the disk through the process that has it mounted."""
        if self.is_real:
            self._seen = Path(f"/proc/{pid}/root{self.path}")

    @property
    def _filler(self) -> Path:
        return self._seen / "another's"

    def fill_up(self) -> None:
        """Fill the disk with one large file."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while self.is_real and file.write(bytes(2**16)):
                pass

    def free_space(self) -> None:
        """Remove the file that fills the disk."""
        self._filler.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove everything on the disk."""
        self.free_space()
        for path in self._seen.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def count_blocks(self) -> int:
        """Return how many KV blocks the headers on the disk name."""
        return sum(count_headers(path) for path in self._seen.rglob("*.slots"))

    def make_settings(self) -> dict[str, str]:
        """Return the settings for workers that keep KV blocks on the disk."""
        return {"PENSTOCK_KV_STORE_DISK_MB": str(BUDGET_MB), "PENSTOCK_KV_STORE_DISK_DIR": str(self.path / "blocks")}


def count_headers(path: Path) -> int:
    """Return how many slots of a slot file have a valid header."""
    with path.open("rb") as file:
        form = read_format(file.fileno())
    if form is None:
        return 0
    geometry, stored, num_found = Geometry(form.payload_bytes, 0, on_disk=True), memoryview(path.read_bytes()), 0
    for start in range(geometry.slots_at, len(stored), geometry.slot_bytes):
        with contextlib.suppress(DamagedBlock):
            Header.unpack(stored[start:])
            num_found += 1
    return num_found


def simulate_full_disk(disk: str) -> None:
    """Let this worker's block writes fail with ENOSPC while the disk counts as full."""

    def fail_if_full() -> None:
        if os.path.exists(f"{disk}/another's"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failpoints.arm_action("disk.put.2.1", fail_if_full)
