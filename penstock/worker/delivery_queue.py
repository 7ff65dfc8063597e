"""What a loop takes in: fresh deliveries, and those whose request somebody else still holds."""

import heapq
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.bus.contract import Delivery, Member
from penstock.names import PriorityClass

IDLE_POLL_S = 0.2
"""How long an idle worker waits in one poll: also how soon it sees that it should stop."""
MAX_DEFERRED = 1000
"""Of a class of which so many deliveries wait, no more are taken: each costs a look a second."""
POSTPONE_S = 2.0
"""Without room a delivery is looked at so much later. By then a worker with room has taken its request over."""


@dataclass(order=True)
class _Deferred:
    due_s: float
    order: int
    delivery: Delivery = field(compare=False)
    is_postponed: bool = field(default=False, compare=False)


class DeliveryQueue:
    """A member's deliveries, with a place for those that have to be looked at again."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._waiting: list[_Deferred] = []
        self._num_waiting: Counter[PriorityClass] = Counter()
        self._count = 0

    def __len__(self) -> int:
        """Deliveries that wait to be looked at again."""
        return len(self._waiting)

    def defer(self, delivery: Delivery, wait_s: float = 0.0) -> None:
        """Look at a delivery again in `wait_s` seconds: its request is held by another, whose session may end.

        One that is not held is somebody else's to look at.
        """
        if delivery.is_held:
            self._push_deferred(delivery, wait_s)

    def num_deferred(self, klass: PriorityClass) -> int:
        """Deliveries of a class that wait to be looked at again. Any thread may ask."""
        return self._num_waiting[klass]

    def poll(
        self, room: int, interactive_room: int | None = None, *, idle: bool, wait_s: float = IDLE_POLL_S
    ) -> list[Delivery]:
        """What to look at now: at most `room` fresh deliveries, waiting for the first only where the worker is idle.

        Interactive ones have a room of their own, which may be more: they displace batch work. That leaves one place
        for what is interactive, unless there is only one and nobody uses it. Those put back take up no room, as their
        requests run elsewhere; where some of them are due, fewer fresh ones are taken, for they may be free by now.
        """
        rooms: dict[PriorityClass, int] = {
            "interactive": room if interactive_room is None else interactive_room,
            "batch": room,
        }
        due = self._pop_due(rooms)
        if max(rooms.values()) <= 0 and not idle:
            return due
        found = Counter(delivery.klass for delivery in due)
        fresh = {klass: self._fresh_capacity(klass, number, found[klass]) for klass, number in rooms.items()}
        fresh["batch"] = fresh["batch"] - 1 if fresh["batch"] > 1 else fresh["batch"] * idle
        timeout_s = self._seconds_to_next(wait_s) if idle and not due else 0.0
        return due + self._member.poll(timeout_s, fresh)

    def _fresh_capacity(self, klass: PriorityClass, room: int, num_due: int) -> int:
        """At least one where there is room at all: with many that wait, some are always due."""
        return 0 if self._num_waiting[klass] >= MAX_DEFERRED else max(min(1, room), room - num_due)

    def _pop_due(self, rooms: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return as many of those due as there is room for; without room, one of those postponed, of each class.

        If its request is over it is to be settled. If not it is claimed beyond the room, so there is only one a turn.
        """
        ready: list[Delivery] = []
        left, now_s = dict(rooms), time.monotonic()
        postponed: list[_Deferred] = []
        while self._waiting and self._waiting[0].due_s <= now_s:
            one = heapq.heappop(self._waiting)
            klass = one.delivery.klass
            if left[klass] > 0 or (one.is_postponed and left[klass] == 0):
                left[klass] -= 1
                self._num_waiting[klass] -= 1
                ready.append(one.delivery)
            elif one.is_postponed:
                postponed.append(one)
            else:
                self._num_waiting[klass] -= 1
                self._push_deferred(one.delivery, POSTPONE_S, is_postponed=True)
        for one in postponed:
            heapq.heappush(self._waiting, one)
        return ready

    def _push_deferred(self, delivery: Delivery, wait_s: float, *, is_postponed: bool = False) -> None:
        self._count += 1
        self._num_waiting[delivery.klass] += 1
        heapq.heappush(self._waiting, _Deferred(time.monotonic() + wait_s, self._count, delivery, is_postponed))

    def _seconds_to_next(self, most_s: float) -> float:
        if not self._waiting:
            return most_s
        return max(0.0, min(most_s, self._waiting[0].due_s - time.monotonic()))


def serialize_delivery(delivery: Delivery) -> bytes:
    """A delivery as a claim keeps it in Redis for whoever goes on without it: a line of JSON, then the message."""
    about = {
        "topic": delivery.topic,
        "key": delivery.key,
        "headers": dict(delivery.headers),
        "class": delivery.klass,
        "at": delivery.timestamp_s,
    }
    return json.dumps(about).encode() + b"\n" + delivery.value


def deserialize_delivery(parcel: bytes) -> Delivery:
    """The message as a delivery that nobody holds: it cannot be settled."""
    line, value = parcel.split(b"\n", 1)
    about = json.loads(line)
    return Delivery(
        about["topic"], "", value, about["key"], about["headers"], about["class"], about["at"], is_held=False
    )
