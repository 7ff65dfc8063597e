"""Messages that nobody works on, put down in Redis, so that any worker of the stage with room takes them.

What is interactive must not wait while others have time for it, nor until the bus finds out that a worker is dead (on
Kafka the group's session timeout: 45 seconds by default). So, in a thread of each worker:

    1  what its member has fetched, and what found no place here within two leases, is put down
    2  parts of the topics whose reader's session is over, or whose reader does not progress, are adopted by one worker
       (`penstock.record.session`). It reads them from where the group stopped, and puts down what it finds
    3  whoever takes such a request answers it. Who has its delivery, or gets it later, settles it from the record

What a crash costs: before a message is put down it waits for the bus, or for who adopts its part next; after that
nothing. A request that was begun before stays as it is, so it does not matter who else reads its message.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

import redis

from penstock.bus.contract import Delivery, Member, OrphanReader
from penstock.errors import BusError
from penstock.names import Stage
from penstock.record import Record, Session, Sessions, Waiting
from penstock.redis.client import is_away

log = logging.getLogger(__name__)

PATIENCE_LEASES = 2.0
"""Leases."""
MAX_FREE_REQUESTS = 64
"""With so many requests that nobody has taken yet, no more are read for others."""
MAX_BATCH_BYTES = 4 * 2**20
"""Of messages that are put down in one round trip; a larger one goes alone."""
MAX_WAITING_BYTES = 64 * 2**20
"""Of messages that wait in one worker and are put down. What is behind these waits for the bus."""
CLOSE_TIMEOUT_S = 2.0
"""A worker that leaves waits no longer for servers that do not answer."""


class Rescuer:
    """`read` says whose a message is, or that nobody can tell; `reader` reads adopted parts, where there are any."""

    def __init__(
        self,
        record: Record,
        stage: Stage,
        session: Session | Sessions,
        member: Member,
        reader: OrphanReader | None,
        read: Callable[[Delivery], Waiting | None],
    ) -> None:
        self._record, self._stage, self._session, self._member, self._read = record, stage, session, member, read
        self._reader = reader
        self._since: dict[tuple[str, str], float] = {}
        """By place, since when a message waits; `inf` once it is put down."""
        self._found: list[Delivery] = []
        """Read for others, and not put down yet."""
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-rescue", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise what made it impossible to go on, if that was no outage."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Put down no more."""
        self._stop.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        calm_s = wait_s = self._record.lease_s / 2
        while not self._stop.wait(wait_s):
            try:
                self.put_down_waiting()
                wait_s = calm_s / 5 if self.read_adopted_parts() else calm_s
            except BusError as error:  # an outage: the next look tries again
                log.debug("the bus cannot be read for others: %s", error)
            except Exception as error:
                if not isinstance(error, redis.RedisError) or not is_away(error):
                    self._failure = error
                    break
        if self._reader is not None:
            self._reader.close()

    def put_down_waiting(self) -> None:
        """1: what found no place here. Raises `redis.RedisError`."""
        known, now_s = self._since, time.monotonic()
        waiting = [delivery for delivery in self._member.waiting() if delivery.klass == "interactive"]
        sums = accumulate(len(delivery.value) for delivery in waiting)
        near = waiting[: sum(1 for _ in takewhile(lambda num_bytes: num_bytes <= MAX_WAITING_BYTES, sums))]
        self._since = {_offset_of(delivery): known.get(_offset_of(delivery), now_s) for delivery in near}
        latest_s = now_s - PATIENCE_LEASES * self._record.lease_s
        late = [delivery for delivery in near if self._since[_offset_of(delivery)] <= latest_s]
        while late:
            portion = _take_batch(late)
            left = self._put_down(portion)
            self._since |= {_offset_of(delivery): float("inf") for delivery in portion if delivery not in left}
            del late[: len(portion)]

    def read_adopted_parts(self) -> bool:
        """2: what nobody reads. Whether there is any; raises `redis.RedisError` or `BusError`."""
        if self._reader is None:
            return False
        parts = list(self._session.adopted)
        self._put_down_found()
        if parts:
            found = self._reader.read(
                parts, max(0, MAX_FREE_REQUESTS - self._record.num_free(self._stage) - len(self._found))
            )
            if found:
                log.info("%d messages that no other %s worker reads", len(found), self._stage)
            self._found += found
            self._put_down_found()
        else:
            self._reader.read([], 0)
        return bool(parts)

    def _put_down_found(self) -> None:
        left: list[Delivery] = []
        try:
            while self._found:
                portion = _take_batch(self._found)
                left += self._put_down(portion)
                del self._found[: len(portion)]
        finally:
            self._found = left + self._found

    def _put_down(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Returns those that cannot be put down now."""
        whose = [(delivery, one) for delivery in deliveries if (one := self._read_waiting(delivery)) is not None]
        left = {one.id for one in self._record.put_down(self._stage, [one for _, one in whose])}
        return [delivery for delivery, one in whose if one.id in left]

    def _read_waiting(self, delivery: Delivery) -> Waiting | None:
        try:
            return self._read(delivery)
        except Exception:  # who claims it finds that out, and ends it
            log.exception("a message in %s cannot be put down", delivery.topic)
            return None


def _offset_of(delivery: Delivery) -> tuple[str, str]:
    return delivery.topic, delivery.position


def _take_batch(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """As many as go in one round trip."""
    sums = accumulate(len(delivery.value) for delivery in deliveries)
    num = sum(1 for _ in takewhile(lambda num_bytes: num_bytes <= MAX_BATCH_BYTES, sums))
    return list(deliveries[: max(1, num)])
