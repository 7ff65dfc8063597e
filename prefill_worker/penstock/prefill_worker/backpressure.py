"""Backpressure of decode on prefill: how far prefill goes ahead with batch work.

KV waits in the store until decode reads it. A job of fifty thousand prompts would fill every tier long before: what was
stored first would be dropped, and decode would compute it again beside the answers that it generates. While
decode has enough to do, prefill therefore takes no batch request. Interactive requests are always taken.
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
"""Seconds of queued batch work with which decode has enough: several times a poll and the next prompt together."""
MAX_QUEUED_MESSAGES = 64
"""Queued batch messages with which decode has enough, while it is not known how long they take."""
POLL_INTERVAL_S = 0.5
CLOSE_TIMEOUT_S = 0.5
"""How long a worker that leaves waits for the thread: servers may not answer."""


class DecodeBackpressure:
    """Reads the lag on a thread of its own, while batch requests are admitted."""

    def __init__(self, read_lag: Callable[[], PipelineLag]) -> None:
        self.is_active = False
        """Whether decode has enough batch work. False where the servers do not answer."""
        self._read_lag = read_lag
        self._taken, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)

    def note_batch_admitted(self) -> None:
        """Note that a batch request was taken: the thread reads how many wait for decode."""
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
                self.is_active = has_enough_queued(self._read_lag())
            except (BusUnavailable, redis.RedisError) as error:
                log.debug("the lag of decode cannot be read now: %s", error)
                self.is_active = False
            except Exception:  # e.g. the heartbeat of another version: batch work must not wait for ever
                log.exception("the lag of decode cannot be read")
                self.is_active = False
            self._over.wait(POLL_INTERVAL_S)


def has_enough_queued(lag: PipelineLag) -> bool:
    """Return whether enough batch work waits for decode to keep it busy."""
    if lag.queued_batch_s is None:
        return lag.stages["decode"]["batch"].messages > MAX_QUEUED_MESSAGES
    return lag.queued_batch_s > MAX_QUEUED_S
