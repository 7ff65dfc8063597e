"""Threads that do not die in silence.

A thread of this package ends in one of two ways. Either its work is needed, and its error is raised in the loop that
asks for its results: that is a `CheckedThread`. Or its work can be missed for a moment: then it logs the error of a
turn and goes on with the next one.
"""

import threading
from collections.abc import Callable


class CheckedThread(threading.Thread):
    """A daemon thread that is started at once. `raise_failure` raises the error that ended it."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.failure: BaseException | None = None
        """The error that ended the thread, if there was one."""
        self._run_work = run
        self.start()

    def run(self) -> None:
        """Do the thread's work, and keep its error."""
        try:
            self._run_work()
        except BaseException as error:  # the owner raises it
            self.failure = error

    def raise_failure(self) -> None:
        """Raise the error that ended the thread, if there was one."""
        if self.failure is not None:
            raise self.failure
