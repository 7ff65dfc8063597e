"""Parts of the topics whose reader died, before the bus has found out.

On Kafka a partition is one member's to read, and goes to another only after the group's session timeout: 45 seconds by
default. What is interactive must not wait for that, nor what arrives there meanwhile. So:

    1  each worker says, along with its leases, which partitions it reads
    2  one that nobody spoke for in a lease and a half is an orphan; one worker of the stage looks after all of them
    3  it reads them from where the group stopped, and puts the requests down as `Backlog` does: any worker with room
       takes them over
    4  when the brokers have found out, another member reads the same messages, and settles what was done

What a crash of that worker costs: after 2 or 3 another looks after them, some leases later, and reads them from where
the group stopped. A request that was put down before stays as it is, and so does one that somebody holds. So a worker
that was merely slow to speak loses nothing but requests that it had not begun.
"""

import contextlib
import logging
import threading
from collections.abc import Callable

import redis

from penstock.bus.contract import Delivery, Member
from penstock.errors import BusError
from penstock.names import Stage
from penstock.record import Record, Waiting

log = logging.getLogger(__name__)

MOST = 64
"""Requests that are put down at a time, and may wait to be taken over: what is behind them is read when they are."""
MOST_PARTS = 1000
LEAVE_S = 2.0
"""A worker that leaves waits no longer for brokers that do not answer."""


class Orphans:
    """`read` says whose a message is, or that nobody can tell. Where members share their topics it does nothing."""

    def __init__(
        self, record: Record, stage: Stage, name: str, member: Member, read: Callable[[Delivery], Waiting | None]
    ) -> None:
        self._record, self._stage, self._member, self._read = record, stage, member, read
        self._readers = record.readers(stage, name)
        self._reader = member.orphan_reader()
        self._named: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-orphans", daemon=True)
        if self._reader is not None:
            self._thread.start()

    def name(self) -> None:
        """Say which parts this worker reads; the thread that keeps its leases does. Raises `redis.RedisError`."""
        self._named = self._member.parts()
        self._readers.name(self._named)

    def leave(self) -> None:
        """Look no more, and say that what this worker read goes to others now: the bus sees to that."""
        self.close()
        with contextlib.suppress(redis.RedisError):  # else they are orphans for a moment
            self._readers.let_go(self._named)

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._reader is not None:
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        assert self._reader is not None
        calm_s = self._record.lease_s / 2
        wait_s = calm_s
        while not self._stop.wait(wait_s):
            try:
                wait_s = calm_s / 5 if self._look() else calm_s
            except (redis.RedisError, BusError) as error:  # an outage: the next look tries again
                log.debug("orphans cannot be looked after: %s", error)
            except Exception:  # a bug, here or in a client; what was read is read again
                log.exception("orphans cannot be looked after")
                wait_s = calm_s
                self._reader.close()
        self._reader.close()

    def _look(self) -> bool:
        """Whether there are any."""
        assert self._reader is not None
        parts = self._readers.orphans(MOST_PARTS)
        most = max(0, MOST - self._record.num_overdue(self._stage)) if parts else 0
        found = self._reader.read(parts, most)
        if found:
            log.info("%d messages that a dead %s worker would have read", len(found), self._stage)
        waiting = [known for delivery in found if (known := self._read(delivery)) is not None]
        self._record.put_down(self._stage, waiting, is_here=False)
        return bool(parts)
