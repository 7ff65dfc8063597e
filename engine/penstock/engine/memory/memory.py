"""Available memory, so that a model that does not fit is refused instead of killed later."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from penstock.config.settings import EngineSettings
from penstock.control_groups import iter_groups
from penstock.cores import count_group_cores, count_usable_cores
from penstock.engine.memory.storage import BlockLayout
from penstock.errors import ModelLoadError, ModelUnavailable

NUM_CONVERSATIONS = 8
"""Sequences as long as the model's context, for which the pool has room if it is chosen here."""
MIN_POOL_MB = 256
POOL_SHARE = 0.25
"""Largest share of free memory for a pool that is chosen here; a worker that has a part of the cores takes that part of
it."""


def check_memory(weights: int, pool_mb: int, device: torch.device, pictures: int = 0) -> None:
    """Raise `ModelUnavailable` if weights and pictures (bytes) and KV pool (MiB) are more than the device has left,
    `ModelLoadError` if they are more than it has.
    """
    available, pool = count_free_bytes(device), pool_mb * 2**20
    needed, seen = weights + pool + pictures, f"pictures {_format_mib(pictures)}, " if pictures else ""
    if available is not None and needed > available:
        total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else count_total_bytes() or available
        raise (ModelUnavailable if needed <= total else ModelLoadError)(
            f"not enough memory on {device}: the weights take {_format_mib(weights)}, {seen}the KV pool "
            f"{_format_mib(pool)} (PENSTOCK_ENGINE_POOL_MB={pool_mb}), and {_format_mib(available)} are available"
        )


class ChosenPool(NamedTuple):
    """A size of the KV pool, and why."""

    pool_mb: int
    reason: str


def choose_pool(
    layout: BlockLayout, context_length: int, settings: EngineSettings, device: torch.device, root: Path = Path("/")
) -> ChosenPool:
    """Return the size of the KV pool, which `PENSTOCK_ENGINE_POOL_MB` says where it is not 0."""
    if settings.pool_mb:
        return ChosenPool(settings.pool_mb, "PENSTOCK_ENGINE_POOL_MB")
    num_blocks = NUM_CONVERSATIONS * -(-context_length // layout.block_size)
    wanted = max(MIN_POOL_MB, (num_blocks * layout.block_bytes + NUM_CONVERSATIONS * layout.state_bytes) // 2**20)
    available, share, limits = count_free_bytes(device, root), POOL_SHARE, f"{POOL_SHARE:.0%} of the available memory"
    if device.type == "cpu":
        num_cores, all_cores = count_usable_cores(root), _count_cores_beside_memory(root)
        share *= min(1.0, num_cores / all_cores)
        limits += f", for {num_cores} of {all_cores} cores" if num_cores < all_cores else ""
    most = wanted if available is None else int(available * share) // 2**20
    sequences = f"{NUM_CONVERSATIONS} sequences of {context_length:,} tokens"
    if wanted <= most:
        return ChosenPool(wanted, f"it holds {sequences}")
    return ChosenPool(max(1, most), f"{limits}; {sequences} take {wanted} MiB")


def _count_cores_beside_memory(root: Path) -> int:
    """Return how many cores those have together who share the memory of which this process may take a part.

    They are the cores of the whole machine, or of the control group with the lowest limit of memory: a container of 2
    cores and 16 GiB on a machine of 64 cores has its 16 GiB for these two.
    """
    machine, limits = _read_memory_info(root, "MemTotal"), [(most, path) for most, _, path in _iter_group_limits(root)]
    if machine is None or not limits or min(limits)[0] >= machine:
        return os.cpu_count() or 1
    return count_group_cores(min(limits)[1], root)


def count_free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Return how many bytes of a device's memory are free; None where the system does not say."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else count_available_bytes(root)


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory, if it is glibc's.

    The large tensors of a step would otherwise be mapped and unmapped by each: a page fault for every 4 KB of logits.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 32 * 2**20)  # the most it takes
        mallopt(trim_threshold, 512 * 2**20)


def _format_mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def count_available_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process may still allocate: the minimum over the machine and its control groups.

    File pages that can be dropped count as free, so weights that are only mapped are not counted twice. `None` where
    the system does not say (there is no /proc).
    """
    machine = _read_memory_info(root, "MemAvailable")
    return None if machine is None else min([machine, *(free for _, free, _ in _iter_group_limits(root))])


def count_total_bytes(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process could allocate if nothing else ran here; None where the system does not say.

    It is the same on all machines of one size: that of the machine, or the limit of a control group if lower.
    """
    machine = _read_memory_info(root, "MemTotal")
    return None if machine is None else min([machine, *(limit for limit, _, _ in _iter_group_limits(root))])


def _read_memory_info(root: Path, name: str) -> int | None:
    try:
        meminfo = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        return int(meminfo[name].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def count_resident_bytes() -> int | None:
    """Return how much memory of this process is resident, that which it shares with others included.

    `None` where the system does not say.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return None


def _iter_group_limits(root: Path) -> Iterator[tuple[int, int, PurePosixPath]]:
    """Yield the limits of this process's control groups, and what each leaves: the limit less what is used."""
    for path, directory, is_first_version in iter_groups("memory", root):
        names = ("memory.max", "memory.current")
        if is_first_version:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit, used = (int((directory / name).read_text()) for name in names)
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # no limit here ("max"), or not to be seen
        prefix = "total_" if is_first_version else ""
        cached = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        yield limit, max(0, limit - used + cached), path
