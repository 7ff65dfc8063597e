"""What both workers' loops are made of: settling in the background, waiting claims, the heartbeat, stopping."""

import heapq
import json
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Self

import redis

from penstock.bus.contract import Delivery, Member, Settlement
from penstock.errors import BusUnavailable, DeliveryLost, PenstockError
from penstock.names import Pipeline, PriorityClass

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.2
"""How long an idle worker waits in one poll: also how soon it sees that it should stop."""
SETTLE_TRIES = 5


class StopSignal:
    """Set by SIGTERM or SIGINT: the loop finishes or hands back what it has, and leaves."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def install(self) -> Self:
        """Take over this process's SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def set(self) -> None:
        """Ask the loop to stop."""
        self._event.set()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._event.set()


def room_for(free: int, *, idle: bool) -> dict[PriorityClass, int]:
    """How many deliveries of each class to take: batch work leaves one place for what is interactive."""
    return {"interactive": free, "batch": free if idle else max(0, free - 1)}


@dataclass(order=True)
class _Waiting:
    due_s: float
    order: int
    delivery: Delivery = field(compare=False)


class WaitingRoom:
    """Deliveries whose request somebody else still holds: asked for again when the other's lease may be over."""

    def __init__(self) -> None:
        self._heap: list[_Waiting] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, delivery: Delivery, wait_s: float) -> None:
        """Look at `delivery` again in `wait_s` seconds."""
        self._count += 1
        heapq.heappush(self._heap, _Waiting(time.monotonic() + wait_s, self._count, delivery))

    def due(self) -> list[Delivery]:
        """Those whose time has come, out of the room."""
        ready = []
        while self._heap and self._heap[0].due_s <= time.monotonic():
            ready.append(heapq.heappop(self._heap).delivery)
        return ready

    def next_in_s(self, at_most_s: float) -> float:
        """Seconds until the next one is due, at most `at_most_s`."""
        return max(0.0, min(at_most_s, self._heap[0].due_s - time.monotonic())) if self._heap else at_most_s


@dataclass(frozen=True)
class _Order:
    settlement: Settlement
    done: Callable[[bool], None]

    @property
    def place(self) -> tuple[str, str]:
        return self.settlement.delivery.topic, self.settlement.delivery.position


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
        tries = 0
        while batch:
            try:
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
                self._finish(batch, settled=True)
                return

    def _finish(self, orders: list[_Order], *, settled: bool) -> None:
        for order in orders:
            order.done(settled)
        with self._lock:
            self._open -= len(orders)
            self._lock.notify_all()


class Heartbeat:
    """A key in Redis that says what this worker is doing, renewed by a thread and gone soon after the process is.

    The value is a JSON object: stage, name, host, pid, model, state (`loading`, `ready`, `draining`), progress (0 to 1,
    while loading), running, waiting, since (seconds since the epoch).
    """

    def __init__(self, url: str, pipeline: Pipeline, stage: str, name: str, interval_s: float) -> None:
        self._redis = redis.Redis.from_url(url)
        self._key = pipeline.worker_key(stage, name)
        self._interval_s = interval_s
        self._status: dict[str, object] = {
            "stage": stage, "name": name, "host": socket.gethostname(), "pid": os.getpid(),
            "state": "loading", "progress": 0.0, "since": time.time(),
        }  # fmt: skip
        self._load: Callable[[], dict[str, object]] = dict
        self._wake = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()

    def say(self, *, now: bool = False, **status: object) -> None:
        """Change what the heartbeat says; `now` does not wait for the next beat."""
        self._status.update(status)
        if now:
            self._wake.set()

    def watch(self, load: Callable[[], dict[str, object]]) -> None:
        """Ask `load` at each beat for what changes all the time."""
        self._load = load

    def progress(self, what: str, share: float) -> None:
        """Progress of a long load, for the key and the log."""
        self.say(doing=what, progress=round(share, 3))

    def _run(self) -> None:
        expiry_ms = int(self._interval_s * 4000)
        while not self._ended:
            try:
                self._redis.set(self._key, json.dumps(self._status | self._load()), px=expiry_ms)
            except redis.RedisError as error:
                log.warning("heartbeat not written: %s", error)
            self._wake.wait(self._interval_s)
            self._wake.clear()
        try:
            self._redis.delete(self._key)
        except redis.RedisError as error:
            log.warning("heartbeat not removed: %s", error)


def slot_name(given: str) -> str:
    """The worker's name: the one given, or host and process id."""
    return given or f"{socket.gethostname()}-{os.getpid()}"


def stay_on(cores: str) -> None:
    """Keep this process on some cores (`0` or `0,1`); nothing where the system has no affinity."""
    if cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (OSError, ValueError) as error:
            raise PenstockError(f"PENSTOCK_WORKER_CORES={cores}: {error}") from None
