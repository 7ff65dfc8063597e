"""The last minute: differences of cumulative totals, as a worker puts them into its heartbeat.

Each worker computes them itself, so that a viewer who has just come sees the same last minute as one who has watched
all along. A worker that has just started has no past.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Totals = Mapping[str, float | list[int]]
"""Cumulative numbers, and counts by bucket."""
WINDOW_S = 60.0
RATE_WINDOW_S = 10.0
"""The window of rates per second."""


class RecentTotals:
    """Takes snapshots of totals and returns the latest increases. For one thread."""

    def __init__(self, read: Callable[[], Totals], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        self._snapshots: deque[tuple[float, Totals]] = deque([(clock(), read())])

    def summarize_recent(self) -> dict[str, Any]:
        """Return the latest increases of the totals.

        `minute`: what was added to each total in the last minute, or since the start. `per_s`: how much each number
        grew per second over the last ten seconds.
        """
        now, totals = self._clock(), self._read()
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= now - WINDOW_S:
            self._snapshots.popleft()
        before_s, before = next(
            snapshot
            for snapshot in reversed(self._snapshots)
            if snapshot[0] <= now - RATE_WINDOW_S or snapshot is self._snapshots[0]
        )
        passed_s = now - before_s
        minute = {name: _subtract_totals(value, self._snapshots[0][1].get(name)) for name, value in totals.items()}
        per_s = {
            name: round(_subtract_totals(value, before.get(name)) / passed_s, 3) if passed_s > 0 else 0.0
            for name, value in totals.items()
            if not isinstance(value, list)
        }
        self._snapshots.append((now, totals))
        return {"minute": minute, "per_s": per_s}


def _subtract_totals(value: Any, before: Any) -> Any:
    if isinstance(value, list):
        return [now - then for now, then in zip(value, before or [0] * len(value), strict=True)]
    return value - (before or 0)


def sum_values(parts: Iterable[Mapping[str, Any]], name: str) -> float:
    """Return the sum of one number over workers."""
    return float(sum(part.get(name, 0) for part in parts))


def sum_buckets(parts: Iterable[Mapping[str, Any]], name: str, bounds: Sequence[float]) -> list[int]:
    """Return the sum of one histogram over workers. Those with other buckets, of another version, are left out."""
    found = [part[name] for part in parts if len(part.get(name, ())) == len(bounds) + 1]
    return [sum(counts) for counts in zip(*found, strict=True)] if found else [0] * (len(bounds) + 1)


def estimate_quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the value below which `share` of all values lie, or None if there are none.

    Values are taken to be spread evenly within each bucket. Those beyond the last bound count as that bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, count in enumerate(counts[:-1]):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            between = low + (bounds[index] - low) * max(0.0, rank - below) / count
            return min(between, bounds[index])  # rounding may put it above
        below += count
    return bounds[-1]


def summarize_percentiles(bounds: Sequence[float], counts: Sequence[int]) -> dict[str, Any]:
    """Return `p50`, `p90` and `p99` in the unit of the bounds, and the `count` of values."""
    found = {f"p{percent}": estimate_quantile(bounds, counts, percent / 100) for percent in (50, 90, 99)}
    return found | {"count": sum(counts)}
