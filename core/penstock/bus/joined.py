"""A member of both stages' groups, for a worker that serves both."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

from penstock.bus.contract import Delivery, Member, OrphanReader, Outgoing, Settlement, check_size
from penstock.names import CLASSES, Pipeline, PriorityClass, WorkerKind, find_shared_topic
from penstock.redis.scripts import ScriptCall

M = TypeVar("M", bound=Member)


class EventBell:
    """Wakes a thread that waits for a message of either group, where members tell on threads of their own what has
    come.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self.ring = self._event.set

    def arm(self) -> None:
        """Ring from now on."""
        self._event.clear()

    def wait(self, timeout_s: float) -> None:
        """Wait until something has come since the bell was armed, no longer than `timeout_s`."""
        self._event.wait(timeout_s)


class JoinedMember:
    """Implements `contract.Member` over a member of the requests' group and one of the jobs' group.

    Each of the two settles what it has delivered. Jobs come first, as their requests were begun.
    """

    def __init__(self, pipeline: Pipeline, requests: Member, jobs: Member, bell: EventBell | None = None) -> None:
        """`bell` rings when a member has fetched something; `poll` waits for it."""
        self._requests, self._jobs, self._bell = requests, jobs, bell or EventBell()
        self._job_topics = frozenset(pipeline.input_topics("decode").values())
        self._taken: list[Delivery] = []
        """Deliveries that one member gave out in a poll before the other one's poll failed."""
        self._done: dict[object, Settlement] = {}
        """Settlements that one member made in calls that failed at the other one."""

    @property
    def reply_prefixes(self) -> Mapping[str, Sequence[str]]:
        """By tenant, the beginnings of names that its reply topics may have."""
        return self._requests.reply_prefixes

    @property
    def current_problem(self) -> str:
        """Why one of the members cannot work now; see `contract.Member.current_problem`."""
        return self._requests.current_problem or self._jobs.current_problem

    @property
    def slowness(self) -> int:
        """By how many times longer than usual settlements may take; see `contract.Member.slowness`."""
        return max(self._requests.slowness, self._jobs.slowness)

    def poll(self, timeout_s: float, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return deliveries of the classes with capacity, interactive first; see `contract.Member.poll`."""
        end = time.monotonic() + timeout_s
        found = self._take_available(capacity)
        while not found and time.monotonic() < end:
            self._bell.arm()
            found = self._take_available(capacity)
            if not found:
                self._bell.wait(max(0.0, end - time.monotonic()))
                found = self._take_available(capacity)
        return found

    def _take_available(self, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return what can be had without waiting: of each class the jobs, then requests for the capacity that is left.

        Where the second member raises, the next call returns what the first one gave.
        """
        for member in (self._jobs, self._requests):
            self._taken += member.poll(0.0, self._count_left(capacity))
        found, self._taken = self._taken, []
        self.forget_settled(found)
        return sorted(found, key=lambda delivery: CLASSES.index(delivery.priority_class))

    def forget_settled(self, found: Iterable[Delivery]) -> None:
        """Forget of deliveries that are given out again that they were settled."""
        for delivery in found:
            self._done.pop(delivery.address, None)

    def _count_left(self, capacity: Mapping[PriorityClass, int]) -> dict[PriorityClass, int]:
        return {
            priority_class: max(
                0, capacity.get(priority_class, 0) - sum(one.priority_class == priority_class for one in self._taken)
            )
            for priority_class in CLASSES
        }

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Let each member settle what it delivered; see `contract.Member.settle`.

        The requests' member publishes outputs of deliveries that no member has made. Where the second member raises,
        this object remembers what the first one settled. It leaves that out when the caller settles the rest again.
        """
        check_size(output for settlement in settlements for output in settlement.outputs)
        for member in (self._requests, self._jobs):
            part = [
                one for one in settlements if self._find_member(one.delivery) is member and _name(one) not in self._done
            ]
            if part:
                member.settle(part)
                self._done |= {_name(one): one for one in part}
        for one in settlements:
            self._done.pop(_name(one), None)

    def find_reply_refusals(self, replies: Sequence[Outgoing]) -> list[str]:
        """Return why topics would not take replies; see `contract.Member.find_reply_refusals`."""
        return self._requests.find_reply_refusals(replies)

    def _find_member(self, delivery: Delivery) -> Member:
        is_job = find_shared_topic(delivery.topic) in self._job_topics
        return self._jobs if delivery.is_held and is_job else self._requests

    def count_held(self) -> int:
        """Return how many deliveries both members hold unsettled."""
        return self._requests.count_held() + self._jobs.count_held()

    def is_holding(self, delivery: Delivery) -> bool:
        """Return whether a delivery is still its member's; see `contract.Member.is_holding`."""
        return self._find_member(delivery).is_holding(delivery)

    def list_prefetched(self) -> list[Delivery]:
        """Return the deliveries that are fetched and not handed out yet, interactive first."""
        fetched = [*self._jobs.list_prefetched(), *self._requests.list_prefetched()]
        return sorted(fetched, key=lambda delivery: CLASSES.index(delivery.priority_class))

    def list_partitions(self) -> list[str]:
        """Return the partitions of both interactive topics that this member alone reads."""
        return [*self._requests.list_partitions(), *self._jobs.list_partitions()]

    def count_waiting(self) -> Mapping[tuple[str, int], int]:
        """Return what waits in the partitions of both topics; see `contract.Member.count_waiting`."""
        return {**self._requests.count_waiting(), **self._jobs.count_waiting()}

    def create_orphan_readers(self) -> list[OrphanReader]:
        """Return the readers for partitions of dead members of both groups; none where members share the topics."""
        return [*self._jobs.create_orphan_readers(), *self._requests.create_orphan_readers()]

    def build_renewal(self, session_s: float) -> list[ScriptCall]:
        """Return the calls that say on Redis that both members live; see `contract.Member.build_renewal`."""
        return [*self._requests.build_renewal(session_s), *self._jobs.build_renewal(session_s)]

    def stop_consuming(self) -> None:
        """Stop reading in both groups; see `contract.Member.stop_consuming`."""
        self._requests.stop_consuming()
        self._jobs.stop_consuming()

    def close(self) -> None:
        """Leave both groups: unsettled deliveries go to other members at once."""
        with contextlib.closing(self._jobs):
            self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def join_both(join_group: Callable[[WorkerKind], M]) -> tuple[M, M]:
    """Join the groups of requests and of jobs, and return the member of each. Raise what `join_group` raises."""
    requests = join_group("auto")
    try:
        return requests, join_group("decode")
    except BaseException:
        requests.close()
        raise


def _name(settlement: Settlement) -> object:
    """Return what names a settlement when it is made again: its delivery, or itself where none is held."""
    return settlement.delivery.address if settlement.delivery.is_held else id(settlement)
