"""The load of the last ten minutes: arrivals, and what prompts took. It can be written down and read again."""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

SHORT_S, LONG_S = 60.0, 600.0
"""The load is known over the time since it last changed, which is at least the first and at most the second of these.
Numbers go down by the larger one of its rate and that of the longest time.
"""
NOISE = 0.05
"""The part by which two means may differ without a change of the load, beside chance."""
SIGMAS = 3.0
"""By how many standard deviations they differ by chance at most."""
MIN_KNOWN_S = 60.0
"""A rate is not known before so many seconds of arrivals are."""
MIN_S = 1e-6
"""Divides in place of nothing."""


class Passed(NamedTuple):
    """Arrivals and prompts in the seconds before a moment."""

    at_s: float
    seconds: float
    arrived: float
    prompts: float
    """The number of prompts that were computed."""
    prompt_s: float
    """The sum of their seconds."""
    prompt_s2: float
    """The sum of the squares."""
    hit_s: float
    """The sum of the seconds that hits in the workers' own pools saved."""


class Shape(NamedTuple):
    """Means over recent prompts."""

    prompt_s: float
    prompt_s2: float
    hit_s: float


Measure = Callable[[Passed], tuple[float, float, float]]
"""Returns a sum, that of what it is divided by for a mean, and that of the squares of its parts."""


class LoadWindows:
    """Adds up what passed. Times are those of one clock."""

    def __init__(self, passed: Sequence[Sequence[float]] = ()) -> None:
        self._passed = deque(Passed(*one) for one in passed)

    def add_passed(self, passed: Passed) -> None:
        """Add what passed since the last call, and forget what is older than ten minutes."""
        self._passed.append(passed)
        while self._passed and self._passed[0].at_s <= passed.at_s - LONG_S:
            self._passed.popleft()

    def export_passed(self) -> list[Passed]:
        """Return what the constructor takes."""
        return list(self._passed)

    @property
    def rate_up(self) -> float | None:
        """Arrivals a second since these changed by more than chance; None until `MIN_KNOWN_S` are known."""
        if sum(one.seconds for one in self._passed) < MIN_KNOWN_S:
            return None
        return _compute_rate(self._list_since_change(lambda one: (one.arrived, one.seconds, abs(one.arrived))))

    @property
    def rate_steady(self) -> float:
        """Arrivals a second of the last ten minutes."""
        return _compute_rate(self._passed)

    @property
    def rate_down(self) -> float | None:
        """The larger one of both rates; None until `MIN_KNOWN_S` are known."""
        rate = self.rate_up
        return None if rate is None else max(rate, self.rate_steady)

    @property
    def shape(self) -> Shape | None:
        """The means of prompts since their mean changed by more than chance; None if there were none."""
        mine = self._list_since_change(lambda one: (one.prompt_s, one.prompts, one.prompt_s2))
        prompts = sum(one.prompts for one in mine)
        sums = (sum(one.prompt_s for one in mine), sum(one.prompt_s2 for one in mine), sum(one.hit_s for one in mine))
        return Shape(*(one / prompts for one in sums)) if prompts else None

    def _list_since_change(self, measure: Measure) -> list[Passed]:
        """Return what passed since a mean changed by more than chance, or all."""
        passed = list(self._passed)
        while first := _find_change(passed, measure):
            passed = passed[first:]
        return passed


def _compute_rate(passed: Collection[Passed]) -> float:
    # A heartbeat is older than the count of what waits: a few arrivals may be taken back by the next look.
    return max(0.0, sum(one.arrived for one in passed)) / max(MIN_S, sum(one.seconds for one in passed))


def _find_change(passed: Sequence[Passed], measure: Measure) -> int:
    """Return with which one a mean changed most clearly, a minute ago or more; 0 if it did not by more than chance."""
    measured = list(map(measure, passed))
    total, weight, squares = (sum(one[column] for one in measured) for column in range(3))
    found, most, late, late_weight, late_s = 0, SIGMAS, 0.0, 0.0, 0.0
    for number in range(len(passed) - 1, 0, -1):
        late, late_weight = late + measured[number][0], late_weight + measured[number][1]
        late_s += passed[number].seconds
        share = late_weight / max(weight, MIN_S)
        deviation = math.sqrt(max(squares * share * (1 - share), MIN_S))
        sigmas = (abs(late - share * total) - NOISE * share * total) / deviation
        if late_s >= SHORT_S - MIN_S and sigmas > most:
            found, most = number, sigmas
    return found
