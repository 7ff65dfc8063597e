"""Processes that use a tier as tests tell them, and die or stand still at a step."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kvstore import steps
from penstock.local.processes import Child
from penstock.waiting import wait_until
from sim.forked import fork_process

Main = Callable[..., int]


def start(main: Main, directory: Path, *what: str) -> Child:
    """A process that does in the directory what its `main` is told; the log is there, too."""
    return fork_process(" ".join(what), directory / "log", main, directory, *what)


@contextmanager
def halted(main: Main, directory: Path, step: str) -> Iterator[Child]:
    """One that stands still at a step."""
    child = start(main, directory, "halt", step)
    wait_until((directory / "halted").exists, 60, "the child comes to the step")
    yield child
    if child.is_alive():
        child.kill()


# In the child.


def die(step: str, times: int, live: Callable[[], None]) -> int:
    """Be killed when `live` comes to a step for the so-manieth time; 1 if it never does."""
    seen = []

    def reached(name: str) -> None:
        seen.append(name)
        if name == step and seen.count(step) == times:
            os.kill(os.getpid(), signal.SIGKILL)

    steps.reached = reached
    live()
    return 1


def halt(step: str, live: Callable[[], None], directory: Path) -> int:
    """Stand still at a step until it is killed, and say so by making the file `halted`; 1 if it never comes there."""

    def reached(name: str) -> None:
        if name == step:
            (directory / "halted").touch()
            threading.Event().wait()

    steps.reached = reached
    live()
    return 1
