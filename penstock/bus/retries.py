"""The retry and dead-letter topics, the same on both buses.

Both stages' groups read the retry topics, one for each class. A message there says in its headers where it came from
(`ORIGIN`), how often it was tried (`ATTEMPT`), why (`REASON`) and where (`STACK`), and from when on it may be
tried again (`NOT_BEFORE`, milliseconds since the epoch). Each group delivers those that came from its own stage
and passes over the others. A dead letter also says since when it is one (`BURIED`, likewise).
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing
from penstock.names import (
    ATTEMPT,
    BURIED,
    CLASSES,
    NOT_BEFORE,
    ORIGIN,
    REASON,
    STACK,
    TRUNCATED,
    Pipeline,
    PriorityClass,
    Stage,
)

SHELF_CAPACITY = 1024
"""Messages of a class that a member keeps while they are not due. With more it stops reading that class's retry topic
for a while; the other's it reads on.
"""

MAX_REASON_CHARS = 1000
MAX_STACK_CHARS = 6000
"""The end of a stack says most."""
_RETRY_POSITION = "retry:"

Verdict = Literal["ours", "theirs", "nobody"]


def retry_message(pipeline: Pipeline, delivery: Delivery, reason: str, delay_s: float, stack: str = "") -> Outgoing:
    """What goes to the retry topic for a delivery: attempt + 1, not before `delay_s` from now."""
    headers = _with_stack(delivery.headers, stack)
    headers[ORIGIN] = delivery.topic
    headers[ATTEMPT] = str(delivery.attempt + 1)
    headers[NOT_BEFORE] = str(int((time.time() + delay_s) * 1000))
    headers[REASON] = reason[:MAX_REASON_CHARS]
    message = Outgoing(pipeline.retries(delivery.klass), delivery.value, delivery.key, headers)
    return message if message.num_bytes <= MAX_MESSAGE_BYTES else _bare(message)


def dead_message(
    pipeline: Pipeline, delivery: Delivery, reason: str, stack: str = "", attempts: int | None = None
) -> Outgoing:
    """What goes to the dead-letter topic for a delivery, that was tried so often (or as its headers say).

    Without a stack it keeps the last retry's, if there was one.
    """
    headers = {name: value for name, value in _with_stack(delivery.headers, stack).items() if name != NOT_BEFORE}
    headers[ORIGIN] = delivery.topic
    headers[REASON] = reason[:MAX_REASON_CHARS]
    headers[ATTEMPT] = str(delivery.attempt + 1 if attempts is None else attempts)
    headers[BURIED] = str(int(time.time() * 1000))
    message = Outgoing(pipeline.dead, delivery.value, delivery.key, headers)
    return message if message.num_bytes <= MAX_MESSAGE_BYTES else _cut(message)


def _with_stack(headers: Mapping[str, str], stack: str) -> dict[str, str]:
    return {**headers, STACK: stack[-MAX_STACK_CHARS:]} if stack else dict(headers)


def _bare(message: Outgoing) -> Outgoing:
    """A message without the headers it came with: with ours, they are more than a topic takes."""
    headers = {name: message.headers[name] for name in (ORIGIN, ATTEMPT, NOT_BEFORE, REASON)}
    return Outgoing(message.topic, message.value, _short_key(message.key), headers)


def _short_key(key: str | None) -> str | None:
    """A key that may be a request's id; else None."""
    return key if key is not None and len(key) <= MAX_REASON_CHARS else None


def _cut(message: Outgoing) -> Outgoing:
    """The beginning of a message that no topic takes whole, and what is known of it: a dead letter always fits."""
    kept = {name: message.headers[name][:MAX_REASON_CHARS] for name in (ORIGIN, REASON, ATTEMPT, BURIED)}
    kept[TRUNCATED] = str(len(message.value))
    return Outgoing(message.topic, message.value[: MAX_MESSAGE_BYTES // 2], _short_key(message.key), kept)


def retry_position(position: str) -> str:
    """How a delivery that came by the retry topic names its place there."""
    return _RETRY_POSITION + position


def place(pipeline: Pipeline, delivery: Delivery) -> tuple[str, str]:
    """Topic and position where a delivery's message really lies: its class's retry topic if it came by that."""
    if delivery.position.startswith(_RETRY_POSITION):
        return pipeline.retries(delivery.klass), delivery.position[len(_RETRY_POSITION) :]
    return delivery.topic, delivery.position


def judge(pipeline: Pipeline, stage: Stage, delivery: Delivery) -> Verdict:
    """Whose a message of its class's retry topic is.

    One that comes from no stage's topic of that class is nobody's; the prefill group puts it to the dead letters.
    """
    origin, klass = delivery.headers.get(ORIGIN), delivery.klass
    if origin == pipeline.inputs(stage)[klass]:
        return "ours"
    known = (pipeline.requests(klass), pipeline.jobs(klass))
    return "theirs" if origin in known or stage != "prefill" else "nobody"


def as_original(delivery: Delivery) -> Delivery:
    """A delivery of a retry topic that is ours, under its original topic."""
    return replace(delivery, topic=delivery.headers[ORIGIN], position=retry_position(delivery.position))


class Shelf:
    """Deliveries that wait for their not-before; none holds up another."""

    def __init__(self) -> None:
        self._heaps: dict[PriorityClass, list[tuple[float, int, Delivery]]] = {klass: [] for klass in CLASSES}
        self._count = itertools.count()

    def __len__(self) -> int:
        return sum(len(heap) for heap in self._heaps.values())

    def __iter__(self) -> Iterator[Delivery]:
        return (entry[2] for heap in self._heaps.values() for entry in heap)

    def space(self, klass: PriorityClass) -> int:
        """How many more of a class may be put here."""
        return max(0, SHELF_CAPACITY - len(self._heaps[klass]))

    def put(self, delivery: Delivery) -> None:
        """Keep a delivery until it is due; one without a readable not-before is due now."""
        text = delivery.headers.get(NOT_BEFORE, "0")
        due_s = int(text) / 1000 if text.isascii() and text.isdecimal() and len(text) < 16 else 0.0
        heapq.heappush(self._heaps[delivery.klass], (due_s, next(self._count), delivery))

    def take(self, klass: PriorityClass, room: int) -> list[Delivery]:
        """At most `room` deliveries of the class that are due, the longest due first."""
        heap, now_s = self._heaps[klass], time.time()
        taken: list[Delivery] = []
        while heap and len(taken) < room and heap[0][0] <= now_s:
            taken.append(heapq.heappop(heap)[2])
        return taken

    def wait_s(self, room: Mapping[PriorityClass, int]) -> float | None:
        """How long until the next one of a class with room is due; None if there is none."""
        dues = [heap[0][0] for klass, heap in self._heaps.items() if heap and room.get(klass, 0) > 0]
        return max(0.0, min(dues) - time.time()) if dues else None

    def drop(self, unwanted: Callable[[Delivery], bool]) -> None:
        """Forget deliveries that are not ours any more."""
        for klass, heap in self._heaps.items():
            kept = [entry for entry in heap if not unwanted(entry[2])]
            heapq.heapify(kept)
            self._heaps[klass] = kept
