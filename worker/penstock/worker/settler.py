"""Settling in the background, so that no step waits for a commit."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from penstock.bus.contract import Delivery, Member, Outgoing, Settlement
from penstock.bus.dead_letters import build_dead_letter, shorten_dead_letter
from penstock.bus.replies import ReplyRouter, pick_reply_headers
from penstock.errors import BusUnavailable, DeliveryLost, InternalError, ReplyRefused, RequestTooLarge
from penstock.failpoints import failpoint
from penstock.messages import ErrorInfo, Job, Result, decode_clear_part
from penstock.names import (
    CLASS_HEADER,
    KEY_HEADER,
    OPERATION_HEADER,
    TENANT_HEADER,
    VERSION_HEADER,
    Pipeline,
    PriorityClass,
)
from penstock.redis.client import backoff_pauses, is_outage
from penstock.threads import CheckedThread
from penstock.worker.task import Task

log = logging.getLogger(__name__)

MAX_RETRY_S = 60.0
"""How long a settlement is retried. Then the member is given up, as it may be at fault itself."""
MAX_RETRY_ALONE_S = 20.0
"""How long a settlement is retried while the bus answers the member otherwise: then the member is at fault. The brokers
of a cluster need less to replace one of them that does not answer.
"""
SLOW_CALL_S, HUNG_CALL_S = 10.0, 45.0
"""A settlement call that takes longer is reported as trouble (`SLOW_CALL_S`), or counts as never returning
(`HUNG_CALL_S`). A member's own time limits are shorter. All of these are longer where the bus is slow to answer.
"""
CLOSE_TIMEOUT_S = 5.0
"""How long a worker that leaves waits for its settlements. Other workers settle the rest from the log."""
ABANDON_TIMEOUT_S = 1.0
"""How long the thread is waited for when its settlements are not needed any more."""


@dataclass(frozen=True)
class Settling:
    """A settlement under way."""

    settlement: Settlement
    task: Task | None = None
    """The request; None where it was never claimed here."""
    again: Callable[[], Settlement] | None = None
    """Makes the settlement anew, on the settler's thread."""
    num_dead_letters: int = 0
    """How many dead letters the settlement had when the loop asked for it."""
    is_doubtful: bool = False
    """Whether a transaction failed that had its reply alone, and the client did not say why."""
    refused: str = ""
    """Why its result does not go to the topic in which its requester wants it."""
    name: object = field(default_factory=object)
    """It stays when the settlement is made anew."""

    @property
    def address(self) -> object:
        """The delivery's topic and position, or the name where no delivery is settled."""
        delivery = self.settlement.delivery
        return delivery.address if delivery.is_held else self.name


class Settler:
    """Settles in the background, everything that is ready in one call, so that no engine step waits for a commit.

    The loop collects each outcome: True once the settlement is durable, False when the bus gave the delivery to another
    member, which will settle it. While the bus is away settlements are retried, and the loop goes on with what runs.
    Any other failure ends the worker: `raise_failure()` raises it in the loop. It also does so when a call of the bus
    does not return: the worker is made anew, and the call is left to itself.
    """

    def __init__(self, member: Member, pipeline: Pipeline, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called on the settler's thread when there is an outcome to collect."""
        self._member, self._pipeline, self._wake = member, pipeline, wake
        self._replies = ReplyRouter(pipeline, member)
        self._trouble = ""
        self._called_s: float | None = None
        """When the settlement call under way began; None while there is none."""
        self._is_over = threading.Event()
        self._pending: queue.SimpleQueue[Settling | None] = queue.SimpleQueue()
        self._open: Counter[object] = Counter()
        self._outcomes: list[tuple[Settling, bool]] = []
        self._lock = threading.Condition()
        self._has_ended = False
        self._thread = CheckedThread("settler", self._run)

    def __len__(self) -> int:
        """Return how many settlements are under way or not collected."""
        with self._lock:
            return self._open.total() + len(self._outcomes)

    def is_settling(self, delivery: Delivery) -> bool:
        """Return whether the message is being settled, with this delivery or with one that was lost before."""
        with self._lock:
            return self._open[delivery.address] > 0

    def settle(
        self,
        settlement: Settlement,
        task: Task | None = None,
        again: Callable[[], Settlement] | None = None,
        after: "Future[float] | None" = None,
    ) -> None:
        """Settle soon, or as soon as `after` is done. `task` is the request, if it was claimed here.

        `again` makes the settlement anew, on the settler's thread, where it is not known whether its outputs are
        published: a job must not be published twice under one name, as both would settle the result.
        """
        num_dead_letters = sum(one.topic == self._pipeline.dead_letter_topic for one in settlement.outputs)
        pending = Settling(settlement, task, again, num_dead_letters)
        with self._lock:
            self._open[pending.address] += 1
        if after is None:
            self._pending.put(pending)
        else:
            after.add_done_callback(lambda _: self._enqueue_awaited(pending))

    def _enqueue_awaited(self, pending: Settling) -> None:
        failpoint("prefill.4.written")
        self._pending.put(pending)

    def collect(self) -> list[tuple[Settling, bool]]:
        """Return what has ended since the last call, with True if it is settled, and False if another member will."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def raise_failure(self) -> None:
        """Raise the error that made settling impossible, if there was one."""
        self._thread.raise_failure()
        if (called_s := self._seconds_in_call()) > HUNG_CALL_S * self._member.slowness:
            raise BusUnavailable(f"the bus is at one settlement for {called_s:.0f} s")

    @property
    def trouble(self) -> str:
        """Why the last attempt failed, while it is retried, or that it takes long; else empty."""
        called_s = self._seconds_in_call()
        is_slow = called_s > SLOW_CALL_S * self._member.slowness
        return f"settling takes {called_s:.0f} s so far" if is_slow else self._trouble

    def _seconds_in_call(self) -> float:
        called_s = self._called_s
        return 0.0 if called_s is None else time.monotonic() - called_s

    def wait_settled(self, timeout_s: float) -> None:
        """Wait until everything is settled or cannot be settled now, for at most `timeout_s`."""
        with self._lock:
            self._lock.wait_for(lambda: not self._open or bool(self.trouble) or self._has_ended, timeout_s)

    def close(self) -> None:
        """Settle what is pending as far as that is possible now, and end the thread."""
        self.wait_settled(ABANDON_TIMEOUT_S if self._member.current_problem else CLOSE_TIMEOUT_S)
        self.abandon()

    def abandon(self) -> None:
        """Settle nothing more. A call that the bus does not answer is left to itself."""
        self._is_over.set()
        self._pending.put(None)
        self._thread.join(ABANDON_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (first := self._pending.get()) is not None:
                batch, more = [first], True
                while more and not self._pending.empty():
                    following = self._pending.get()
                    if following is None:
                        more = False
                    else:
                        batch.append(following)
                self._settle_batch(batch)
                if not more:
                    return
        finally:
            with self._lock:
                self._has_ended = True
                self._lock.notify_all()

    def _settle_batch(self, batch: list[Settling]) -> None:
        """Settle a batch. A delivery that is there twice is settled once; one that came again is another delivery."""
        once, again = dict[int, Settling](), list[Settling]()
        for pending in batch:
            delivery = pending.settlement.delivery
            if once.setdefault(id(delivery) if delivery.is_held else id(pending), pending) is not pending:
                again.append(pending)
        self._settle_all(list(once.values()))
        self._record_outcomes(again, settled=False)

    def _settle_all(self, batch: list[Settling]) -> None:
        waits, begun_s, troubled_s = backoff_pauses(), time.monotonic(), 0.0
        while batch and not self._is_over.is_set():
            try:
                failpoint("settle.begun")
                self._settle_on_bus(batch)
            except DeliveryLost as error:
                lost = {id(delivery) for delivery in error.deliveries}  # one that came again has the same address
                gone = [pending for pending in batch if id(pending.settlement.delivery) in lost]
                assert gone, "lost deliveries are of those that were to be settled"
                self._set_trouble("")
                self._record_outcomes(gone, settled=False)
                batch = [pending for pending in batch if id(pending.settlement.delivery) not in lost]
            except (ReplyRefused, RequestTooLarge) as error:  # nothing was done
                parts = self._part_refused(batch, error)
                if len(parts) > 1:
                    for part in parts:
                        self._settle_all(part)
                    return
                batch = parts[0]
            except BusUnavailable as error:
                now_s = time.monotonic()
                if (
                    self._member.current_problem or not troubled_s
                ):  # a first failure may have taken longer than `MAX_RETRY_ALONE_S`
                    troubled_s = now_s
                slowness = self._member.slowness
                end_s = min(begun_s + MAX_RETRY_S * slowness, troubled_s + MAX_RETRY_ALONE_S * slowness)
                if not is_outage(error) or now_s > end_s:
                    raise
                batch = [_make_anew(pending) for pending in batch]
                log.warning("settling failed, trying again: %s", error)
                self._set_trouble(str(error))
                self._is_over.wait(next(waits))
            else:
                failpoint("settle.done")
                self._set_trouble("")
                self._record_outcomes(batch, settled=True)
                return

    def _part_refused(self, batch: list[Settling], error: ReplyRefused | RequestTooLarge) -> list[list[Settling]]:
        """Return a batch of which the bus refused a message as one that it takes, or in parts that show which it was.

        A result whose reply was refused goes among all results. Any other message that is too large becomes smaller.
        """
        if isinstance(error, ReplyRefused):
            log.warning("replies are refused: %s", error)
            self._replies.note_refused(error)
            why = [error.reasons.get(self._replies.find_topic(one.settlement), "") for one in batch]
            suspects = [one for one, reason in zip(batch, why, strict=True) if reason and not one.refused]
            assert suspects, "refused replies are of those that were to be settled"
            if error.is_sure or (len(suspects) == 1 and suspects[0].is_doubtful):
                return [[replace(one, refused=one.refused or why[at]) for at, one in enumerate(batch)]]
            names = {one.name for one in suspects}
            others = [one for one in batch if one.name not in names]
            return [others, *([replace(one, is_doubtful=len(suspects) == 1)] for one in suspects)]
        if len(batch) > 1:
            return [[_make_anew(pending)] for pending in batch]
        log.error("%s cannot be settled: %s", batch[0].settlement.delivery.position, error)
        smaller = replace_oversized(self._pipeline, batch[0].settlement, error)
        return [[replace(batch[0], settlement=smaller, again=None)]]

    def _settle_on_bus(self, batch: list[Settling]) -> None:
        self._called_s = time.monotonic()
        try:
            settlements = [pending.settlement for pending in batch]
            self._member.settle(self._replies.route_results(settlements, [pending.refused for pending in batch]))
        finally:
            self._called_s = None

    def _set_trouble(self, trouble: str) -> None:
        with self._lock:
            self._trouble = trouble
            self._lock.notify_all()

    def _record_outcomes(self, settlements: list[Settling], *, settled: bool) -> None:
        with self._lock:
            self._outcomes += [(pending, settled) for pending in settlements]
            self._open -= Counter(pending.address for pending in settlements)
            self._lock.notify_all()
        self._wake()


def _make_anew(pending: Settling) -> Settling:
    return replace(pending, settlement=pending.again()) if pending.again else pending


def replace_oversized(pipeline: Pipeline, settlement: Settlement, why: RequestTooLarge) -> Settlement:
    """Return a settlement with less in its largest output, which is taken to be the one that its topic did not take.

    A result or a job becomes one with an error alone, and a dead letter says so. A dead letter becomes half as long.
    Raise `BusUnavailable` where that makes it no smaller.
    """
    largest = max(settlement.outputs, key=lambda output: output.num_bytes)
    cause = InternalError(f"{largest.num_bytes:,} bytes are too many for {largest.topic}: {why}")
    if largest.topic == pipeline.dead_letter_topic:
        smaller = shorten_dead_letter(largest)
    else:
        smaller = _make_error_output(pipeline, largest, settlement.delivery.priority_class, cause)
    if smaller.num_bytes >= largest.num_bytes:
        raise BusUnavailable(str(cause))
    outputs = [smaller if output is largest else output for output in settlement.outputs]
    if all(output.topic != pipeline.dead_letter_topic for output in outputs):
        outputs.append(build_dead_letter(pipeline, settlement.delivery, f"{cause.code}: {cause}"))
    return replace(settlement, outputs=outputs)


def _make_error_output(
    pipeline: Pipeline, output: Outgoing, priority_class: PriorityClass, cause: InternalError
) -> Outgoing:
    """Return a result, or a job under its name, with an error in place of its content."""
    kept = (VERSION_HEADER, TENANT_HEADER, KEY_HEADER, CLASS_HEADER, OPERATION_HEADER)
    headers = {name: output.headers[name] for name in kept if name in output.headers}
    headers |= pick_reply_headers(output.headers)
    tenant, error = headers.get(TENANT_HEADER, "default"), ErrorInfo.from_error(cause)
    message: Result | Job
    if output.topic == pipeline.results_topic:
        assert output.key is not None, "a result's key is its id"
        error = ErrorInfo(code=cause.code, message=f"{cause}; the text is in the token stream")
        message = Result(
            id=output.key, tenant=tenant, priority_class=priority_class, finish_reason="error", error=error
        )
    else:
        told = decode_clear_part(Job, output.value)
        message = Job(
            id=told.id, job=told.job, tenant=tenant, priority_class=priority_class, timings=told.timings, error=error
        )
    return Outgoing(output.topic, message.encode(), output.key, headers)
