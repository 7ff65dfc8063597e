"""Clients that send requests steadily and read every stream to its end; all that they see goes into the history."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Self

import redis

from penstock.bus.connect import connect
from penstock.client.core import prepare_message
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable, Cancelled, DeadlineExceeded, RequestError, StreamError
from penstock.messages import EndEvent, Request, now_s
from penstock.names import Pipeline
from sim.chaos.history import History
from sim.workload import Answer, alone, requests

NUM_KNOWN = 16
LONG, BRIEF = 48, 4
"""Tokens of a long answer, and of a short one."""
AGAIN_S = 0.2
"""Before what was not acknowledged is sent again."""
TENANTS = 7
"""Requests of one tenant share KV; so much of the work is found in the store, and not all."""


@cache
def known(max_tokens: int) -> list[tuple[Request, Answer]]:
    """The requests that come again and again under other ids, and their answers; every eighth is of one token."""
    work = requests(NUM_KNOWN, "chaos", max_tokens)
    short = [work[n].sampling.model_copy(update={"max_tokens": 1}) for n in range(0, NUM_KNOWN, 8)]
    work[::8] = [request.model_copy(update={"sampling": one}) for request, one in zip(work[::8], short, strict=True)]
    return list(zip(work, alone(work).values(), strict=True))


@dataclass(frozen=True)
class Errand:
    """A request, and what a client does with it."""

    request: Request
    answer: Answer
    copies: int
    """How often it is sent: twice, if the first answer of the bus seems to be lost."""
    cancel_after: int | None
    """Tokens after which it is cancelled."""
    leaves_after: list[int]
    """The first reader's connections end after so many events each; after the last of them it stays."""
    late_s: float | None
    """So much later a second reader comes."""

    @property
    def may(self) -> list[str]:
        """Errors that may be its end."""
        cancelled = [] if self.cancel_after is None else [Cancelled.code]
        return cancelled if self.request.deadline is None else [*cancelled, DeadlineExceeded.code]


def errand(seed: int, number: int) -> Errand:
    """The one of that number: the same for the same seed."""
    chance = random.Random(f"{seed}/errand/{number}")
    request, answer = chance.choice(known(LONG))
    update: dict[str, object] = {
        "id": f"e{number}",
        "tenant": f"tenant-{chance.randrange(TENANTS)}",
        "klass": chance.choice(["interactive", "interactive", "batch"]),
    }
    if chance.random() < 0.06:
        update["deadline"] = now_s() + chance.choice([-1.0, 0.3, 1.0])
    return Errand(
        request.model_copy(update=update),
        answer,
        copies=2 if chance.random() < 0.08 else 1,
        cancel_after=chance.randrange(20) if chance.random() < 0.08 else None,
        leaves_after=[chance.randint(1, 20) for _ in range(chance.choice([0, 0, 1, 3]))],
        late_s=chance.uniform(0, 2) if chance.random() < 0.25 else None,
    )


def plain(request_id: str, number: int, max_tokens: int = BRIEF) -> Errand:
    """A request that is read once to its end, or not at all."""
    request, answer = known(max_tokens)[number % NUM_KNOWN]
    named = request.model_copy(update={"id": request_id, "tenant": f"tenant-{number % TENANTS}"})
    return Errand(named, answer, copies=1, cancel_after=None, leaves_after=[], late_s=None)


class Clients:
    """Keeps `under_way` errands under way, those that `make` makes of the numbers from 0, until it is told to stop."""

    def __init__(
        self, history: History, addresses: Addresses, make: Callable[[int], Errand], under_way: int, patience_s: float
    ) -> None:
        self._history, self._make, self._patience_s = history, make, patience_s
        self._addresses, self._client = addresses, Client(addresses)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.count = 0
        """Errands begun."""
        self.done = 0
        """Errands of which the first reader has seen the end."""
        self.accepted: set[str] = set()
        self._pool = ThreadPoolExecutor(3 * under_way, "client")
        self._futures: list[Future[None]] = [self._pool.submit(self._go_on) for _ in range(under_way)]

    def stop(self) -> None:
        """Begin nothing new."""
        self._over.set()

    @property
    def is_idle(self) -> bool:
        """Whether all that was begun has come to its end."""
        return all(future.done() for future in self._futures)

    def check(self) -> None:
        """Raise what a client fell over, if one did."""
        for future in self._futures:
            if future.done():
                future.result()

    def send_unread(self, tasks: Sequence[Errand], send: Callable[[list[Request]], None] | None = None) -> None:
        """Send requests at once of which nobody reads the streams: their results tell. `send` raises `BusUnavailable`
        where it is not known that they are durable; then they are sent again, until the clients are told to stop.
        """
        for task in tasks:
            self._submitted(task)
        while not self._over.is_set():
            with contextlib.suppress(BusUnavailable):
                (send or self._publish)([task.request for task in tasks])
                for task in tasks:
                    self._accepted(task)
                return
            time.sleep(AGAIN_S)

    def _publish(self, work: list[Request]) -> None:
        pipeline = Pipeline(self._addresses.pipeline)
        with contextlib.closing(connect(self._addresses, BusSettings()).publisher()) as publisher:
            publisher.publish([prepare_message(pipeline, request)[1] for request in work])

    def _go_on(self) -> None:
        while not self._over.is_set():
            with self._lock:
                number, self.count = self.count, self.count + 1
            self._run(self._make(number))
            with self._lock:
                self.done += 1

    def _run(self, task: Errand) -> None:
        request = task.request
        self._submitted(task)
        for _ in range(task.copies):
            self._send(request)
        self._accepted(task)
        others = []
        if task.late_s is not None:
            others.append(self._pool.submit(self._read_late, task.late_s, request.id))
        self._read("first", task)
        wait(others)
        for other in others:
            other.result()

    def _submitted(self, task: Errand) -> None:
        answer = task.answer
        told = {"tokens": answer.token_ids, "text": answer.text, "finish": answer.finish_reason, "may": task.may}
        self._history.note("submitted", id=task.request.id, **told)

    def _accepted(self, task: Errand) -> None:
        self.accepted.add(task.request.id)
        self._history.note("accepted", id=task.request.id)

    def _send(self, request: Request) -> None:
        """Until it is durable: sending again under the same id is safe."""
        while True:
            try:
                self._submit(request)
            except BusUnavailable:
                time.sleep(AGAIN_S)
            else:
                return

    def _submit(self, request: Request) -> None:
        fields = request.sampling.model_dump(exclude_defaults=True) | {"klass": request.klass or "interactive"}
        self._client.submit(
            token_ids=request.token_ids, id=request.id, tenant=request.tenant, deadline=request.deadline, **fields
        )

    def _read_late(self, late_s: float, request_id: str) -> None:
        self._over.wait(late_s)
        with self._told("late", request_id):
            self._connect("late", request_id, None, None, None)

    def _read(self, reader: str, task: Errand) -> None:
        after: str | None = None
        with self._told(reader, task.request.id):
            for most in [*task.leaves_after, None]:
                after, is_over = self._connect(reader, task.request.id, after, most, task.cancel_after)
                if is_over:
                    return

    def _connect(
        self, reader: str, request_id: str, after: str | None, most: int | None, cancel_after: int | None
    ) -> tuple[str | None, bool]:
        """Read at most so many events: the last event id seen, and whether that was all."""
        for count, event in enumerate(self._client.stream(request_id, after, self._patience_s), start=1):
            if isinstance(event, EndEvent):
                told = {"finish": event.finish_reason, "count": event.usage.completion_tokens, "error": None}
                self._history.note("end", id=request_id, reader=reader, **told)
                return after, True
            after = event.id
            self._history.note("token", id=request_id, reader=reader, event=event.id, token=event.token)
            if cancel_after is not None and int(event.id.partition("-")[0]) == cancel_after:
                with contextlib.suppress(redis.RedisError):
                    self._client.cancel(request_id)
            if count == most:
                return after, False
        raise AssertionError("a stream ends with its end")

    @contextlib.contextmanager
    def _told(self, reader: str, request_id: str) -> Iterator[None]:
        """An error is how a reading can end, too."""
        try:
            yield
        except RequestError as error:
            self._history.note("end", id=request_id, reader=reader, finish="error", count=None, error=error.code)
        except StreamError as error:
            self._history.note("failed", id=request_id, reader=reader, error=type(error).__name__, story=str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._client.close()
        self._pool.shutdown(wait=error is None, cancel_futures=True)
