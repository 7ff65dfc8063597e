"""The base of the engines of roles that answer requests without stages: they end answers, and have no KV."""

import threading
from collections.abc import Iterable

from penstock.engine.contract import Ended

EVENT_WAIT_S = 0.02
"""Seconds that the loop waits for an event while it has requests. After that it polls for further ones."""


class WholeEngine:
    """Holds the ends of answers until the loop collects them, and wakes the loop."""

    def __init__(self) -> None:
        self._ended: list[Ended] = []
        self._wake = threading.Event()

    def store_full_blocks(self) -> bool:
        """Return False: there is no KV here."""
        return False

    def collect_events(self) -> Iterable[Ended]:
        """Return the ends of the requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def is_moving_blocks(self) -> bool:
        """Return whether ends of requests were not collected yet."""
        return bool(self._ended)

    def wake_waiter(self) -> None:
        """End the current wait of the loop, or else the next one. Any thread may call this."""
        self._wake.set()
