"""Reads long messages on a thread: one takes seconds, and neither the engine's steps nor the loop wait for it.

    1  the loop polls a message and submits it; the request is not claimed yet
    2  a thread decodes and validates it
    3  the loop collects it, checks that the delivery is still its own, claims the request and submits it again
    4  the thread reads it: applies the chat template, tokenizes, compiles the grammar
    5  the loop collects it, and goes on under the claim

The message of a request that was taken over comes with the claim and begins at 2; a short one with a grammar is claimed
before and begins at 4.

What a crash costs: before 3 the bus has the delivery, and a message that waits for long is parked for other workers
(`penstock.worker.rescue`). After 3 the session runs out, and the next worker takes the request over. A template, a
tokenizer or a grammar that ends the worker in 4 therefore costs the request an attempt each time, and the request ends
when it has none left. The watch deals with a reading that does not return (`penstock.worker.watch`). A worker
that leaves releases all claims; a worker whose thread is busy for long releases those that it has not begun to read.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from penstock.bus.contract import Delivery
from penstock.record import Claim
from penstock.sealing import is_sealed
from penstock.worker.task import Task
from penstock.worker.watch import LoopWatch

GRAMMAR_KEY = b'"grammar"'
"""A message without these bytes has no grammar."""


def may_have_grammar(value: bytes) -> bool:
    """Return whether a message may have a grammar, without reading it."""
    return GRAMMAR_KEY in value or is_sealed(value)


@dataclass(frozen=True)
class PendingMessage:
    """A message that is being read."""

    delivery: Delivery
    claim: Claim | None
    """The claim, if the request has one."""
    task: "Future[Any]"
    """Its result is the request of a message, None without one, or nothing where `opened` was read."""
    opened: Task | None = None
    """The claimed request, if it was identified before, and is being read now."""
    since_s: float = field(default_factory=time.monotonic)


class MessageReader:
    """Reads long messages in order, on one thread. Only the loop calls its methods, but for `__len__`,
    `pending_deliveries` and `unclaimed_deliveries`.

    `identify` returns the request of a message, `read` reads the rest of a claimed one; `wake` is called on the thread
    after each.
    """

    def __init__(
        self,
        identify: Callable[[Delivery], Task | None],
        read: Callable[[Task], object],
        watch: LoopWatch,
        wake: Callable[[], None],
    ) -> None:
        self._identify, self._read = watch.watch_reading()(identify), watch.watch_reading()(read)
        self._wake = wake
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading")
        self._open: deque[PendingMessage] = deque()

    def __len__(self) -> int:
        """Return how many messages were not collected yet."""
        return len(self._open)

    def pending_deliveries(self) -> list[Delivery]:
        """Return the messages that were not collected yet. Any thread may call this."""
        return [reading.delivery for reading in list(self._open)]

    def unclaimed_deliveries(self) -> list[Delivery]:
        """Return the messages that were not collected yet and have no claim. Any thread may call this."""
        return [reading.delivery for reading in list(self._open) if reading.claim is None]

    @property
    def claims(self) -> set[Claim]:
        """The claims of messages that were not collected yet."""
        return {reading.claim for reading in self._open if reading.claim is not None}

    def submit(self, delivery: Delivery, claim: Claim | None) -> None:
        """Have a message decoded; `claim` where its request was taken over."""
        self._add(PendingMessage(delivery, claim, self._pool.submit(self._identify, delivery)))

    def submit_opened(self, task: Task) -> None:
        """Have a claimed request read."""
        future = self._pool.submit(self._read, task)
        self._add(PendingMessage(task.delivery, task.claim, future, task))

    def _add(self, pending: PendingMessage) -> None:
        self._open.append(pending)
        pending.task.add_done_callback(lambda _: self._wake())

    def is_late(self, patience_s: float) -> bool:
        """Return whether a message waits here for longer than `patience_s`."""
        return bool(self._open) and self._open[0].since_s <= time.monotonic() - patience_s

    def take_late(self, patience_s: float) -> list[Task]:
        """Remove the interactive requests that are claimed and not begun to be read in time, and return them."""
        latest_s, late = time.monotonic() - patience_s, list[Task]()
        for one in list(self._open):
            is_waiting = (
                one.opened is not None and one.delivery.priority_class == "interactive" and one.since_s <= latest_s
            )
            if one.opened is not None and is_waiting and one.task.cancel():
                self._open.remove(one)
                late.append(one.opened)
        return late

    def collect_read(self) -> Iterator[PendingMessage]:
        """Yield the messages that were read, in their order."""
        while self._open and self._open[0].task.done():
            yield self._open.popleft()

    def close(self) -> list[tuple[Claim, bool]]:
        """Stop reading, and drop what was not collected. Returns its claims, and whether the deliveries are held."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        claims = [(reading.claim, reading.delivery.is_held) for reading in self._open if reading.claim is not None]
        self._open.clear()
        return claims
