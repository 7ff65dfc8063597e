"""Processes that use a tier as tests tell them, and die or stand still at a step."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock import failpoints
from penstock.local.processes import Child
from sim.forked import fork_process
from sim.waiting import wait_for

Main = Callable[..., int]


def start(main: Main, directory: Path, *what: str) -> Child:
    """A process that does in the directory what its `main` is told; the log is there, too."""
    return fork_process(" ".join(what), directory / "log", main, directory, *what)


@contextmanager
def halted(main: Main, directory: Path, tier: str, step: str) -> Iterator[Child]:
    """One that stands still at a step of a tier."""
    child = start(main, directory, "halt", tier, step)
    wait_for((directory / "halted").exists, "the child comes to the step")
    yield child
    if child.is_alive():
        child.kill()


# In the child.


def die(step: str, times: int, live: Callable[[], None]) -> int:
    """Be killed when `live` comes to a step for the `times`-th time; 1 if it never does."""
    failpoints.arm(f"{step}=kill@{times}")
    live()
    return 1


def halt(step: str, live: Callable[[], None], directory: Path) -> int:
    """Stand still at a step until it is killed, and say so by making the file `halted`; 1 if it never comes there."""

    def stand_still() -> None:
        (directory / "halted").touch()
        threading.Event().wait()

    failpoints.arm_action(step, stand_still)
    live()
    return 1
