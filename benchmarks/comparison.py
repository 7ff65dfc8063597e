"""The harness of all comparisons: sides take turns in rounds, and a ratio is formed within a round.

A machine's speed drifts by more than sides differ. So every round has all sides, one right after the other, in every
second round in the reverse order; the median of the rounds' ratios is what counts.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress

from benchmarks.common import format_spread, save_plot

K = TypeVar("K")
T = TypeVar("T")
Rounds = Mapping[str, Sequence[float]]
"""By side: a value of each round."""


def take_turns(sides: Sequence[T], rounds: int, what: str = "") -> Iterator[tuple[int, T]]:
    """Yield the number of the round and whose turn it is. With `what` a bar of the turns is shown, which is not for
    turns of milliseconds.
    """
    # A bar that draws itself again and again takes processor time from whoever is measured.
    with Progress(transient=True, auto_refresh=False, disable=not what) as progress:
        task = progress.add_task(what, total=rounds * len(sides))
        for number in range(rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                yield number, side
                progress.advance(task)
                progress.refresh()


def measure_in_turns(
    sides: Mapping[K, Callable[[int], T]], rounds: int, what: str = "", *, num_warm: int = 0
) -> dict[K, list[T]]:
    """Return what each side returned in each round. Sides get the number of the round; the first `num_warm` rounds
    warm up, and come before those that count.
    """
    found: dict[K, list[T]] = {name: [] for name in sides}
    for number, name in take_turns(list(sides), rounds + num_warm, what):
        value = sides[name](number)
        if number >= num_warm:
            found[name].append(value)
    return found


def compute_ratios(values: Mapping[K, Sequence[float]], one: K, other: K) -> list[float]:
    """Return the ratio of one side to another in each round."""
    return [mine / theirs for mine, theirs in zip(values[one], values[other], strict=True)]


def compute_ratio(values: Mapping[K, Sequence[float]], one: K, other: K) -> float:
    """Return the median of the rounds' ratios of one side to another."""
    return statistics.median(compute_ratios(values, one, other))


def print_table(values: Rounds, unit: str, scale: float = 1.0) -> None:
    """Print the median and the spread of each side's rounds."""
    for side, found in values.items():
        print(f"{side:32} {format_spread([value * scale for value in found]):28} {unit}")


def draw_tails(axis: Any, lengths: Mapping[str, Sequence[float]], title: str, label: str) -> None:
    """Draw the share of the lengths above each length, a line for each name, both axes logarithmic."""
    for name, found in lengths.items():
        axis.plot(np.sort(found), 1 - np.arange(len(found)) / len(found), label=name)
    axis.axhline(0.01, color="grey", linewidth=0.8, linestyle=":")
    axis.set(xscale="log", yscale="log", title=title, xlabel=label)
    axis.grid(alpha=0.3)
    axis.legend()


def draw_boxes(name: str, charts: Mapping[str, Rounds], **limits: Any) -> None:
    """Draw the spread of each side's values, a chart for each title, and write the plot."""
    figure = Figure(figsize=(7 * len(charts), 4.2))
    for axis, (title, values) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        axis.boxplot(list(values.values()), tick_labels=list(values), orientation="horizontal")
        axis.set(title=title, **limits)
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    save_plot(figure, name)


def draw_bars(name: str, charts: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw a bar for each ratio, a chart for each title, and write the plot."""
    figure = Figure(figsize=(3.2 * len(charts), 3.4))
    for axis, (title, ratios) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        axis.barh(list(ratios), list(ratios.values()))
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(title=title, xlabel=label)
        axis.invert_yaxis()
    figure.tight_layout()
    save_plot(figure, name)
