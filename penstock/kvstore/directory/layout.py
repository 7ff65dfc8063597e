"""Where things are in the directory.

lock                        the lock, and in it the usage
<2 hex>/<64 hex>.kv         a block: header and content; its time of change is when it was last used
leases/<owner>/<64 hex>.<end>   a second link to a block, which keeps it; <end> in milliseconds since the epoch
writers/<name>/             of a process that has the directory open: its reservation, and the files it is writing
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
    """What a file of so many bytes takes: whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class DirectoryLayout:
    """Paths in a directory, as strings: they are made for every block that is touched."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.lock, self.leases, self.writers = (f"{self.root}/{name}" for name in ("lock", "leases", "writers"))

    def block_path(self, key: bytes) -> str:
        """The file of a block."""
        name = key.hex()
        return f"{self.root}/{name[:2]}/{name}.kv"

    def owner_folder(self, owner: str) -> str:
        """The folder of an owner's leases; any text may be an owner."""
        return f"{self.leases}/{hashlib.sha256(owner.encode()).hexdigest()[:32]}"

    def list_blocks(self) -> Iterator[tuple[bytes, os.stat_result]]:
        """Keys and files of all blocks. What goes meanwhile is left out."""
        for folder in list_folders(self.root):
            if len(folder.name) == 2 and set(folder.name) <= HEX_DIGITS:
                for entry in list_entries(folder.path):
                    key = parse_key(entry.name, ".kv")
                    with contextlib.suppress(FileNotFoundError):
                        if key is not None:
                            yield key, entry.stat(follow_symlinks=False)


def list_entries(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder, nothing if it is not there."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def list_folders(folder: str) -> list[os.DirEntry[str]]:
    """The folders in a folder; what else may be there is not ours."""
    return [entry for entry in list_entries(folder) if entry.is_dir(follow_symlinks=False)]


def make_folder(path: str) -> None:
    """Make a folder that may be there already, and those that it is in, for this user alone."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        make_folder(path)


def parse_key(name: str, ending: str) -> bytes | None:
    """The key that a file's name says, if it is one of ours."""
    digits = name.removesuffix(ending)
    if len(digits) != NUM_KEY_DIGITS or digits + ending != name or not set(digits) <= HEX_DIGITS:
        return None
    return bytes.fromhex(digits)


def remove_file(path: str) -> bool:
    """Remove a file; whether it was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
