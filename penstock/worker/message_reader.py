"""Reading messages: a long one takes seconds, and neither the engine's steps nor the loop wait for it.

A message that was delivered:

    1  the loop polls it, and hands it in here; nobody has claimed the request
    2  a thread reads it: decodes, validates, applies the chat template, tokenizes
    3  the loop collects it, asks whether the delivery is still its own, and claims the request

A crash before 3 leaves the delivery to the bus, and so does a worker that leaves. Of a request that was taken over, the
message comes with the claim:

    1  the loop takes the request over; its session holds the claim from now on
    2  the thread reads the message
    3  the loop collects it, and goes on under that claim

After a crash before 3 the session runs out, and the next worker takes the request over; a worker that leaves gives the
claim back.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from penstock.bus.contract import Delivery
from penstock.record import Claim
from penstock.worker.task import Task


@dataclass(frozen=True)
class PendingMessage:
    """A message that is being read."""

    delivery: Delivery
    claim: Claim | None
    """Of a request that was taken over."""
    task: "Future[Task | None]"


class MessageReader:
    """Reads long messages in their order, on one thread. All methods but `__len__` and `deliveries` are the loop's.

    `wake` is called on the thread after each message.
    """

    def __init__(self, read: Callable[[Delivery], Task | None], wake: Callable[[], None]) -> None:
        self._read, self._wake = read, wake
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading")
        self._open: deque[PendingMessage] = deque()

    def __len__(self) -> int:
        """Messages that were not collected yet."""
        return len(self._open)

    def pending_deliveries(self) -> list[Delivery]:
        """Those messages. Any thread may ask."""
        return [reading.delivery for reading in list(self._open)]

    def submit(self, delivery: Delivery, claim: Claim | None) -> None:
        """Have a message read; `claim` where its request was taken over."""
        future = self._pool.submit(self._read, delivery)
        self._open.append(PendingMessage(delivery, claim, future))
        future.add_done_callback(lambda _: self._wake())

    def collect_read(self) -> Iterator[PendingMessage]:
        """The messages that were read, in their order."""
        while self._open and self._open[0].task.done():
            yield self._open.popleft()

    def close(self) -> list[Claim]:
        """Stop, and forget what was not collected. Returns the claims among it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        claims = [reading.claim for reading in self._open if reading.claim is not None]
        self._open.clear()
        return claims
