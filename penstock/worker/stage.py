"""What both stages' workers do alike: take in, take over, hear of what happened to their claims, and leave.

A stage adds what a request means there: its loop, its room for more, and what becomes of a claim.
"""

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, Protocol, TypeVar

import redis
from opentelemetry.context import Context

from penstock import tracing
from penstock.bus.contract import Delivery, Member, Settlement
from penstock.bus.letters import dead_message
from penstock.names import CLASSES, Pipeline, PriorityClass, Stage
from penstock.record import Claim, News, Record, Sessions, Waiting
from penstock.telemetry.meters import Meters
from penstock.telemetry.stage import StageFigures
from penstock.worker.failures import Failures, cause_of
from penstock.worker.inbox import Inbox
from penstock.worker.load import Load
from penstock.worker.parcel import unpack
from penstock.worker.rescue import Rescue
from penstock.worker.settler import Settler

log = logging.getLogger(__name__)

MOMENT_S = 0.05
"""A delivery that is being settled is looked at again so soon."""


class Task(Protocol):
    """A request that a worker holds."""

    @property
    def claim(self) -> Claim:
        """What it is held with."""

    @property
    def delivery(self) -> Delivery:
        """What it came with; not held where it was taken over."""

    def detach(self) -> None:
        """Go on without the delivery: another member has it."""


class Transfers(Protocol):
    """Blocks on their way to and from the store."""

    def __len__(self) -> int: ...

    def close(self) -> None:
        """Finish what can be finished."""

    def abandon(self) -> None:
        """Let go of everything."""


T = TypeVar("T", bound=Task)


class StageWorker(ABC, Generic[T]):
    """A worker's place in the group, its claims, and what waits."""

    stage: ClassVar[Stage]
    transfers: Transfers

    def __init__(
        self,
        pipeline: Pipeline,
        name: str,
        record: Record,
        member: Member,
        waiting_of: Callable[[Delivery], Waiting | None],
        figures: StageFigures | None = None,
    ) -> None:
        self.pipeline, self.name, self.record, self.member = pipeline, name, record, member
        self.figures = figures or StageFigures(Meters(is_on=False), pipeline.name, self.stage, name, "")
        reader = member.orphan_reader()
        self.session = Sessions(record, self.stage, name, member.parts, adopts=reader is not None)
        self.settler, self.inbox, self.load = Settler(member, pipeline), Inbox(member), Load()
        self.rescue = Rescue(record, self.stage, self.session, member, reader, waiting_of)
        self.failures = Failures(record, self.inbox, self.figures.retried)
        self.running: dict[str, T] = {}
        """All that is claimed and not settled, by request."""

    # What a stage adds.

    @abstractmethod
    def _room(self, klass: PriorityClass) -> int:
        """How many more requests of a class to take."""

    @abstractmethod
    def _taken(self, delivery: Delivery, claim: Claim) -> None:
        """Go on with what was free."""

    @abstractmethod
    def _cancelled(self, task: T) -> None:
        """Somebody asked for its end."""

    @abstractmethod
    def _forget(self, task: T) -> None:
        """Let go of it, with all that it has in the engine."""

    # Taking in.

    def _poll(self) -> list[Delivery]:
        rooms = self.load.rooms = {klass: self._room(klass) for klass in CLASSES}
        return self.inbox.poll(rooms["batch"], rooms["interactive"], idle=self._is_idle())

    def _is_idle(self) -> bool:
        """Whether it has nothing to do but wait for deliveries."""
        return not self.running

    def _is_mine(self, delivery: Delivery) -> bool:
        """Whether to claim with it. If not, another has it now, or it came a second time and is being settled."""
        if self.settler.is_settling(delivery):
            self.inbox.put_back(delivery, MOMENT_S)
            return False
        return self.member.holds(delivery)

    def _bury(self, delivery: Delivery, reason: str) -> None:
        """To the dead letters; a delivery that was lost meanwhile is buried by who has it now."""
        letter = dead_message(self.pipeline, delivery, reason)
        self.settler.settle(Settlement(delivery, [letter]), lambda settled: self.figures.buried(int(settled)))

    def _take_over(self, *, accept: bool) -> None:
        """Go on with what nobody holds. Others have the deliveries, or get them later."""
        room = max(self.load.rooms.values()) if accept and self.session.num_free else 0
        if room <= 0:
            return
        taken = self.record.take(self.stage, self.session.id, room)
        self.session.num_free = self.session.num_free - room if len(taken) == room else 0
        for one in taken:
            self.figures.took_over()
            try:
                self._taken(unpack(one.message), one.claim)
            except Exception as error:  # a message that cannot be read, or a bug: this request's
                self._hand_on(one.claim, error)

    def _hand_on(self, claim: Claim, error: Exception) -> None:
        """Leave a request to whoever takes it later, or gets its delivery. Raises what is not about this one."""
        cause_of(error)
        log.error("request %s cannot be gone on with", claim.id, exc_info=error)
        if (task := self._of(claim)) is not None:
            self._forget(task)
        self.record.release(claim, failed=True, delivered=False, wait_s=self.record.settings.retry_cap_s)

    def _note_wait(self, delivery: Delivery, context: Context, begun_s: float) -> None:
        """Work on a message begins. What was taken over has no wait of its own: another worker had it meanwhile."""
        if delivery.is_held:
            self.figures.began(delivery.klass, delivery.timestamp_s, begun_s)
        name = "queue.wait" if delivery.is_held else "taken_over"
        tracing.note(name, context, delivery.timestamp_s, begun_s, topic=delivery.topic)

    # Hearing.

    def _of(self, claim: Claim) -> T | None:
        """What is held with a claim, if that still counts."""
        task = self.running.get(claim.id)
        return task if task is not None and task.claim is claim else None

    def _hear(self) -> None:
        """Let go of what others hold, and end what is to end."""
        self.rescue.check()
        for claim, news in self.session.news():
            task = self._of(claim)
            if task is None:
                continue
            if news is News.LOST:
                self._lose(task)
            else:
                self._cancelled(task)

    def _lose(self, task: T) -> None:
        """Let go of a request that another worker holds now, or may."""
        self._forget(task)
        self._give_back(task.claim, task.delivery)

    def _give_back(self, claim: Claim, delivery: Delivery) -> None:
        """Look again at a request whose claim was refused. Who lets go says so: where it is this worker's after all,
        its session lives on, and nobody else would ever take it.
        """
        self.record.release(claim, delivered=delivery.is_held)
        self.inbox.put_back(delivery)

    # Leaving.

    def retire(self) -> None:
        """Take nothing more. What runs goes on under its claim; who has its delivery then settles it, from its log."""
        self.settler.wait(MOMENT_S)
        self.rescue.close()
        # Else others read what was read here, until the bus has given it away.
        with contextlib.suppress(redis.RedisError):
            self.session.disown()
        self.member.retire()
        for task in self.running.values():
            if not self.member.holds(task.delivery):
                task.detach()

    def is_settled(self) -> bool:
        """Whether nothing waits, for another worker or for a commit."""
        return not len(self.inbox) and not len(self.settler) and not len(self.transfers)

    def close(self) -> None:
        """Hand back what is not finished, and leave the group. Engine and store stay."""
        for task in list(self.running.values()):
            self._forget(task)
            self.record.release(task.claim, delivered=task.delivery.is_held)
        self.transfers.close()
        self.settler.close()
        self.rescue.close()
        self.session.close()
        self.record.close()
        self.member.close()

    def abandon(self) -> None:
        """Let go of everything, as a crash would: see `penstock.worker.outage`. Engine and store stay."""
        with contextlib.suppress(redis.RedisError):  # where Redis is not away, the attempts need not count
            for task in self.running.values():
                self.record.release(task.claim, delivered=task.delivery.is_held)
        for task in list(self.running.values()):
            self._forget(task)
        self.settler.abandon()
        self.transfers.abandon()
        self.rescue.close()
        self.session.close()
        self.record.close()
        self.member.close()
