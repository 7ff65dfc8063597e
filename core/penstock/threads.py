"""Threads that do not die in silence.

A thread of this package ends in one of two ways. Either its work is needed, and its error is raised in the loop that
asks for its results: that is a `CheckedThread`. Or its work can be missed for a moment: then it logs the error of a
turn and goes on with the next one.
"""

import threading
from collections.abc import Callable


class CheckedThread:
    """A daemon thread that is started at once. `raise_failure` raises the error that ended it."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        """The error that ended the thread, if there was one."""
        self._run = run
        self._thread = threading.Thread(target=self._keep_failure, name=name, daemon=True)
        self._thread.start()

    def _keep_failure(self) -> None:
        try:
            self._run()
        except BaseException as error:  # the owner raises it
            self.failure = error

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread's end, for at most `timeout_s` if that is given."""
        self._thread.join(timeout_s)

    def raise_failure(self) -> None:
        """Raise the error that ended the thread, if there was one."""
        if self.failure is not None:
            raise self.failure
