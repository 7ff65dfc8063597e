"""How far prefill goes ahead of decode with batch work.

KV waits in the store until decode comes to it. A job of fifty thousand prompts would fill every tier long before: what
was stored first is dropped, and decode computes it again, beside the answers that it writes. So no batch request is
taken while decode has enough to do; interactive ones always are.
"""

import logging
import threading
from collections.abc import Callable
from typing import Self

import redis

from penstock.errors import BusUnavailable
from penstock.ops.lag import PipelineLag

log = logging.getLogger(__name__)

ENOUGH_S = 2.0
"""So much work decode finds waiting: several times what passes between a look and the next prompt."""
ENOUGH = 64
"""So many messages, while nobody knows how long they take."""
LOOK_S = 0.5
LEAVE_S = 0.5
"""A worker that leaves waits no longer for a look: servers may hang."""


class Ahead:
    """Looks while batch work comes in, in a thread of its own."""

    def __init__(self, look: Callable[[], PipelineLag]) -> None:
        self.is_enough = False
        """Whether decode has enough to do. Where the servers do not say, it has not."""
        self._look = look
        self._taken, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)

    def note(self) -> None:
        """A batch request was taken: look how many of them wait."""
        self._taken.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._taken.set()
        self._thread.join(LEAVE_S)

    def _run(self) -> None:
        while not self._over.is_set():
            if not self.is_enough:
                self._taken.wait()
                self._taken.clear()
            try:
                self.is_enough = has_enough(self._look())
            except (BusUnavailable, redis.RedisError) as error:
                log.debug("nobody says what waits for decode: %s", error)
                self.is_enough = False
            self._over.wait(LOOK_S)


def has_enough(lag: PipelineLag) -> bool:
    """Whether so much batch work waits for decode that it will not run dry."""
    if lag.ahead_s is None:
        return lag.stages["decode"]["batch"].messages > ENOUGH
    return lag.ahead_s > ENOUGH_S
