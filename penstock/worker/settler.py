"""Settling in the background, so that no step waits for a commit."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Member, Outgoing, Settlement
from penstock.bus.letters import dead_message
from penstock.errors import BusUnavailable, DeliveryLost, InternalError, RequestTooLarge
from penstock.failpoints import failpoint
from penstock.messages import ErrorInfo, Result
from penstock.names import CLASS_HEADER, TENANT_HEADER, VERSION_HEADER, Pipeline
from penstock.redis.client import backoff_pauses, is_away

log = logging.getLogger(__name__)

MAX_RETRY_S = 60.0
"""A member that could not settle for this long is done with: it may be at fault itself."""
MAX_RETRY_ALONE_S = 5.0
"""The same when the bus answers it, from its first failure on: then it is at fault."""
SLOW_CALL_S, HUNG_CALL_S = 10.0, 45.0
"""A call of the bus that takes so long is told of; and does not return any more: libraries have their bugs. What a
member allows each of its own steps is less."""
CLOSE_TIMEOUT_S = 5.0
"""How long a worker that leaves waits for its settlements; what is not settled then, others settle from the log."""
ABANDON_TIMEOUT_S = 1.0
"""How long a settlement under way is waited for when nothing more is wanted of it."""


@dataclass(frozen=True)
class _PendingSettlement:
    settlement: Settlement
    ticket: Any
    again: Callable[[], Settlement] | None

    @property
    def place(self) -> tuple[str, str] | int:
        """What it settles; one that settles nothing has a place of its own."""
        delivery = self.settlement.delivery
        return _offset_of(delivery) if delivery.is_held else id(self)


def _offset_of(delivery: Delivery) -> tuple[str, str]:
    return delivery.topic, delivery.position


class Settler:
    """Settles in the background, everything that is ready in one go, so that no step waits for a commit.

    The loop collects what became of each: True once it is durable, False when the bus gave the delivery to another
    member (it will settle it). While the bus is away it is tried again and again: the loop goes on with what runs. Any
    other failure ends the worker: `check()` raises it in the loop. So it does where a call of the bus does not return:
    the worker is made anew, and the call is left to itself.
    """

    def __init__(self, member: Member, pipeline: Pipeline, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called on the thread when there is something to collect."""
        self._member, self._pipeline, self._wake = member, pipeline, wake
        self._trouble = ""
        self._called_s: float | None = None
        """Since when the bus is at the settlement under way."""
        self._is_over = threading.Event()
        self._orders: queue.SimpleQueue[_PendingSettlement | None] = queue.SimpleQueue()
        self._open: Counter[tuple[str, str] | int] = Counter()
        self._outcomes: list[tuple[Any, bool]] = []
        self._lock = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Settlements on their way, or not collected."""
        with self._lock:
            return self._open.total() + len(self._outcomes)

    def is_settling(self, delivery: Delivery) -> bool:
        """Whether it is to be settled already: it came a second time, and is looked at again when that is over."""
        with self._lock:
            return self._open[_offset_of(delivery)] > 0

    def settle(
        self,
        settlement: Settlement,
        ticket: Any = None,
        again: Callable[[], Settlement] | None = None,
        after: "Future[float] | None" = None,
    ) -> None:
        """Settle soon, or as soon as `after` is done. `collect` gives the ticket back with what became of it.

        `again` makes the settlement anew, on the thread, for when it is not known whether its outputs are out: a job
        must not go out twice under one name, as both would settle the result.
        """
        order = _PendingSettlement(settlement, ticket, again)
        with self._lock:
            self._open[order.place] += 1
        if after is None:
            self._orders.put(order)
        else:
            after.add_done_callback(lambda _: self._enqueue_awaited(order))

    def _enqueue_awaited(self, order: _PendingSettlement) -> None:
        failpoint("prefill.4.written")
        self._orders.put(order)

    def collect(self) -> list[tuple[Any, bool]]:
        """The tickets of what is settled (True), or is others' to settle (False), since the last call."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def raise_failure(self) -> None:
        """Raise what made settling impossible, if anything did."""
        if self._failure is not None:
            raise self._failure
        if (called_s := self._seconds_in_call()) > HUNG_CALL_S:
            raise BusUnavailable(f"the bus is at one settlement for {called_s:.0f} s")

    @property
    def trouble(self) -> str:
        """Why the last attempt failed, while it is made again, or that it takes long; else empty."""
        called_s = self._seconds_in_call()
        return f"settling takes {called_s:.0f} s so far" if called_s > SLOW_CALL_S else self._trouble

    def _seconds_in_call(self) -> float:
        called_s = self._called_s
        return 0.0 if called_s is None else time.monotonic() - called_s

    def wait_settled(self, timeout_s: float) -> None:
        """Until everything is settled, it cannot be now, or the time is over."""
        with self._lock:
            self._lock.wait_for(lambda: not self._open or bool(self.trouble) or self._failure is not None, timeout_s)

    def close(self) -> None:
        """Settle what was asked for, as far as that is possible now, and end the thread."""
        self.wait_settled(ABANDON_TIMEOUT_S if self._member.trouble else CLOSE_TIMEOUT_S)
        self.abandon()

    def abandon(self) -> None:
        """Settle nothing more. What the bus does not answer ends by itself, later."""
        self._is_over.set()
        self._orders.put(None)
        self._thread.join(ABANDON_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while (first := self._orders.get()) is not None:
                batch, more = [first], True
                while more and not self._orders.empty():
                    following = self._orders.get()
                    if following is None:
                        more = False
                    else:
                        batch.append(following)
                self._settle_batch(batch)
                if not more:
                    return
        except BaseException as error:  # handed to the loop by check()
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _settle_batch(self, batch: list[_PendingSettlement]) -> None:
        """A delivery that came a second time while its first settlement was on its way is settled once."""
        unique = {order.place: order for order in reversed(batch)}
        self._settle_all([order for order in batch if unique[order.place] is order])
        self._finish_orders([order for order in batch if unique[order.place] is not order], settled=False)

    def _settle_all(self, batch: list[_PendingSettlement]) -> None:
        waits, begun_s, troubled_s = backoff_pauses(), time.monotonic(), 0.0
        while batch and not self._is_over.is_set():
            try:
                failpoint("settle.begun")
                self._settle_on_bus([order.settlement for order in batch])
            except DeliveryLost as error:
                lost = {_offset_of(delivery) for delivery in error.deliveries}
                rest = [order for order in batch if order.place not in lost]
                assert len(rest) < len(batch), "lost deliveries are of those that were to be settled"
                self._set_trouble("")
                self._finish_orders([order for order in batch if order.place in lost], settled=False)
                batch = rest
            except RequestTooLarge as error:  # nothing was done: whose it is shows when each is settled alone
                if len(batch) == 1:
                    log.error("%s cannot be settled: %s", batch[0].settlement.delivery.position, error)
                    batch = [
                        replace(
                            batch[0],
                            settlement=replace_oversized(self._pipeline, batch[0].settlement, error),
                            again=None,
                        )
                    ]
                else:
                    for order in batch:
                        self._settle_all([order])
                    return
            except BusUnavailable as error:
                now_s = time.monotonic()
                if self._member.trouble or not troubled_s:  # a first failure may have taken longer than `ALONE_S`
                    troubled_s = now_s
                if not is_away(error) or now_s > min(begun_s + MAX_RETRY_S, troubled_s + MAX_RETRY_ALONE_S):
                    raise
                batch = [replace(order, settlement=order.again()) if order.again else order for order in batch]
                log.warning("settling failed, trying again: %s", error)
                self._set_trouble(str(error))
                self._is_over.wait(next(waits))
            else:
                failpoint("settle.done")
                self._set_trouble("")
                self._finish_orders(batch, settled=True)
                return

    def _settle_on_bus(self, settlements: list[Settlement]) -> None:
        self._called_s = time.monotonic()
        try:
            self._member.settle(settlements)
        finally:
            self._called_s = None

    def _set_trouble(self, trouble: str) -> None:
        with self._lock:
            self._trouble = trouble
            self._lock.notify_all()

    def _finish_orders(self, orders: list[_PendingSettlement], *, settled: bool) -> None:
        with self._lock:
            self._outcomes += [(order.ticket, settled) for order in orders]
            self._open -= Counter(order.place for order in orders)
            self._lock.notify_all()
        self._wake()


def replace_oversized(pipeline: Pipeline, settlement: Settlement, why: RequestTooLarge) -> Settlement:
    """A settlement that every topic takes. A result that none takes is an error instead; a dead letter tells of it."""
    outputs: list[Outgoing] = []
    cause = InternalError(str(why))
    for output in settlement.outputs:
        if output.num_bytes <= MAX_MESSAGE_BYTES:
            outputs.append(output)
        elif output.topic == pipeline.results_topic and output.key is not None:
            headers = {
                name: output.headers[name]
                for name in (VERSION_HEADER, TENANT_HEADER, CLASS_HEADER)
                if name in output.headers
            }
            result = Result(
                id=output.key,
                tenant=headers.get(TENANT_HEADER, "default"),
                klass=settlement.delivery.klass,
                finish_reason="error",
                error=ErrorInfo.from_error(cause),
            )
            outputs.append(Outgoing(output.topic, result.encode(), output.key, headers))
    letter = dead_message(pipeline, settlement.delivery, f"{cause.code}: {cause}")
    return replace(settlement, outputs=[*outputs, letter])
