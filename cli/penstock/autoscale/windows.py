"""The load of the last ten minutes: arrivals, and what prompts took. It can be written down and read again."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

SHORT_S, LONG_S = 60.0, 600.0
"""The times over which arrivals are counted: numbers go up by the first, and down by the larger rate of both."""
SHAPE_S = 30.0
"""Prompts are looked at in windows of this length, from the latest one on, until there are `SHAPE_PROMPTS`."""
SHAPE_PROMPTS = 600
NOISE = 0.05
"""The part by which a rate may differ from that of ten minutes without being another one, beside chance."""
MIN_KNOWN_S = 60.0
"""A rate is not known before so many seconds of arrivals are."""


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
        """Arrivals a second of the last minute; of ten minutes where the minute's differ by chance alone.

        None until `MIN_KNOWN_S` are known.
        """
        (short, short_s), (long, long_s) = self._count(SHORT_S), self._count(LONG_S)
        if long_s < MIN_KNOWN_S:
            return None
        expected = long / long_s * short_s
        # Twice the standard deviation of a Poisson process.
        is_same = abs(short - expected) <= NOISE * expected + 2 * math.sqrt(expected)
        return expected / short_s if is_same else short / short_s

    @property
    def rate_steady(self) -> float:
        """Arrivals a second of the last ten minutes."""
        arrived, seconds = self._count(LONG_S)
        return arrived / max(seconds, 1e-9)

    @property
    def rate_down(self) -> float | None:
        """The larger rate of the last minute and the last ten; None until `MIN_KNOWN_S` are known."""
        (short, short_s), (long, long_s) = self._count(SHORT_S), self._count(LONG_S)
        return None if long_s < MIN_KNOWN_S else max(short / short_s, long / long_s)

    @property
    def shape(self) -> Shape | None:
        """The means of the latest prompts; None if there were none."""
        found, window = [0.0, 0.0, 0.0, 0.0], -1
        for one in reversed(self._passed):
            before, window = window, int((self._passed[-1].at_s - one.at_s) / SHAPE_S)
            if window != before and found[0] >= SHAPE_PROMPTS:
                break
            found = [total + value for total, value in zip(found, one[3:], strict=True)]
        return Shape(found[1] / found[0], found[2] / found[0], found[3] / found[0]) if found[0] else None

    def _count(self, window_s: float) -> tuple[float, float]:
        """Return the arrivals of the latest seconds, and how many seconds these are."""
        since_s = self._passed[-1].at_s - window_s if self._passed else 0.0
        mine = [one for one in self._passed if one.at_s > since_s]
        # A heartbeat is older than the count of what waits: a few arrivals may be taken back by the next look.
        return max(0.0, sum(one.arrived for one in mine)), sum(one.seconds for one in mine)
