"""The frame of a worker's loop: run until stopped, also through outages, then finish or hand back what is left.

A worker whose servers are away is dropped, and made anew over the engine, which stays:

    1  abandon   its threads end, and everything leaves the engine; computed KV stays in the pool, as cache
    2  wait      until Redis takes a write and refuses nothing, and the bus answers, with pauses of up to two seconds
    3  make      a new worker object joins the group; the old one's requests come back to it, or go to another worker

To other workers it is a worker that died, without the time for loading the model. A crash at any of the three steps
costs the same. SIGTERM ends each of them soon.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sized
from types import FrameType
from typing import Protocol, Self

import redis

from penstock.errors import AccessRefused, BusUnavailable, MemberFenced
from penstock.redis.client import backoff_pauses, is_outage, log_outage
from penstock.worker.heartbeat import Heartbeat

log = logging.getLogger(__name__)


class StopSignal:
    """Set by SIGTERM or SIGINT: the loop then finishes or hands back its requests, and leaves."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> Self:
        """Handle this process's SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def set(self) -> None:
        """Ask the loop to stop."""
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the signal for at most `timeout_s`. Returns whether it is set."""
        return self._event.wait(timeout_s)

    def __bool__(self) -> bool:
        return self._event.is_set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._event.set()


class WorkerLoop(Protocol):
    """A worker whose loop calls `run_once`."""

    @property
    def running(self) -> Sized:
        """The requests that it works on."""

    def run_once(self, *, accept: bool = True) -> bool:
        """Run one turn. Returns whether it did anything. Without `accept` no new requests are taken."""

    def is_settled(self) -> bool:
        """Return whether no delivery waits for another worker or for a commit."""

    def stop_accepting(self) -> None:
        """Take no new requests, and let other workers have them."""

    def close(self) -> None:
        """Hand back what is not finished, and leave the group."""

    def abandon(self) -> None:
        """End the threads and empty the engine. Does not wait for servers for longer than a moment."""


def run_until_stopped(
    worker: WorkerLoop,
    stop: StopSignal,
    drain_s: float,
    draining: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run until stopped. Then finish what is running within `drain_s` seconds, and hand back the rest.

    `check` is called in each turn: what it raises ends the run.
    """
    while not stop:
        check()
        worker.run_once()
    draining()
    worker.stop_accepting()
    until = time.monotonic() + drain_s
    while worker.running and time.monotonic() < until:
        worker.run_once(accept=False)
    worker.close()


STEADY_RUN_S = 10.0
"""A worker that ran this long ends a series of outages: the next one begins with the shortest pause again."""


class Reconnector:
    """Keeps a worker serving. `make` returns a new one; `ask_bus` raises while the bus is away, or Redis refuses."""

    def __init__(self, make: Callable[[], WorkerLoop], ask_bus: Callable[[], object], beat: Heartbeat) -> None:
        self._make, self._ask_bus, self._beat = make, ask_bus, beat

    def run_until_stopped(self, stop: StopSignal, drain_s: float) -> None:
        """Serve until stopped. Errors that are no outage are raised, and end the process."""
        waits = backoff_pauses()
        while not stop:
            begun_s, worker = time.monotonic(), None
            try:
                worker = self._make()
                self._beat.update_status(now=True, state="ready", reason="")
                run_until_stopped(worker, stop, drain_s, self._report_draining, self._beat.raise_failure)
            except Exception as error:
                if not self._is_outage(error):
                    raise
                log_outage(log, f"degraded: {error}")
                self._beat.update_status(now=True, state="degraded", reason=str(error))
                if worker is not None:
                    worker.abandon()  # 1
                waits = backoff_pauses() if time.monotonic() - begun_s > STEADY_RUN_S else waits
                self._wait_for_servers(stop, waits)  # 2

    def _is_outage(self, error: Exception) -> bool:
        """Return whether an error is an outage.

        A worker that the servers let in before and refuse now waits. A member is fenced when it was away too long.
        Where another process has its name by now, the beat that is written before a new member is made raises
        `NameTaken`.
        """
        return is_outage(error) or isinstance(error, (MemberFenced, AccessRefused))

    def _report_draining(self) -> None:
        self._beat.update_status(now=True, state="draining")

    def _wait_for_servers(self, stop: StopSignal, waits: Iterator[float]) -> None:
        begun_s = time.monotonic()
        while not stop.wait(next(waits)):
            try:
                self._ask_bus()  # first: it learns how late they answer, which gives the beat its time limit
                self._beat.write_beat()
            except (redis.RedisError, BusUnavailable, AccessRefused) as error:
                if not self._is_outage(error):
                    raise
                self._beat.update_status(reason=str(error))
                continue
            log.info("reconnected after %.1f s", time.monotonic() - begun_s)
            return
