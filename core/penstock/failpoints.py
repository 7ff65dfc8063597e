"""Named places in the code where tests let a process fail: between the numbered steps of a protocol, and inside them.

Kills and stops are ordered by a setting: `PENSTOCK_FAILPOINTS=prefill.4.appended=kill@3,decode.7.sent=stop` makes a
worker kill itself when it passes the point after step 4 for the third time, and stop (as by SIGSTOP) when it first
passes the point after a step's tokens were sent. `hold` keeps the thread at the point for ever. A test can also arm a
point of its own process with any action.
"""

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from penstock.errors import SettingsError
from penstock.names import WHOLE_KINDS, WorkerKind

PREFILL = (
    "prefill.1.polled", "prefill.2.claimed", "prefill.2.taken", "prefill.2.ended", "prefill.3.fetched",
    "prefill.3.stepped", "prefill.3.shipping", "prefill.4.sent", "prefill.4.appended", "prefill.4.written",
    "prefill.5.asked", "prefill.5.settled", "prefill.5.handed",
)  # fmt: skip
DECODE = (
    "decode.6.polled", "decode.6.claimed", "decode.6.taken", "decode.6.read", "decode.6.fetched", "decode.7.stepped",
    "decode.7.shipping", "decode.7.confirmed", "decode.7.sent", "decode.8.ended", "decode.9.asked",
)  # fmt: skip
ENDPOINT = (
    "endpoint.1.polled", "endpoint.1.claimed", "endpoint.1.taken", "endpoint.2.asked", "endpoint.3.appended",
    "endpoint.4.ended", "endpoint.5.asked",
)  # fmt: skip
SETTLER = ("settle.begun", "settle.done")
KAFKA_PREFILL = ("kafka.2.acknowledged", "kafka.3.finished")
KAFKA_DECODE = ("kafka.3.written", "kafka.4.offsets", "kafka.5.committed")
"""Inside of a settlement on Kafka: of the prefill stage, and of the decode stage, where it is a transaction."""
METER = ("meter.1.read", "meter.2.counted")
COPY = ("copy.1.read", "copy.2.indexed")
ADOPT = (
    "adopt.1.marked", "adopt.2.looked", "adopt.3.indexed", "adopt.4.carded", "adopt.5.published", "adopt.6.noted",
    "adopt.7.done",
)  # fmt: skip
HOST_STEPS = (
    "open.1", "open.2", "open.4",
    "put.1.1", "put.1.2", "put.1", "put.2", "put.3", "put.4", "put.5.1", "put.5.2", "put.5",
    "forget.1", "forget.2", "forget.3", "remove.1",
    "lease.1", "lease.2",
    "release.1", "release.2",
    "rebuild.1", "rebuild.2", "rebuild.3", "rebuild.4",
    "allocate.1", "allocate.2", "allocate.3", "allocate.4",
    "get.1", "get.2", "get.3",
)  # fmt: skip
SHARED = tuple(f"shared.{step}" for step in HOST_STEPS)
DISK = (*(f"disk.{step}" for step in HOST_STEPS), "disk.open.3", "disk.put.2.1")
"""The tiers of a host: steps of `kvstore/tiers/host.py`, and of `file.py`, `directory.py` and `growth.py` in
`kvstore/arena/`."""
POINTS = (*PREFILL, *DECODE, *ENDPOINT, *SETTLER, *KAFKA_PREFILL, *KAFKA_DECODE, *METER, *COPY, *ADOPT, *SHARED, *DISK)
"""All points. They are named after the steps in the docstrings of the loops, of `KafkaMember` and of the tiers."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ORDER = re.compile(r"(?P<point>[a-z0-9.]+)=(?P<what>kill|stop|hold)(?:@(?P<passage>[1-9][0-9]{0,8}))?")


@dataclass
class _Armed:
    action: Callable[[], object]
    passage: int | None
    """The passage at which the action is called; None: at each."""
    passages: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_armed: dict[str, _Armed] = {}


def arm(orders: str) -> None:
    """Arm points as `PENSTOCK_FAILPOINTS` orders it. Raises `SettingsError` for an order that cannot be read."""
    for order in filter(None, orders.split(",")):
        match = _ORDER.fullmatch(order)
        if match is None or match["point"] not in POINTS:
            raise SettingsError(
                f"PENSTOCK_FAILPOINTS: {order!r} is not POINT=kill, POINT=stop or POINT=hold, with @N or without"
            )
        passage = int(match["passage"] or 1)
        arm_action(match["point"], partial(_fail, match["point"], match["what"], passage), passage)


def arm_action(point: str, action: Callable[[], object], passage: int | None = None) -> None:
    """Call `action` when this process comes to `point` for the `passage`-th time, or each time that it does."""
    assert point in POINTS, point
    _armed[point] = _Armed(action, passage)


def disarm() -> None:
    """Disarm all points."""
    _armed.clear()


def failpoint(name: str) -> None:
    """Do what this point is armed with. Outside of tests that is nothing."""
    if _armed:
        _pass(name)


def stage_failpoint(kind: WorkerKind, *names: str) -> None:
    """Pass a point of the loop that all workers share: the one of its names that begins with this worker's kind. The
    steps of all kinds that answer requests without stages are those of `endpoint`.
    """
    if _armed:
        kind = "endpoint" if kind in WHOLE_KINDS else kind
        for name in names:
            if name.startswith(kind):
                _pass(name)


def tier_failpoint(tier: str, step: str) -> None:
    """Pass a point of the code that the tiers of a host share: a step of the tier with this name."""
    if _armed:
        _pass(f"{tier}.{step}")


def _pass(name: str) -> None:
    armed = _armed.get(name)
    if armed is not None and (armed.passage is None or next(armed.passages) == armed.passage):
        armed.action()


def _fail(name: str, what: str, passage: int) -> None:
    os.write(2, f"failpoint {name}: {what} at passage {passage}\n".encode())
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
    while what == "hold":
        time.sleep(3600)
