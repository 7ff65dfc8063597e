"""The frame of a worker's loop: run until stopped, then finish or hand back what is left."""

import signal
import threading
import time
from collections.abc import Callable, Sized
from types import FrameType
from typing import Protocol, Self


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


def run_until_stopped(
    worker: WorkerLoop, stop: StopSignal, drain_s: float, draining: Callable[[], None] = lambda: None
) -> None:
    """Run until stopped. Then finish what is running within `drain_s` seconds, and hand back the rest."""
    while not stop:
        worker.run_once()
    draining()
    worker.stop_accepting()
    until = time.monotonic() + drain_s
    while worker.running and time.monotonic() < until:
        worker.run_once(accept=False)
    worker.close()


def run_until_idle(worker: WorkerLoop) -> None:
    """Run until there is nothing to do: for tests that run a pipeline in their own process."""
    while worker.run_once() or worker.running or not worker.is_settled():
        pass
