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

MAX_QUEUED_S = 2.0
"""So much work decode finds waiting: several times what passes between a look and the next prompt."""
MAX_QUEUED_MESSAGES = 64
"""So many messages, while nobody knows how long they take."""
POLL_INTERVAL_S = 0.5
CLOSE_TIMEOUT_S = 0.5
"""A worker that leaves waits no longer for a look: servers may hang."""


class DecodeBackpressure:
    """Looks while batch work comes in, in a thread of its own."""

    def __init__(self, look: Callable[[], PipelineLag]) -> None:
        self.is_active = False
        """Whether decode has enough to do. Where the servers do not say, it has not."""
        self._look = look
        self._taken, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)

    def note_batch_admitted(self) -> None:
        """A batch request was taken: look how many of them wait."""
        self._taken.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._taken.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while not self._over.is_set():
            if not self.is_active:
                self._taken.wait()
                self._taken.clear()
            try:
                self.is_active = has_enough_queued(self._look())
            except (BusUnavailable, redis.RedisError) as error:
                log.debug("nobody says what waits for decode: %s", error)
                self.is_active = False
            self._over.wait(POLL_INTERVAL_S)


def has_enough_queued(lag: PipelineLag) -> bool:
    """Whether so much batch work waits for decode that it will not run dry."""
    if lag.queued_batch_s is None:
        return lag.stages["decode"]["batch"].messages > MAX_QUEUED_MESSAGES
    return lag.queued_batch_s > MAX_QUEUED_S
