"""Settling in the background, so that no step waits for a commit."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.bus.contract import Member, Settlement
from penstock.errors import BusUnavailable, DeliveryLost
from penstock.failpoints import failpoint

log = logging.getLogger(__name__)

SETTLE_TRIES = 5


@dataclass(frozen=True)
class _Order:
    settlement: Settlement
    done: Callable[[bool], None]

    @property
    def place(self) -> tuple[str, str] | int:
        """What it settles; one that settles nothing has a place of its own."""
        delivery = self.settlement.delivery
        return (delivery.topic, delivery.position) if delivery.is_held else id(self)


class Settler:
    """Settles in the background, everything that is ready in one go, so that no step waits for a commit.

    `done(True)` is called after a settlement is durable, `done(False)` when the bus gave the delivery to another member
    (it will settle it). Any other failure ends the worker: `check()` raises it in the loop.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._open = 0
        self._lock = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="settler", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Settlements on their way."""
        with self._lock:
            return self._open

    def settle(self, settlement: Settlement, done: Callable[[bool], None] = lambda settled: None) -> None:
        """Settle soon."""
        with self._lock:
            self._open += 1
        self._orders.put(_Order(settlement, done))

    def check(self) -> None:
        """Raise what made settling impossible, if anything did."""
        if self._failure is not None:
            raise self._failure

    def wait(self, timeout_s: float) -> None:
        """Until everything is settled, it failed, or the time is over."""
        with self._lock:
            self._lock.wait_for(lambda: self._open == 0 or self._failure is not None, timeout_s)

    def close(self) -> None:
        """Settle what was asked for, then end the thread."""
        self._orders.put(None)
        self._thread.join()

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
        tries = 0
        while batch:
            try:
                failpoint("settle.begun")
                self._member.settle([order.settlement for order in batch])
            except DeliveryLost as error:
                lost = {(delivery.topic, delivery.position) for delivery in error.deliveries}
                rest = [order for order in batch if order.place not in lost]
                assert len(rest) < len(batch), "lost deliveries are of those that were to be settled"
                self._finish([order for order in batch if order.place in lost], settled=False)
                batch = rest
            except BusUnavailable:
                tries += 1
                if tries == SETTLE_TRIES:
                    raise
                log.warning("settling failed, trying again (%d of %d)", tries, SETTLE_TRIES, exc_info=True)
                time.sleep(0.05 * 2**tries)
            else:
                failpoint("settle.done")
                self._finish(batch, settled=True)
                return

    def _finish(self, orders: list[_Order], *, settled: bool) -> None:
        for order in orders:
            order.done(settled)
        with self._lock:
            self._open -= len(orders)
            self._lock.notify_all()
