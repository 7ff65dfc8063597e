"""Meters: what a process counts. One thread writes each of them, any may read.

A meter costs its writer well under a microsecond: no lock, and whoever writes often keeps the meter instead of asking
for it. A reader adds up what it finds: a histogram's count is the sum of its buckets, and always agrees with them.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.telemetry.catalog import Metric


class Distribution(NamedTuple):
    """What a histogram has seen."""

    counts: tuple[int, ...]
    """By bucket: up to and including each bound, then beyond the last."""
    sum: float


class Reading(NamedTuple):
    """One series, as of now."""

    metric: Metric
    labels: tuple[str, ...]
    """Values, in the order of the metric's labels."""
    value: float | Distribution


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, count: float = 1) -> None:
        """So many more."""
        self.value += count

    def read(self) -> float:
        """As of now."""
        return self.value


class Histogram:
    """Values in buckets."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, count: int = 1) -> None:
        """The value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def read(self) -> Distribution:
        """As of now."""
        return Distribution(tuple(self.counts), self.sum)


class _NoCounter(Counter):
    __slots__ = ()

    def add(self, count: float = 1) -> None:
        pass


class _NoHistogram(Histogram):
    __slots__ = ()

    def add(self, value: float, count: int = 1) -> None:
        pass


_NO_COUNTER, _NO_HISTOGRAM = _NoCounter(), _NoHistogram(())


class Meters:
    """All meters of a process. With `is_on` false there are none: what is added to them is forgotten."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.started_ns = time.time_ns()
        """When counting began."""
        self._known: dict[tuple[str, tuple[str, ...]], tuple[Metric, Counter | Histogram]] = {}
        self._sources: list[Callable[[], Iterable[Reading]]] = []
        self._lock = threading.Lock()

    def get_counter(self, metric: Metric, *labels: str) -> Counter:
        """The counter with these labels, in the metric's order."""
        found = self._get_meter(metric, labels)
        assert isinstance(found, Counter), f"{metric.name} is a {metric.kind}"
        return found

    def get_histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram with these labels, in the metric's order."""
        found = self._get_meter(metric, labels)
        assert isinstance(found, Histogram), f"{metric.name} is a {metric.kind}"
        return found

    def _get_meter(self, metric: Metric, labels: tuple[str, ...]) -> Counter | Histogram:
        assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
        if not self.is_on:
            return _NO_HISTOGRAM if metric.kind == "histogram" else _NO_COUNTER
        if (found := self._known.get((metric.name, labels))) is None:
            made = Histogram(metric.bounds) if metric.kind == "histogram" else Counter()
            with self._lock:
                found = self._known.setdefault((metric.name, labels), (metric, made))
        return found[1]

    def add_source(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Ask `read` whenever somebody looks, for what is counted elsewhere. It raises nothing."""
        self._sources.append(read)

    def collect_readings(self) -> dict[Metric, list[Reading]]:
        """Everything, by metric."""
        with self._lock:
            known = list(self._known.items())
        found: dict[Metric, list[Reading]] = {}
        for (_, labels), (metric, meter) in known:
            found.setdefault(metric, []).append(Reading(metric, labels, meter.read()))
        for read in self._sources:
            for reading in read():
                found.setdefault(reading.metric, []).append(reading)
        return found
