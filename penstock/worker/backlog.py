"""Messages that a member has fetched and its worker has no room for.

A worker that dies must not take them with it until the bus finds out. So they are put down with their requests:

    1  a message that was there at the last look too is put down (`Record.put_down`): as if claimed and given back
    2  it is named along with the leases, for as long as it waits
    3  the loop claims it when there is room

A crash before 1 leaves the message to the bus, as one that nobody has fetched. After 1, its name runs out, and any
worker of the stage with room takes the request over.
"""

from collections.abc import Callable
from itertools import accumulate, takewhile

from penstock.bus.contract import Delivery, Member
from penstock.names import Stage
from penstock.record import Record, Waiting

MOST_BYTES = 4 * 2**20
"""Of messages that are put down for a worker at a time. What is behind these waits for the bus."""


class Backlog:
    """Belongs to the thread that keeps the leases. `read` says whose a message is, or that nobody can tell."""

    def __init__(
        self, record: Record, stage: Stage, member: Member, read: Callable[[Delivery], Waiting | None]
    ) -> None:
        self._record, self._stage, self._member, self._read = record, stage, member, read
        self._ids: dict[tuple[str, str], str | None] = {}
        """Of the messages that waited at the last look, by place; None: not put down yet. Empty: nobody's."""

    def tend(self) -> None:
        """Put down what has waited for a while, and name it. Raises `redis.RedisError`."""
        known, self._ids, fresh = self._ids, {}, list[Waiting]()
        for delivery in self._first():
            place = delivery.topic, delivery.position
            self._ids[place] = known.get(place)
            if place in known and known[place] is None:
                waiting = self._read(delivery)
                self._ids[place] = waiting.id if waiting else ""
                fresh += [waiting] if waiting else []
        self._record.put_down(self._stage, fresh)
        self._record.name(self._stage, [found for found in self._ids.values() if found])

    def _first(self) -> list[Delivery]:
        waiting = self._member.waiting()
        sums = accumulate(len(delivery.value) for delivery in waiting)
        num_first = sum(1 for _ in takewhile(lambda num_bytes: num_bytes <= MOST_BYTES, sums))
        return waiting[:num_first]
