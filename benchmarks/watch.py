"""What soaks measure over time, and whether it stays flat."""

import statistics
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from matplotlib.figure import Figure

SAMPLE_INTERVAL_S = 1.0
Sample = Mapping[str, Mapping[str, float]]
"""By what is measured, then by process or server."""


class Watch:
    """Takes a sample every second on a thread until the block ends, which then raises what a sample raised."""

    def __init__(self, sample: Callable[[], Sample]) -> None:
        self.series: dict[str, dict[str, list[float]]] = {}
        """Like a sample, with all values in their order."""
        self._sample, self._over, self._end = sample, threading.Event(), Future[None]()
        self._thread = threading.Thread(target=self._sample_forever, name="watch", daemon=True)

    def compute_growth(self, what: str) -> dict[str, float]:
        """Return the growth of each series."""
        return {whose: compute_growth(values) for whose, values in self.series[what].items()}

    def draw_plot(self, titles: Mapping[str, str]) -> Figure:
        """Draw a panel for each measurement that has a title."""
        figure = Figure(figsize=(5.0 * len(titles), 3.8))
        axes = figure.subplots(1, len(titles), squeeze=False)[0]
        for axis, (what, title) in zip(axes, titles.items(), strict=True):
            for whose, values in self.series[what].items():
                axis.plot([at * SAMPLE_INTERVAL_S / 60 for at in range(len(values))], values, label=whose)
            axis.set(title=title, xlabel="minutes", ylim=(0, None))
            axis.grid(alpha=0.3)
            axis.legend()
        return figure

    def _sample_forever(self) -> None:
        try:
            while not self._over.wait(SAMPLE_INTERVAL_S):
                for what, values in self._sample().items():
                    for whose, value in values.items():
                        self.series.setdefault(what, {}).setdefault(whose, []).append(value)
            self._end.set_result(None)
        except BaseException as error:  # raised by whoever leaves
            self._end.set_exception(error)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self._end.result()


def compute_growth(values: Sequence[float]) -> float:
    """Return the mean of the last quarter less that of the second one; the first is left out as a warm-up."""
    quarter = len(values) // 4
    if not quarter:
        return 0.0
    return statistics.mean(values[3 * quarter :]) - statistics.mean(values[quarter : 2 * quarter])


def read_resident_mb(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the resident memory of each process that lives."""
    command = ["ps", "-o", "pid=,rss=", "-p", ",".join(map(str, pids.values()))]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    found = {int(pid): int(kib) / 1024 for pid, kib in (line.split() for line in lines)}
    return {name: found[pid] for name, pid in pids.items() if pid in found}
