"""Reads long messages on a thread: one takes seconds, and neither the engine's steps nor the loop wait for it.

A message that was delivered:

    1  the loop polls it and submits it; the request is not claimed yet
    2  a thread reads it: decodes, validates, applies the chat template, tokenizes
    3  the loop collects it, checks that the delivery is still its own, and claims the request

A crash before 3, or a worker that leaves, leaves the delivery to the bus. A message that waits for long is parked for
other workers (`penstock.worker.rescue`), also while the thread reads it. The message of a request that was taken over
comes with the claim:

    1  the loop takes the request over; its session holds the claim from now on
    2  the thread reads the message
    3  the loop collects it, and goes on under that claim

After a crash before 3 the session runs out, and the next worker takes the request over; a worker that leaves releases
the claim.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from penstock.bus.contract import Delivery
from penstock.record import Claim
from penstock.worker.task import Task

GRAMMAR_KEY = b'"grammar"'
"""A message without these bytes has no grammar."""


def may_have_grammar(value: bytes) -> bool:
    """Return whether a message may have a grammar, without reading it."""
    return GRAMMAR_KEY in value


@dataclass(frozen=True)
class PendingMessage:
    """A message that is being read."""

    delivery: Delivery
    claim: Claim | None
    """The claim, if the request was taken over."""
    task: "Future[Task | None]"


class MessageReader:
    """Reads long messages in order, on one thread. Only the loop calls its methods, but for `__len__`,
    `pending_deliveries` and `unclaimed_deliveries`.

    `wake` is called on the thread after each message.
    """

    def __init__(self, read: Callable[[Delivery], Task | None], wake: Callable[[], None]) -> None:
        self._read, self._wake = read, wake
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading")
        self._open: deque[PendingMessage] = deque()

    def __len__(self) -> int:
        """Return how many messages were not collected yet."""
        return len(self._open)

    def pending_deliveries(self) -> list[Delivery]:
        """Return the messages that were not collected yet. Any thread may call this."""
        return [reading.delivery for reading in list(self._open)]

    def unclaimed_deliveries(self) -> list[Delivery]:
        """Return the messages that were not collected yet and are claimed once they are. Any thread may call this."""
        return [reading.delivery for reading in list(self._open) if reading.claim is None]

    @property
    def claims(self) -> set[Claim]:
        """The claims of messages that were not collected yet."""
        return {reading.claim for reading in self._open if reading.claim is not None}

    def submit(self, delivery: Delivery, claim: Claim | None) -> None:
        """Have a message read; `claim` where its request was taken over."""
        future = self._pool.submit(self._read, delivery)
        self._open.append(PendingMessage(delivery, claim, future))
        future.add_done_callback(lambda _: self._wake())

    def collect_read(self) -> Iterator[PendingMessage]:
        """Yield the messages that were read, in their order."""
        while self._open and self._open[0].task.done():
            yield self._open.popleft()

    def close(self) -> list[Claim]:
        """Stop reading, and drop what was not collected. Returns its claims."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        claims = [reading.claim for reading in self._open if reading.claim is not None]
        self._open.clear()
        return claims
