"""Leases are second links to a block's file: a block with more than one link is leased.

The end of a lease is part of the link's name, so that renewing is one rename. All functions are called under the
directory's lock.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from penstock.failpoints import failpoint
from penstock.kvstore.directory.layout import (
    DirectoryLayout,
    list_entries,
    list_folders,
    make_folder,
    parse_key,
    remove_file,
)


def now_ms() -> int:
    """Return the time by which leases end, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def create_leases(layout: DirectoryLayout, owner: str, keys: Sequence[bytes], seconds: float) -> None:
    """Lease those of these blocks that are here. An older link of the same owner to the same file is renamed."""
    folder = layout.owner_folder(owner)
    make_folder(folder)
    older = {key: path for key, _, path in _list_owner_leases(folder)}
    end = now_ms() + max(0, int(seconds * 1000))
    for key in dict.fromkeys(keys):
        path = f"{folder}/{key.hex()}.{end}"
        with contextlib.suppress(FileNotFoundError):
            if key in older and _is_link_to_block(layout, key, older[key]):
                os.rename(older[key], path)
            else:
                if key in older:
                    remove_file(older[key])
                os.link(layout.block_path(key), path)
            failpoint("disk.lease.1")
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # if it is empty


def remove_leases(layout: DirectoryLayout, owner: str, keys: Sequence[bytes]) -> None:
    """Remove the owner's leases on these blocks."""
    folder, wanted = layout.owner_folder(owner), set(keys)
    for key, _, path in _list_owner_leases(folder):
        if key in wanted:
            remove_file(path)
            failpoint("disk.release.1")
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def list_leases(layout: DirectoryLayout) -> Iterator[tuple[bytes, int, str]]:
    """Yield (key, end, path) of every lease, expired or not."""
    for folder in list_folders(layout.leases):
        yield from _list_owner_leases(folder.path)


def remove_leases_of_all_owners(layout: DirectoryLayout, keys: set[bytes]) -> None:
    """Remove all leases on these blocks, of any owner."""
    for key, _, path in list_leases(layout):
        if key in keys:
            remove_file(path)


def remove_expired_leases(layout: DirectoryLayout, *, everything: bool = False) -> int:
    """Remove expired leases and empty folders. Return when the next lease ends, or 0.

    With `everything`, also remove leases whose block is gone, and other files.
    """
    now, ends = now_ms(), list[int]()
    for folder in list_folders(layout.leases):
        for entry in list_entries(folder.path):
            key, end = _parse_lease_name(entry.name)
            if end > now and (not everything or (key is not None and _is_link_to_block(layout, key, entry.path))):
                ends.append(end)
            elif key is not None or everything:
                remove_file(entry.path)
        with contextlib.suppress(OSError):
            os.rmdir(folder.path)
    return min(ends, default=0)


def find_stray_leases(layout: DirectoryLayout) -> list[str]:
    """Return the files that are no lease of a block that is here, for checks."""
    found = []
    for folder in list_folders(layout.leases):
        for entry in list_entries(folder.path):
            key, _ = _parse_lease_name(entry.name)
            if key is None or not _is_link_to_block(layout, key, entry.path):
                found.append(entry.path)
    return found


def list_leased_keys(layout: DirectoryLayout) -> list[bytes]:
    """Return the key of each lease that has not expired."""
    now = now_ms()
    return [key for key, end, _ in list_leases(layout) if end > now]


def _list_owner_leases(folder: str) -> Iterator[tuple[bytes, int, str]]:
    for entry in list_entries(folder):
        key, end = _parse_lease_name(entry.name)
        if key is not None:
            yield key, end, entry.path


def _parse_lease_name(name: str) -> tuple[bytes | None, int]:
    """Return key and end from a lease's name; key None for another file."""
    digits, _, end = name.partition(".")
    key = parse_key(digits, "")
    return (key, int(end)) if key is not None and end.isascii() and end.isdigit() else (None, 0)


def _is_link_to_block(layout: DirectoryLayout, key: bytes, path: str) -> bool:
    """Return whether a lease is a link to the block that is here now."""
    try:
        return os.stat(layout.block_path(key)).st_ino == os.lstat(path).st_ino
    except FileNotFoundError:
        return False
