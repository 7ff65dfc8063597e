"""The room that this host has for the tiers on it, looked at before a model is loaded.

A tier that nobody asked for takes what is there, or is left out. One whose size or directory is set is as it is set, or
the start is refused.
"""

import os
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from penstock.config.settings import KVSettings
from penstock.errors import KVStoreError
from penstock.kvstore.arena.directory import DIRECTORY_SETTING, SlotDirectory
from penstock.kvstore.arena.directory import SIZE_SETTING as SIZE_ON_DISK
from penstock.kvstore.arena.file import SETTING as SIZE_IN_MEMORY
from penstock.kvstore.arena.file import arena_directory, find_arenas


class FittedTiers(NamedTuple):
    """Settings with which the tiers of this host can be opened, as far as that is known now.

    `told` has a line for each tier without a setting of its own that is smaller or left out. `refused` has a line for
    each tier that was asked for and cannot be opened.
    """

    settings: KVSettings
    told: list[str]
    refused: list[str]


def fit_tiers(settings: KVSettings, pipeline: str) -> FittedTiers:
    """Return the settings, with the sizes of tiers that were not set explicitly fitted to this host's memory."""
    told, refused, sizes = list[str](), list[str](), dict[str, int]()
    given, directory = settings.model_fields_set, arena_directory(settings.shared_dir)
    no_directory = _find_directory_problem(directory)
    if settings.shared_mb:
        # It follows from the file system alone: all workers of a host find the same size, and share one arena.
        total_mb, free_mb = (0, 0) if no_directory else _measure_room(directory, pipeline)
        size = settings.shared_mb if "shared_mb" in given else min(settings.shared_mb, total_mb // 2)
        is_full = size < 1 or free_mb < size
        no_room = f"no room for {max(1, size)} MB in {directory} ({free_mb} MB are free)" if is_full else ""
        is_asked = "shared_mb" in given or ("shared_dir" in given and bool(settings.shared_dir))
        if (problem := no_directory or no_room) and is_asked:
            advice = f"give it more (in a container --shm-size), or lower {SIZE_IN_MEMORY}; 0 turns it off"
            refused.append(f"shared memory for KV blocks: {problem}: {advice}")
        elif problem:
            told.append(f"the KV store runs without shared memory: {problem}")
            sizes["shared_mb"] = 0
        elif size < settings.shared_mb:
            told.append(f"shared memory for KV blocks: {size} MB, not {settings.shared_mb}: {directory} has {total_mb}")
            sizes["shared_mb"] = size
    if settings.disk_mb and (problem := no_directory or _find_disk_problem(settings)):
        if given & {"disk_mb", "disk_dir"}:
            refused.append(f"KV blocks on disk: {problem}; {SIZE_ON_DISK}=0 turns it off")
        else:
            told.append(f"the KV store runs without a disk tier: {problem}")
            sizes["disk_mb"] = 0
    fitted = KVSettings.model_construct(_fields_set=given, **{**settings.model_dump(), **sizes})
    return FittedTiers(fitted, told, refused)


def _find_directory_problem(directory: Path) -> str:
    """Return why no shared memory can be made in a directory; empty if it can, as far as that is known."""
    if os.access(directory, os.W_OK | os.X_OK):
        return ""
    what = "cannot be written to" if directory.is_dir() else "is no directory"
    return f"{directory} {what}: PENSTOCK_KV_STORE_SHARED_DIR names another one"


def _measure_room(directory: Path, pipeline: str) -> tuple[int, int]:
    """Return how many MiB the file system of shared memory has, and how many of them are free or the pipeline's.

    An arena in use of the same model is joined as it is. Any other arena is removed, which frees its memory.
    """
    system, own = os.statvfs(directory), [arena for arena in find_arenas(str(directory)) if arena.pipeline == pipeline]
    num_free_bytes = system.f_bavail * system.f_frsize + sum(
        arena.bytes if arena.is_in_use else arena.allocated_bytes for arena in own
    )
    return system.f_blocks * system.f_frsize // 2**20, num_free_bytes // 2**20


def _find_disk_problem(settings: KVSettings) -> str:
    """Return why blocks cannot be kept on disk; empty if they can. A full disk is no reason: it may have room later."""
    root = settings.disk_path.absolute()
    nearest = next(path for path in (root, *root.parents) if os.path.exists(path))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written to: {DIRECTORY_SETTING} names another one"
    try:
        with suppress(FileNotFoundError), closing(SlotDirectory(root, 0, settings.shared_dir, create=False)) as folder:
            folder.check_tables()  # the directory exists if a process has used it
    except (KVStoreError, OSError) as error:
        return str(error)
    return ""
