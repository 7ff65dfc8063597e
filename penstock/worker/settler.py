"""Settling in the background, so that no step waits for a commit."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.bus.contract import Delivery, Member, Settlement
from penstock.errors import BusUnavailable, DeliveryLost
from penstock.failpoints import failpoint
from penstock.reach import is_away, pauses

log = logging.getLogger(__name__)

GIVE_UP_S = 60.0
"""A member that could not settle for this long is done with: it may be at fault itself."""
ALONE_S = 20.0
"""The same when the bus answers it: then it is at fault."""
CLOSE_S = 5.0
"""How long a worker that leaves waits for its settlements; what is not settled then, others settle from the log."""
MOMENT_S = 1.0
"""How long a settlement under way is waited for when nothing more is wanted of it."""


@dataclass(frozen=True)
class _Order:
    settlement: Settlement
    done: Callable[[bool], None]

    @property
    def place(self) -> tuple[str, str] | int:
        """What it settles; one that settles nothing has a place of its own."""
        delivery = self.settlement.delivery
        return _place_of(delivery) if delivery.is_held else id(self)


def _place_of(delivery: Delivery) -> tuple[str, str]:
    return delivery.topic, delivery.position


class Settler:
    """Settles in the background, everything that is ready in one go, so that no step waits for a commit.

    `done(True)` is called after a settlement is durable, `done(False)` when the bus gave the delivery to another member
    (it will settle it), or when there is no delivery, and it is unknown whether the outputs are out. While the bus is
    away it is tried again and again: the loop goes on with what runs. Any other failure ends the worker: `check()`
    raises it in the loop.
    """

    def __init__(self, member: Member) -> None:
        self.trouble = ""
        """Why the last attempt failed, while it is made again; else empty."""
        self._member = member
        self._is_over = threading.Event()
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._open: Counter[tuple[str, str] | int] = Counter()
        self._lock = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Settlements on their way."""
        with self._lock:
            return self._open.total()

    def is_settling(self, delivery: Delivery) -> bool:
        """Whether it is to be settled already: it came a second time, and is looked at again when that is over."""
        with self._lock:
            return self._open[_place_of(delivery)] > 0

    def settle(self, settlement: Settlement, done: Callable[[bool], None] = lambda settled: None) -> None:
        """Settle soon."""
        order = _Order(settlement, done)
        with self._lock:
            self._open[order.place] += 1
        self._orders.put(order)

    def check(self) -> None:
        """Raise what made settling impossible, if anything did."""
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout_s: float) -> None:
        """Until everything is settled, it cannot be now, or the time is over."""
        with self._lock:
            self._lock.wait_for(lambda: not self._open or bool(self.trouble) or self._failure is not None, timeout_s)

    def close(self) -> None:
        """Settle what was asked for, as far as that is possible now, and end the thread."""
        self.wait(MOMENT_S if self._member.trouble else CLOSE_S)
        self.abandon()

    def abandon(self) -> None:
        """Settle nothing more. What the bus does not answer ends by itself, later."""
        self._is_over.set()
        self._orders.put(None)
        self._thread.join(MOMENT_S)

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

    def _settle_batch(self, batch: list[_Order]) -> None:
        """A delivery that came a second time while its first settlement was on its way is settled once."""
        unique = {order.place: order for order in reversed(batch)}
        self._settle_all([order for order in batch if unique[order.place] is order])
        self._finish([order for order in batch if unique[order.place] is not order], settled=False)

    def _settle_all(self, batch: list[_Order]) -> None:
        waits, begun_s, troubled_s = pauses(), time.monotonic(), time.monotonic()
        while batch and not self._is_over.is_set():
            try:
                failpoint("settle.begun")
                self._member.settle([order.settlement for order in batch])
            except DeliveryLost as error:
                lost = {_place_of(delivery) for delivery in error.deliveries}
                rest = [order for order in batch if order.place not in lost]
                assert len(rest) < len(batch), "lost deliveries are of those that were to be settled"
                self._note("")
                self._finish([order for order in batch if order.place in lost], settled=False)
                batch = rest
            except BusUnavailable as error:
                now_s = time.monotonic()
                troubled_s = now_s if self._member.trouble else troubled_s
                if not is_away(error) or now_s > min(begun_s + GIVE_UP_S, troubled_s + ALONE_S):
                    raise
                batch = self._held_of(batch)
                log.warning("settling failed%s: %s", ", trying again" if batch else "", error)
                self._note(str(error) if batch else "")
                self._is_over.wait(next(waits))
            else:
                failpoint("settle.done")
                self._note("")
                self._finish(batch, settled=True)
                return

    def _held_of(self, batch: list[_Order]) -> list[_Order]:
        """What may be tried again: a delivery is done once. What settles nothing may be out already, and would go out
        again under the same name; it is given up, and taken over anew.
        """
        held = [order for order in batch if order.settlement.delivery.is_held]
        self._finish([order for order in batch if not order.settlement.delivery.is_held], settled=False)
        return held

    def _note(self, trouble: str) -> None:
        with self._lock:
            self.trouble = trouble
            self._lock.notify_all()

    def _finish(self, orders: list[_Order], *, settled: bool) -> None:
        for order in orders:
            order.done(settled)
        with self._lock:
            self._open -= Counter(order.place for order in orders)
            self._lock.notify_all()
