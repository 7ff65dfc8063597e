"""Leases are second links to a block's file: the number of its links says that it is leased.

The end of a lease stands in the link's name, so that renewing is one rename. All this happens under the directory's
lock.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

from penstock.kvstore import steps
from penstock.kvstore.directory.layout import Layout, entries, folders, key_of, make_folder, unlink


def now_ms() -> int:
    """The time that leases end at."""
    return time.time_ns() // 1_000_000


def lease(layout: Layout, owner: str, keys: Sequence[bytes], seconds: float) -> None:
    """Link those that are here; an older link of the same owner is renamed, unless it is of a file that is gone."""
    folder = layout.owner(owner)
    make_folder(folder)
    older = {key: path for key, _, path in _links(folder)}
    end = now_ms() + max(0, int(seconds * 1000))
    for key in dict.fromkeys(keys):
        path = f"{folder}/{key.hex()}.{end}"
        with contextlib.suppress(FileNotFoundError):
            if key in older and _is_of_block(layout, key, older[key]):
                os.rename(older[key], path)
            else:
                if key in older:
                    unlink(older[key])
                os.link(layout.block(key), path)
            steps.reached("lease 1")
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # if nothing is in it


def release(layout: Layout, owner: str, keys: Sequence[bytes]) -> None:
    """Remove the owner's links to these blocks."""
    folder, wanted = layout.owner(owner), set(keys)
    for key, _, path in _links(folder):
        if key in wanted:
            unlink(path)
            steps.reached("release 1")
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def all_leases(layout: Layout) -> Iterator[tuple[bytes, int, str]]:
    """(Key, end, path) of every lease, ended or not."""
    for folder in folders(layout.leases):
        yield from _links(folder.path)


def forget(layout: Layout, keys: set[bytes]) -> None:
    """Remove all links to these blocks, whoever's they are."""
    for key, _, path in all_leases(layout):
        if key in keys:
            unlink(path)


def tidy(layout: Layout, *, everything: bool = False) -> int:
    """Remove leases that ended, and empty folders; the end of the next one to end, or 0.

    With `everything` also those whose block is gone, and what is none.
    """
    now, ends = now_ms(), list[int]()
    for folder in folders(layout.leases):
        for entry in entries(folder.path):
            key, end = _parsed(entry.name)
            if end > now and (not everything or (key is not None and _is_of_block(layout, key, entry.path))):
                ends.append(end)
            elif key is not None or everything:
                unlink(entry.path)
        with contextlib.suppress(OSError):
            os.rmdir(folder.path)
    return min(ends, default=0)


def astray(layout: Layout) -> list[str]:
    """What is no lease of a block that is here, for checks."""
    found = []
    for folder in folders(layout.leases):
        for entry in entries(folder.path):
            key, _ = _parsed(entry.name)
            if key is None or not _is_of_block(layout, key, entry.path):
                found.append(entry.path)
    return found


def running(layout: Layout) -> list[bytes]:
    """The key of each lease that has not ended."""
    now = now_ms()
    return [key for key, end, _ in all_leases(layout) if end > now]


def _links(folder: str) -> Iterator[tuple[bytes, int, str]]:
    for entry in entries(folder):
        key, end = _parsed(entry.name)
        if key is not None:
            yield key, end, entry.path


def _parsed(name: str) -> tuple[bytes | None, int]:
    """The key and the end that a lease's name says."""
    digits, _, end = name.partition(".")
    key = key_of(digits, "")
    return (key, int(end)) if key is not None and end.isascii() and end.isdigit() else (None, 0)


def _is_of_block(layout: Layout, key: bytes, path: str) -> bool:
    """Whether it is a link to the block that is here now."""
    try:
        return os.stat(layout.block(key)).st_ino == os.lstat(path).st_ino
    except FileNotFoundError:
        return False
