"""Serving through outages: a worker whose servers are away is dropped, and made anew over the engine, which stays.

    1  abandon   its threads end, and everything leaves the engine; computed KV stays in the pool, as cache
    2  wait      until Redis takes a write and the bus answers, with pauses of up to two seconds
    3  make      a new worker object joins the group; the old one's requests come back to it, or go to another worker

To other workers it is a worker that died, without the time for loading the model. A crash at any of the three steps
costs the same. SIGTERM ends each of them soon.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import redis

from penstock.errors import BusUnavailable, MemberFenced
from penstock.redis.client import backoff_pauses, is_outage
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.loop import StopSignal, WorkerLoop, run_until_stopped

log = logging.getLogger(__name__)

STEADY_RUN_S = 10.0
"""A worker that ran this long ends a series of outages: the next one begins with the shortest pause again."""


class AbandonableWorker(WorkerLoop, Protocol):
    """A worker that can be dropped at once."""

    def abandon(self) -> None:
        """End the threads and empty the engine. Does not wait for servers for longer than a moment."""


class Reconnector:
    """Keeps a worker serving. `make` returns a new one; `ask_bus` raises while the bus is away."""

    def __init__(self, make: Callable[[], AbandonableWorker], ask_bus: Callable[[], object], beat: Heartbeat) -> None:
        self._make, self._ask_bus, self._beat = make, ask_bus, beat

    def run_until_stopped(self, stop: StopSignal, drain_s: float) -> None:
        """Serve until stopped. Errors that are no outage are raised, and end the process."""
        waits = backoff_pauses()
        while not stop:
            begun_s, worker = time.monotonic(), None
            try:
                worker = self._make()
                self._beat.update_status(now=True, state="ready", reason="")
                run_until_stopped(worker, stop, drain_s, lambda: self._beat.update_status(now=True, state="draining"))
            except Exception as error:
                if not self._is_outage(error):
                    raise
                log.warning("degraded: %s", error)
                self._beat.update_status(now=True, state="degraded", reason=str(error))
                if worker is not None:
                    worker.abandon()  # 1
                waits = backoff_pauses() if time.monotonic() - begun_s > STEADY_RUN_S else waits
                self._wait_for_servers(stop, waits)  # 2

    def _is_outage(self, error: Exception) -> bool:
        """Return whether an error is an outage.

        A member is fenced when it was away too long, or when another process has its name; only the first is an outage.
        """
        return is_outage(error) or (isinstance(error, MemberFenced) and not self._beat.check_replaced())

    def _wait_for_servers(self, stop: StopSignal, waits: Iterator[float]) -> None:
        begun_s = time.monotonic()
        while not stop.wait(next(waits)):
            try:
                self._beat.write_beat()
                self._ask_bus()
            except (redis.RedisError, BusUnavailable) as error:
                if not is_outage(error):
                    raise
                self._beat.update_status(reason=str(error))
                continue
            if self._beat.is_replaced:
                raise MemberFenced("another process has this worker's place")
            log.info("the servers answer, after %.1f s", time.monotonic() - begun_s)
            return
