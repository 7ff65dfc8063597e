"""The room that this host has for the tiers on it, looked at before a model is loaded.

A tier that nobody asked for takes what is there, or is left out. One whose size or directory is set is as it is set, or
the start is refused.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.config.settings import KVSettings
from penstock.errors import KVStoreError
from penstock.kvstore.arena.directory import DIRECTORY_SETTING, check_shared_memory
from penstock.kvstore.arena.directory import SIZE_SETTING as SIZE_ON_DISK
from penstock.kvstore.arena.file import SETTING as SIZE_IN_MEMORY
from penstock.kvstore.arena.file import arena_directory, find_arenas

DIRECTORY_OF_TABLES = "PENSTOCK_KV_STORE_SHARED_DIR"
MIB = 2**20


class FittedTiers(NamedTuple):
    """Settings with which the tiers of this host can be opened, as far as that is known now."""

    settings: KVSettings
    told: list[str]
    """A line for each tier that nobody asked for and that is smaller than usual, or left out."""
    refused: list[str]
    """A line for each that was asked for and cannot be."""


def fit_tiers(settings: KVSettings, pipeline: str) -> FittedTiers:
    """Return the settings with the sizes of tiers that nobody asked for fitted to what this host has."""
    told, refused, sizes = list[str](), list[str](), dict[str, int]()
    given, directory = settings.model_fields_set, arena_directory(settings.shared_dir)
    no_directory = _find_directory_problem(directory)
    if settings.shared_mb:
        # It follows from the file system alone: all workers of a host find the same size, and share one arena.
        total_mb, free_mb = (0, 0) if no_directory else _measure_room(directory, pipeline)
        size = settings.shared_mb if "shared_mb" in given else min(settings.shared_mb, total_mb // 2)
        no_room = f"no room for {size} MB in {directory} ({free_mb} MB are free)" if free_mb < max(1, size) else ""
        is_asked = "shared_mb" in given or (bool(settings.shared_dir) and bool(no_directory))
        if (problem := no_directory or no_room) and is_asked:
            advice = f"give it more (in a container --shm-size), or lower {SIZE_IN_MEMORY}; 0 does without"
            refused.append(f"shared memory for KV blocks: {problem}: {advice}")
        elif problem:
            told.append(f"no KV blocks are kept in shared memory: {problem}")
            sizes["shared_mb"] = 0
        elif size < settings.shared_mb:
            told.append(f"shared memory for KV blocks: {size} MB, not {settings.shared_mb}: {directory} has {total_mb}")
            sizes["shared_mb"] = size
    if settings.disk_mb and (problem := no_directory or _find_disk_problem(settings)):
        if given & {"disk_mb", "disk_dir"}:
            refused.append(f"KV blocks on disk: {problem}; {SIZE_ON_DISK}=0 does without")
        else:
            told.append(f"no KV blocks are kept on disk: {problem}")
            sizes["disk_mb"] = 0
    fitted = KVSettings.model_construct(_fields_set=given, **{**settings.model_dump(), **sizes})
    return FittedTiers(fitted, told, refused)


def _find_directory_problem(directory: Path) -> str:
    """Return why no shared memory can be made in a directory; empty if it can, as far as that is known."""
    if os.access(directory, os.W_OK | os.X_OK):
        return ""
    what = "cannot be written to" if directory.is_dir() else "is no directory"
    return f"{directory} {what}: {DIRECTORY_OF_TABLES} names another one"


def _measure_room(directory: Path, pipeline: str) -> tuple[int, int]:
    """Return how many MiB the file system of shared memory has, and how many of them are free or the pipeline's."""
    system, num_own_bytes = os.statvfs(directory), 0
    for arena in find_arenas(str(directory)):
        if arena.pipeline == pipeline:
            with suppress(FileNotFoundError):
                num_own_bytes += arena.path.stat().st_blocks * 512
    return system.f_blocks * system.f_frsize // MIB, (system.f_bavail * system.f_frsize + num_own_bytes) // MIB


def _find_disk_problem(settings: KVSettings) -> str:
    """Return why blocks cannot be kept on disk; empty if they can. A full disk is no reason: it may have room later."""
    root = settings.disk_path.absolute()
    nearest = next(path for path in (root, *root.parents) if os.path.exists(path))
    try:
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            return f"{nearest} cannot be written to: {DIRECTORY_SETTING} names another one"
        with suppress(FileNotFoundError):  # nobody has used it yet
            check_shared_memory(root, settings.shared_dir)
    except KVStoreError as error:
        return str(error)
    except OSError as error:
        return f"{root}: {error.strerror}: {DIRECTORY_SETTING} names another one"
    return ""
