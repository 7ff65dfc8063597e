"""Layout of the directory.

lock                            the lock file, which contains the usage
<2 hex>/<64 hex>.kv             a block: header and content; its modification time is the time of its last use
leases/<owner>/<64 hex>.<end>   a lease: a second link to a block; <end> in milliseconds since the epoch
writers/<name>/                 of a process that has the directory open: its reservation, and the files it is writing
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = 4096
HEX_DIGITS = frozenset("0123456789abcdef")
NUM_KEY_DIGITS = 64


def round_to_pages(num_bytes: int) -> int:
    """Return the space that a file takes: whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class DirectoryLayout:
    """Paths in a directory. They are strings, as they are built for every block that is used."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.lock, self.leases, self.writers = (f"{self.root}/{name}" for name in ("lock", "leases", "writers"))

    def block_path(self, key: bytes) -> str:
        """Return the path of a block's file."""
        name = key.hex()
        return f"{self.root}/{name[:2]}/{name}.kv"

    def owner_folder(self, owner: str) -> str:
        """Return the folder of an owner's leases. Any text may be an owner."""
        return f"{self.leases}/{hashlib.sha256(owner.encode()).hexdigest()[:32]}"

    def list_blocks(self) -> Iterator[tuple[bytes, os.stat_result]]:
        """Yield key and stat of all blocks. Blocks that are removed meanwhile are left out."""
        for folder in list_folders(self.root):
            if len(folder.name) == 2 and set(folder.name) <= HEX_DIGITS:
                for entry in list_entries(folder.path):
                    key = parse_key(entry.name, ".kv")
                    with contextlib.suppress(FileNotFoundError):
                        if key is not None:
                            yield key, entry.stat(follow_symlinks=False)


def list_entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it does not exist."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def list_folders(folder: str) -> list[os.DirEntry[str]]:
    """Return the folders in a folder. Other entries are not ours."""
    return [entry for entry in list_entries(folder) if entry.is_dir(follow_symlinks=False)]


def make_folder(path: str) -> None:
    """Make a folder and its parents where they do not exist, for this user alone."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        make_folder(path)


def parse_key(name: str, ending: str) -> bytes | None:
    """Return the key in a file's name, or None if the name is not one of ours."""
    digits = name.removesuffix(ending)
    if len(digits) != NUM_KEY_DIGITS or digits + ending != name or not set(digits) <= HEX_DIGITS:
        return None
    return bytes.fromhex(digits)


def remove_file(path: str) -> bool:
    """Remove a file. Return whether it existed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
