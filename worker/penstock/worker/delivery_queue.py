"""New deliveries, and deferred ones whose request another worker still holds."""

import heapq
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.bus.contract import Delivery, Member
from penstock.errors import ContentErased, TenantKeyMissing
from penstock.names import PriorityClass
from penstock.sealing import is_sealed, open_message, read_envelope, seal_message

IDLE_POLL_S = 0.2
"""How long an idle worker waits in one poll: also how soon it sees that it should stop."""
MAX_DEFERRED = 1000
"""Once this many deliveries of a class are deferred no new ones are polled: each costs a claim attempt a second."""
POSTPONE_S = 2.0
"""A due delivery for which there is no capacity is deferred by this long. By then a worker with capacity has taken its
request over.
"""


@dataclass(order=True)
class _Deferred:
    due_s: float
    order: int
    delivery: Delivery = field(compare=False)
    is_postponed: bool = field(default=False, compare=False)


class DeliveryQueue:
    """A member's deliveries, with a queue of those that are deferred."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._deferred: list[_Deferred] = []
        self._num_deferred: Counter[PriorityClass] = Counter()
        self._num_pushed = 0

    def __len__(self) -> int:
        """Return the number of deferred deliveries."""
        return len(self._deferred)

    def defer(self, delivery: Delivery, wait_s: float = 0.0) -> None:
        """Return a delivery again from `poll` after `wait_s` seconds: another session holds its request, and may end.

        A delivery that is not held by this worker is ignored.
        """
        if delivery.is_held:
            self._push_deferred(delivery, wait_s)

    def list_deferred(self) -> list[Delivery]:
        """Return the deferred deliveries. Any thread may call this."""
        return [one.delivery for one in list(self._deferred)]

    def poll(
        self, capacity: int, interactive_capacity: int | None = None, *, is_idle: bool, wait_s: float = IDLE_POLL_S
    ) -> list[Delivery]:
        """Return due deferred deliveries and at most `capacity` new ones. Only an idle worker waits for the first.

        Interactive deliveries have a capacity of their own, which may be larger, as they displace batch work. One slot
        stays reserved for interactive work, unless there is only one slot and the worker is idle. Deferred deliveries
        use no capacity, as their requests run elsewhere; where some are due, fewer new ones are taken, as their
        requests may be free by now.
        """
        capacities: dict[PriorityClass, int] = {
            "interactive": capacity if interactive_capacity is None else interactive_capacity,
            "batch": capacity,
        }
        due = self._pop_due(capacities)
        if max(capacities.values()) <= 0 and not is_idle:
            return due
        num_due = Counter(delivery.priority_class for delivery in due)
        fresh = {
            priority_class: self._fresh_capacity(priority_class, number, num_due[priority_class])
            for priority_class, number in capacities.items()
        }
        fresh["batch"] = fresh["batch"] - 1 if fresh["batch"] > 1 else fresh["batch"] * is_idle
        timeout_s = self._seconds_to_next(wait_s) if is_idle and not due else 0.0
        return due + self._member.poll(timeout_s, fresh)

    def _fresh_capacity(self, priority_class: PriorityClass, capacity: int, num_due: int) -> int:
        """Return how many new deliveries to poll: at least one if there is capacity, as some deferred ones are always
        due.
        """
        return 0 if self._num_deferred[priority_class] >= MAX_DEFERRED else max(min(1, capacity), capacity - num_due)

    def _pop_due(self, capacities: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return due deliveries as far as there is capacity; without it, one postponed delivery of each class.

        A postponed delivery is claimed beyond the capacity if its request is not over, so there is only one a turn.
        """
        ready: list[Delivery] = []
        left, now_s = dict(capacities), time.monotonic()
        postponed: list[_Deferred] = []
        while self._deferred and self._deferred[0].due_s <= now_s:
            one = heapq.heappop(self._deferred)
            priority_class = one.delivery.priority_class
            if left[priority_class] > 0 or (one.is_postponed and left[priority_class] == 0):
                left[priority_class] -= 1
                self._num_deferred[priority_class] -= 1
                ready.append(one.delivery)
            elif one.is_postponed:
                postponed.append(one)
            else:
                self._num_deferred[priority_class] -= 1
                self._push_deferred(one.delivery, POSTPONE_S, is_postponed=True)
        for one in postponed:
            heapq.heappush(self._deferred, one)
        return ready

    def _push_deferred(self, delivery: Delivery, wait_s: float, *, is_postponed: bool = False) -> None:
        self._num_pushed += 1
        self._num_deferred[delivery.priority_class] += 1
        heapq.heappush(self._deferred, _Deferred(time.monotonic() + wait_s, self._num_pushed, delivery, is_postponed))

    def _seconds_to_next(self, most_s: float) -> float:
        if not self._deferred:
            return most_s
        return max(0.0, min(most_s, self._deferred[0].due_s - time.monotonic()))


def serialize_delivery(delivery: Delivery, tenant: str, request_id: str) -> bytes:
    """Encode a delivery for a claim in Redis, so that others can go on without it: a line of JSON, then the message.

    A message that came in clear is sealed if its tenant has a key; return nothing where that is not here.
    """
    about = {
        "topic": delivery.topic,
        "position": delivery.position,
        "key": delivery.key,
        "headers": dict(delivery.headers),
        "class": delivery.priority_class,
        "at": delivery.timestamp_s,
    }
    encoded = json.dumps(about).encode() + b"\n" + delivery.value
    if is_sealed(delivery.value):
        return encoded
    try:
        return seal_message("delivery", tenant, request_id, encoded)
    except (ContentErased, TenantKeyMissing):
        return b""


def deserialize_delivery(encoded: bytes) -> Delivery:
    """Decode a delivery from a claim. It is not held, so it cannot be settled.

    Raises `ContentErased` and `TenantKeyMissing`.
    """
    if is_sealed(encoded):
        encoded = open_message(read_envelope(encoded), "delivery")
    line, value = encoded.split(b"\n", 1)
    about = json.loads(line)
    return Delivery(
        about["topic"],
        about["position"],
        value,
        about["key"],
        about["headers"],
        about["class"],
        about["at"],
        is_held=False,
    )
