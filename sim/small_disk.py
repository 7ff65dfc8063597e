"""A file system that is soon full: a child process has one of its own, which goes with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.local.processes import Child, start_child

ROOT = Path(__file__).parents[1]
ALONE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def run_on_small_disk(directory: Path, num_pages: int, module: str, what: str) -> Child:
    """`python -m MODULE DISK WHAT`, on a disk of so many pages that nobody else sees, until it has ended."""
    disk = directory / "disk"
    disk.mkdir()
    mount = 'mount -t tmpfs -o size=$(($1 * 4096)) none "$2" && shift 2 && '
    arguments = ["sh", str(num_pages), str(disk)]
    if subprocess.run([*ALONE, mount + "true", *arguments], capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here, not even for a process alone")
    command = [*ALONE, f'{mount} exec "$@"', *arguments, sys.executable, "-m", module, str(disk), what]
    child = start_child(command, name=what, directory=ROOT, log=directory / "log")
    child.wait(60)
    return child


def fill(directory: Path, num_pages_left: int = 0) -> Path:
    """Take all the room there is, but for so many pages; the file that has it."""
    system = os.statvfs(directory)
    path = directory / "another's"
    path.write_bytes(bytes(system.f_bavail * system.f_frsize - num_pages_left * 4096))
    return path
