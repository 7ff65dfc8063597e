"""What a loop takes in: fresh deliveries, and those whose request somebody else still holds."""

import heapq
import time
from dataclasses import dataclass, field

from penstock.bus.contract import Delivery, Member
from penstock.names import PriorityClass

IDLE_POLL_S = 0.2
"""How long an idle worker waits in one poll: also how soon it sees that it should stop."""


@dataclass(order=True)
class _Waiting:
    due_s: float
    order: int
    delivery: Delivery = field(compare=False)


class Inbox:
    """A member's deliveries, with a place for those that have to be looked at again."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._waiting: list[_Waiting] = []
        self._count = 0

    def __len__(self) -> int:
        """Deliveries that wait to be looked at again."""
        return len(self._waiting)

    def put_back(self, delivery: Delivery, wait_s: float = 0.0) -> None:
        """Look at a delivery again in `wait_s` seconds: its request is held by another, whose lease may run out.

        One that is not held is somebody else's to look at.
        """
        if not delivery.is_held:
            return
        self._count += 1
        heapq.heappush(self._waiting, _Waiting(time.monotonic() + wait_s, self._count, delivery))

    def num_waiting(self, klass: PriorityClass) -> int:
        """Deliveries of a class that wait to be looked at again. Any thread may ask."""
        return sum(one.delivery.klass == klass for one in list(self._waiting))

    def poll(self, room: int, interactive_room: int | None = None, *, idle: bool) -> list[Delivery]:
        """What to look at now: at most `room` fresh deliveries, waiting for the first only where the worker is idle.

        Interactive ones have a room of their own, which may be more: they displace batch work. That leaves one place
        for what is interactive, unless there is only one and nobody uses it. Those put back take up room until they are
        settled: batch ones that of batch.
        """
        free = max(0, room - len(self._waiting))
        interactive = free if interactive_room is None else interactive_room - self.num_waiting("interactive")
        if max(free, interactive) <= 0 and not idle:
            return self._due()
        timeout_s = self._next_in_s() if idle else 0.0
        batch = free - 1 if free > 1 else free * idle
        fresh = self._member.poll(timeout_s, {"interactive": interactive, "batch": batch})
        return self._due() + fresh

    def _due(self) -> list[Delivery]:
        ready = []
        while self._waiting and self._waiting[0].due_s <= time.monotonic():
            ready.append(heapq.heappop(self._waiting).delivery)
        return ready

    def _next_in_s(self) -> float:
        if not self._waiting:
            return IDLE_POLL_S
        return max(0.0, min(IDLE_POLL_S, self._waiting[0].due_s - time.monotonic()))
