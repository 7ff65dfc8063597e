"""The frame of both workers' loops: turn until told to stop, then finish or hand back."""

import signal
import threading
import time
from collections.abc import Callable, Sized
from types import FrameType
from typing import Protocol, Self


class StopSignal:
    """Set by SIGTERM or SIGINT: the loop finishes or hands back what it has, and leaves."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> Self:
        """Take over this process's SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def set(self) -> None:
        """Ask the loop to stop."""
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for it; whether it is set."""
        return self._event.wait(timeout_s)

    def __bool__(self) -> bool:
        return self._event.is_set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._event.set()


class WorkerLoop(Protocol):
    """A worker: `turn` is its loop's body."""

    @property
    def running(self) -> Sized:
        """What it is working on."""

    def run_once(self, *, accept: bool = True) -> bool:
        """One turn; whether it did anything. Without `accept` nothing new is taken."""

    def is_settled(self) -> bool:
        """Whether nothing waits, for another worker or for a commit."""

    def stop_accepting(self) -> None:
        """Take nothing more, and let others have what would come here."""

    def close(self) -> None:
        """Hand back what is not finished, and leave the group."""


def run_until_stopped(
    worker: WorkerLoop, stop: StopSignal, drain_s: float, draining: Callable[[], None] = lambda: None
) -> None:
    """Work until told to stop; then finish what is running, within `drain_s`, and hand back the rest."""
    while not stop:
        worker.run_once()
    draining()
    worker.stop_accepting()
    until = time.monotonic() + drain_s
    while worker.running and time.monotonic() < until:
        worker.run_once(accept=False)
    worker.close()


def run_until_idle(worker: WorkerLoop) -> None:
    """Work until there is nothing to do: for tests that run a pipeline in their own process."""
    while worker.run_once() or worker.running or not worker.is_settled():
        pass
