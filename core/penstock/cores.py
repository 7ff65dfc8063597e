"""The cores that this process may use."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from penstock.control_groups import iter_groups


def list_usable_cores() -> list[int]:
    """Return the cores that this process may run on; an empty list where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def run_on_cores(cores: Collection[int]) -> Iterator[None]:
    """Let this thread run on other cores, and with it the threads that are started in the block, where the system has
    affinity and these cores still are this process's.
    """
    before = list_usable_cores()
    try:
        _move_thread(cores)
        yield
    finally:
        _move_thread(before)


def _move_thread(cores: Collection[int]) -> None:
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def count_usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: those that it may run on, or the quota of one of its control
    groups if lower. A quota is rounded down to whole cores, and the count is at least 1.
    """
    count = len(list_usable_cores()) or os.cpu_count() or 1
    return max(1, min([count, *(quota for _, quota in _iter_quotas(root))]))


def count_group_cores(group: PurePosixPath, root: Path = Path("/")) -> int:
    """Return how many cores all processes of a control group may keep busy together: it is this process's or above."""
    limits = [*_iter_quotas(root), *_iter_core_sets(root)]
    return max(1, min([os.cpu_count() or 1, *(count for path, count in limits if group.is_relative_to(path))]))


def _iter_quotas(root: Path) -> Iterator[tuple[PurePosixPath, int]]:
    """Yield the control groups that have a quota, and how many whole cores it is."""
    for group in iter_groups("cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if group.is_first_version else ("cpu.max",)
        try:
            quota, period = (int(word) for name in names for word in (group.directory / name).read_text().split())
        except (OSError, ValueError):  # no quota ("max"), or not to be seen
            continue
        if quota > 0:  # -1: none
            yield group.path, quota // period


def _iter_core_sets(root: Path) -> Iterator[tuple[PurePosixPath, int]]:
    """Yield the control groups that have certain cores, and how many these are."""
    for group in iter_groups("cpuset", root):
        name = "cpuset.effective_cpus" if group.is_first_version else "cpuset.cpus.effective"
        try:
            ranges = [span.split("-") for span in (group.directory / name).read_text().strip().split(",")]
            yield group.path, sum(int(span[-1]) - int(span[0]) + 1 for span in ranges)
        except (OSError, ValueError):
            continue
