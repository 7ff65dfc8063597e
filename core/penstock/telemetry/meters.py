"""Meters: what a process counts. One thread writes each meter, any thread may read it.

A meter costs its writer well under a microsecond: there is no lock, and a frequent writer keeps the meter instead of
looking it up. A reader adds up what it finds: a histogram's count is the sum of its buckets, and always agrees with
them.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from penstock.telemetry.catalog import Metric


class Exemplar(NamedTuple):
    """A value of a histogram, and the trace that it is of."""

    trace_id: str
    value: float
    at_s: float
    """Seconds since the epoch."""


class Distribution(NamedTuple):
    """The values of a histogram."""

    counts: tuple[int, ...]
    """By bucket: values up to and including each bound, then those beyond the last."""
    sum: float
    exemplars: Mapping[int, Exemplar] = {}
    """The last value of a bucket whose trace is recorded, by the bucket's index."""


class Reading(NamedTuple):
    """The current value of one series."""

    metric: Metric
    labels: tuple[str, ...]
    """Label values, in the order of the metric's labels."""
    value: float | Distribution


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, count: float = 1) -> None:
        """Increase the counter."""
        self.value += count

    def read(self) -> float:
        """Return the current value."""
        return self.value


class Histogram:
    """Values in buckets."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0
        self.exemplars: dict[int, Exemplar] = {}

    def add(self, value: float, count: int = 1, trace_id: str = "") -> None:
        """Add a value `count` times. With `trace_id` it is the exemplar of its bucket."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.sum += value * count
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id, value, time.time())

    def read(self) -> Distribution:
        """Return the current distribution."""
        return Distribution(tuple(self.counts), self.sum, self.exemplars.copy())


class Meters:
    """All meters of a process. With `is_on` false the meters are not kept, so that there are no readings."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.started_ns = time.time_ns()
        """The time at which counting began, in ns since the epoch."""
        self._known: dict[tuple[str, tuple[str, ...]], tuple[Metric, Counter | Histogram]] = {}
        self._sources: list[Callable[[], Iterable[Reading]]] = []
        self._lock = threading.Lock()

    def get_counter(self, metric: Metric, *labels: str) -> Counter:
        """Return the counter with these label values, in the metric's order."""
        found = self._get_meter(metric, labels)
        assert isinstance(found, Counter), f"{metric.name} is a {metric.kind}"
        return found

    def get_histogram(self, metric: Metric, *labels: str) -> Histogram:
        """Return the histogram with these label values, in the metric's order."""
        found = self._get_meter(metric, labels)
        assert isinstance(found, Histogram), f"{metric.name} is a {metric.kind}"
        return found

    def _get_meter(self, metric: Metric, labels: tuple[str, ...]) -> Counter | Histogram:
        assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
        if (found := self._known.get((metric.name, labels))) is None:
            made = Histogram(metric.bounds) if metric.kind == "histogram" else Counter()
            if not self.is_on:
                return made
            with self._lock:
                found = self._known.setdefault((metric.name, labels), (metric, made))
        return found[1]

    def add_source(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Call `read` at each collection for values that are counted elsewhere. It must not raise."""
        self._sources.append(read)

    def collect_readings(self) -> dict[Metric, list[Reading]]:
        """Return all readings by metric."""
        with self._lock:
            known = list(self._known.items())
        found: dict[Metric, list[Reading]] = {}
        for (_, labels), (metric, meter) in known:
            found.setdefault(metric, []).append(Reading(metric, labels, meter.read()))
        for read in self._sources:
            for reading in read():
                found.setdefault(reading.metric, []).append(reading)
        return found
