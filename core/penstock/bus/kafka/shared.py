"""The state that the threads of a Kafka member share: the messages that it holds, and why it cannot go on."""

import threading
from collections.abc import Callable

from penstock.bus.kafka.buffer import PrefetchBuffer
from penstock.errors import BusUnavailable


class SharedState:
    """The state of one member. `changed` guards the holdings, for moments only, and is notified of each change."""

    def __init__(self, holdings: PrefetchBuffer, wake: Callable[[], None]) -> None:
        """`wake` is called, on any thread, when the member's `poll` has something to return or to raise."""
        self.changed, self.holdings, self._wake = threading.Condition(), holdings, wake
        self.failure: Exception | None = None
        """Why this member has to be made anew."""
        self.closing = threading.Event()
        """Set when the member has left its group."""

    def raise_failure(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def check_open(self) -> None:
        """Raise `BusUnavailable` once the member has left its group."""
        if self.closing.is_set():
            raise BusUnavailable("Kafka: this member has left its group")

    def note_failure(self, failure: Exception) -> None:
        """Note why the member cannot go on. The first failure stays."""
        with self.changed:
            self.failure = self.failure or failure
            self.notify_poll()

    def notify_poll(self) -> None:
        """Wake the thread that polls. The caller holds `changed`."""
        self.changed.notify_all()
        self._wake()
