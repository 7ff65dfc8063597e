"""The cores that this process may use."""

import math
import os
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The quota of a container as it sees it itself: microseconds of a period, and the period."""


def list_usable_cores() -> list[int]:
    """Return the cores that this process may run on; an empty list where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def count_usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """Return how many cores this process may keep busy: those that it may run on, or its container's quota if lower."""
    count = len(list_usable_cores()) or os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no quota ("max"), or none to be seen
        return count
