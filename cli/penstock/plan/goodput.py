"""Goodput, as DistServe defines it: the highest rate at which nine of ten requests meet both limits of their class."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.config.settings import SloSettings
from penstock.names import PriorityClass

MET_SHARE = 0.9
"""The share of requests that have to be in time."""


@dataclass(frozen=True)
class Slo:
    """Latency targets: a request that meets them is in time."""

    ttft_s: float
    """The longest time to its first token."""
    itl_s: float
    """The longest time between two tokens, on the mean of its answer."""


BATCH_SLO = Slo(600.0, 1.0)
"""The limits of the class `batch`, unless others are given."""


class Timing(NamedTuple):
    """The latencies of a request."""

    priority_class: PriorityClass
    ttft_s: float
    """Seconds to its first token."""
    itl_s: float
    """Mean seconds between two tokens; 0 for a single one."""


Slos = Mapping[PriorityClass, Slo]


def read_slos(settings: SloSettings, batch: Slo = BATCH_SLO) -> Slos:
    """Return the limits of each class."""
    return {"interactive": Slo(settings.interactive_ttft_s, settings.interactive_itl_s), "batch": batch}


def compute_met_share(timings: Iterable[Timing], slos: Slos) -> float:
    """Return how many requests meet both limits, as a share; of two classes it is the lower one."""
    met: dict[PriorityClass, list[bool]] = {}
    for one in timings:
        slo = slos[one.priority_class]
        met.setdefault(one.priority_class, []).append(one.ttft_s <= slo.ttft_s and one.itl_s <= slo.itl_s)
    return min((sum(mine) / len(mine) for mine in met.values()), default=1.0)


def find_goodput(play_rate: Callable[[int], tuple[float, float]], low: int, high: int) -> float:
    """Return the goodput, by bisection between the rates of two numbers, and by interpolation between the last two.

    `play_rate` returns the rate of a number, and the share of requests that are in time at it. Rates grow with their
    numbers. Where even the first one is too high, it is returned; where all are met, the last.
    """
    played = dict[int, tuple[float, float]]()

    def play_once(number: int) -> tuple[float, float]:
        if number not in played:
            played[number] = play_rate(number)
        return played[number]

    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if play_once(middle)[1] >= MET_SHARE else (low, middle)
    (under, under_share), (over, over_share) = play_once(low), play_once(high)
    part = (under_share - MET_SHARE) / max(under_share - over_share, 1e-9)
    return under + min(1.0, max(0.0, part)) * (over - under)
