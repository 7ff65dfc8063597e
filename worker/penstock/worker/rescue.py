"""Messages that no worker works on are parked in Redis, where any worker of their stage with capacity takes them.

Interactive requests must not wait while other workers have capacity, nor until the bus notices that a worker is dead.
On Kafka the bus notices that after the group's session timeout, 45 seconds by default. Therefore each worker does this,
on Kafka in a thread of its own. On Redis Streams it does so in its loop, and there is no 2:

    1  a message that its member has fetched, or that waits to be read (`penstock.worker.message_reader`), and that was
       not claimed here within two leases, is parked
    2  one worker adopts parts of the topics whose reader's session is over, or whose reader makes no progress. It also
       adopts parts that no session has named for two leases: their reader died before it named them, or Redis lost
       the names. The worker reads these parts from where the group stopped, and parks the messages that it finds
    3  the worker that takes such a request answers it. The worker that has its delivery, or gets it later, settles it
       from the record

What a crash costs: before a message is parked it waits for the bus, or for the next worker that adopts its part;
after that nothing. A request that was begun before stays as it is, so it does not matter who else reads its message.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, takewhile

import redis

from penstock.bus.contract import Delivery, Member, OrphanReader
from penstock.errors import BusError, is_failure
from penstock.names import Stage, find_shared_topic
from penstock.record import Record, Session, ShardedSession, UnclaimedMessage
from penstock.redis.client import is_outage
from penstock.threads import CheckedThread

log = logging.getLogger(__name__)

PATIENCE_LEASES = 2.0
"""How many leases a message may wait in its worker before it is parked."""
UNNAMED_LEASES = 2.0
"""How many leases a partition may be named by nobody: a member needs some time to begin what it was assigned."""
MAX_FREE_REQUESTS = 64
"""Adopted partitions are not read on while this many free requests wait in Redis for a worker."""
MAX_BATCH_BYTES = 4 * 2**20
"""Bytes of messages that are parked in one round trip. A larger message goes alone."""
MAX_WAITING_BYTES = 64 * 2**20
"""How many bytes of waiting messages of one worker are parked. Those behind them wait for the bus."""
CLOSE_TIMEOUT_S = 2.0
"""How long a worker that leaves waits for the thread: servers may not answer."""


class Rescuer:
    """Parks messages for other workers, on a thread of its own where partitions may be adopted.

    `stages` has the topics that the worker reads, and the stage of the requests in each. `read` returns what a claim
    needs to know of a message, or None; `list_unclaimed` returns the messages that the worker has polled and not
    claimed yet.
    """

    def __init__(
        self,
        record: Record,
        stages: Mapping[str, Stage],
        session: Session | ShardedSession,
        member: Member,
        read: Callable[[Delivery], UnclaimedMessage | None],
        list_unclaimed: Callable[[], list[Delivery]] = list,
    ) -> None:
        self._record, self._stages, self._session, self._member, self._read = record, stages, session, member, read
        self._readers, self._list_unclaimed = member.create_orphan_readers(), list_unclaimed
        self._since: dict[tuple[str, str], float] = {}
        """By offset, since when a message waits; `inf` once it is parked."""
        self._unnamed: dict[str, float] = {}
        """The partitions that no session names, with the time since when."""
        self._found: list[Delivery] = []
        """Messages read from adopted parts and not parked yet."""
        self._interval_s = record.lease_s / 2
        self._due_s = time.monotonic() + self._interval_s
        self._stop = threading.Event()
        self._thread = CheckedThread("penstock-rescue", self._run) if self._readers else None

    def run_once(self) -> None:
        """Park messages that have waited too long; only without a rescue thread. The loop calls this in each turn.

        Raise the error that ended the thread, if there was one. Outages do not end it.
        """
        if self._thread is not None:
            self._thread.raise_failure()
        elif self._due_s <= time.monotonic() and not self._stop.is_set():
            self._look()
            self._due_s = time.monotonic() + self._interval_s

    def close(self) -> None:
        """Stop parking messages."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        wait_s = self._interval_s
        with contextlib.ExitStack() as stack:
            for reader in self._readers:
                stack.enter_context(contextlib.closing(reader))
            while not self._stop.wait(wait_s):
                wait_s = self._interval_s / 5 if self._look() else self._interval_s

    def _look(self) -> bool:
        """Park messages that wait here and in adopted parts. Return whether this worker has adopted any."""
        try:
            self.park_waiting_messages()
            return self.read_adopted_parts()
        except BusError as error:  # an outage: the next look tries again
            log.debug("adopted partitions cannot be read now: %s", error)
        except redis.RedisError as error:
            if not is_outage(error):
                raise
        return False

    def park_waiting_messages(self) -> None:
        """Park messages that were not begun here in time (1). Raises `redis.RedisError`."""
        known, now_s = self._since, time.monotonic()
        mine = [*self._list_unclaimed(), *self._member.list_prefetched()]
        waiting = [delivery for delivery in mine if delivery.priority_class == "interactive"]
        sums = accumulate(len(delivery.value) for delivery in waiting)
        near = waiting[: sum(1 for _ in takewhile(lambda num_bytes: num_bytes <= MAX_WAITING_BYTES, sums))]
        self._since = {delivery.address: known.get(delivery.address, now_s) for delivery in near}
        latest_s = now_s - PATIENCE_LEASES * self._record.lease_s
        late = [delivery for delivery in near if self._since[delivery.address] <= latest_s]
        while late:
            portion = _take_batch(late)
            left = self._park_messages(portion)
            self._since |= {delivery.address: float("inf") for delivery in portion if delivery not in left}
            del late[: len(portion)]

    def read_adopted_parts(self) -> bool:
        """Park messages of adopted parts (2). Returns whether any are adopted; raises `redis.RedisError` or
        `BusError`.
        """
        if not self._readers:
            return False
        parts = self._adopt_partitions()
        self._park_found_messages()
        for reader in self._readers:
            mine = [part for part in parts if find_shared_topic(part.rpartition(":")[0]) == reader.topic]
            self._found += self._read_parts(reader, mine)
            self._park_found_messages()
        return bool(parts)

    def _read_parts(self, reader: OrphanReader, parts: Sequence[str]) -> list[Delivery]:
        """Return messages of adopted parts, as many as there is room for among the free requests of their stage."""
        if not parts:
            return reader.read_orphans([], 0)
        stage = self._stages[reader.topic]
        num_wanted = MAX_FREE_REQUESTS - self._record.count_free(stage) - len(self._found)
        found = reader.read_orphans(parts, max(0, num_wanted))
        if found:
            log.info("found %d messages that no other %s worker reads", len(found), stage)
        return found

    def _adopt_partitions(self) -> list[str]:
        """Return the partitions that this worker has to read though they are not its own."""
        record, now_s = self._record, time.monotonic()
        known = [part for reader in self._readers for part in reader.list_partitions()]
        unnamed = record.find_unnamed_partitions(known)
        self._unnamed = {part: self._unnamed.get(part, now_s) for part in unnamed}
        latest_s = now_s - UNNAMED_LEASES * record.lease_s
        forgotten = [part for part, since_s in self._unnamed.items() if since_s <= latest_s]
        if self._stop.is_set():  # this worker leaves
            return []
        shared = {reader.topic for reader in self._readers}
        topics = shared | {topic for topic, _, _ in (part.rpartition(":") for part in known)}
        mine = sorted(topic for topic in topics if find_shared_topic(topic) in shared)
        adopted = record.adopt_partitions(self._session.id, mine, forgotten)
        for part in forgotten:  # if it is forgotten again, it has its time again
            del self._unnamed[part]
        own = set(self._member.list_partitions())
        return [part for part in adopted if part not in own]

    def _park_found_messages(self) -> None:
        left: list[Delivery] = []
        try:
            while self._found:
                portion = _take_batch(self._found)
                left += self._park_messages(portion)
                del self._found[: len(portion)]
        finally:
            self._found = left + self._found

    def _park_messages(self, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Park messages. Returns those that cannot be parked now."""
        whose = [(delivery, one) for delivery in deliveries if (one := self._read_waiting(delivery)) is not None]
        left = set[str]()
        for stage in dict.fromkeys(self._stages.values()):
            mine = [one for delivery, one in whose if self._stages[find_shared_topic(delivery.topic)] == stage]
            left |= {one.id for one in self._record.park_messages(stage, mine)}
        return [delivery for delivery, one in whose if one.id in left]

    def _read_waiting(self, delivery: Delivery) -> UnclaimedMessage | None:
        try:
            return self._read(delivery)
        except BaseException as error:  # the worker that claims the request finds this out, and ends it
            if not is_failure(error):
                raise
            log.exception("a message in %s cannot be parked", delivery.topic)
            return None


def _take_batch(deliveries: Sequence[Delivery]) -> list[Delivery]:
    """Return the first messages, as many as go in one round trip."""
    sums = accumulate(len(delivery.value) for delivery in deliveries)
    num = sum(1 for _ in takewhile(lambda num_bytes: num_bytes <= MAX_BATCH_BYTES, sums))
    return list(deliveries[: max(1, num)])
