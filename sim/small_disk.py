"""A small file system of a child process, which disappears with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.local.processes import Child, start_child
from sim.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
_UNSHARE_COMMAND = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def run_on_small_disk(directory: Path, num_pages: int, module: str, what: str) -> Child:
    """Run `python -m MODULE DISK WHAT` to its end, on a disk of `num_pages` pages of 4 KiB that only it sees."""
    disk = directory / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=$(($1 * 4096)) none "$2" && shift 2 && '
    arguments = ["sh", str(num_pages), str(disk)]
    if subprocess.run([*_UNSHARE_COMMAND, mount + "true", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here, not even for a process alone")
    command = [*_UNSHARE_COMMAND, f'{mount} exec "$@"', *arguments, sys.executable, "-m", module, str(disk), what]
    child = start_child(command, name=what, directory=ROOT, log=directory / "log")
    child.wait(PATIENCE_S)
    return child


def fill_disk(directory: Path, num_pages_left: int = 0) -> Path:
    """Fill a file system but for `num_pages_left` pages. Returns the path of the file that fills it."""
    system = os.statvfs(directory)
    path = directory / "another's"
    path.write_bytes(bytes(system.f_bavail * system.f_frsize - num_pages_left * 4096))
    return path
