"""A worker's seconds: each is divided among the requests that were computed in it, or idle."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from penstock.names import PriorityClass, Stage


class Work(NamedTuple):
    """What a worker's seconds are told apart by. They are idle where there is no stage."""

    stage: Stage | None = None
    priority_class: PriorityClass | None = None
    tenant: str = ""
    key: str = ""
    """The id of the API key that the request came with; empty where there was none, or it is not known."""


IDLE = Work()


class WorkSeconds:
    """The seconds of one worker, by what they were spent on. One thread notes them, any thread may copy them."""

    def __init__(self) -> None:
        self._sums: dict[Work, float] = {}
        self._noted_s = time.monotonic()

    def divide_seconds(self, shares: Iterable[tuple[Work, float]] = ()) -> None:
        """Divide the seconds since the last call. What the shares leave of them was idle."""
        now_s, left = time.monotonic(), 1.0
        passed_s, self._noted_s = now_s - self._noted_s, now_s
        for work, share in shares:
            self._sums[work] = self._sums.get(work, 0.0) + share * passed_s
            left -= share
        self._sums[IDLE] = self._sums.get(IDLE, 0.0) + max(0.0, left) * passed_s

    def copy_sums(self) -> dict[Work, float]:
        """Return the seconds so far."""
        return dict(self._sums)  # in one step of the interpreter: no lock for the thread that notes them
