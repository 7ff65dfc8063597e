"""Named places in both workers where a process can be told to fail: between the numbered steps, and inside of them.

`PENSTOCK_FAILPOINTS=prefill.4.appended=kill@3,decode.7.sent=stop` makes a worker kill itself when it comes the third
time to the place after step 4, and stop (as by SIGSTOP) when it first comes to the one after a step's tokens were sent.
"""

import itertools
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import SettingsError
from penstock.names import Stage

PREFILL = (
    "prefill.1.polled", "prefill.2.claimed", "prefill.2.taken", "prefill.2.ended", "prefill.3.fetched",
    "prefill.3.stepped", "prefill.3.shipping", "prefill.4.appended", "prefill.4.written", "prefill.5.settled",
    "prefill.5.handed",
)  # fmt: skip
DECODE = (
    "decode.6.polled", "decode.6.claimed", "decode.6.taken", "decode.6.read", "decode.6.fetched", "decode.7.stepped",
    "decode.7.shipping", "decode.7.confirmed", "decode.7.sent", "decode.8.ended", "decode.9.asked",
)  # fmt: skip
SETTLER = ("settle.begun", "settle.done")
KAFKA_PREFILL = ("kafka.2.acknowledged", "kafka.3.finished")
KAFKA_DECODE = ("kafka.3.written", "kafka.4.offsets", "kafka.5.committed")
"""Inside of a settlement on Kafka: of the prefill stage, and of the decode stage, where it is a transaction."""
METER = ("meter.1.read", "meter.2.counted")
POINTS = (*PREFILL, *DECODE, *SETTLER, *KAFKA_PREFILL, *KAFKA_DECODE, *METER)
"""All of them, named after the steps in the loops' docstrings and in `KafkaMember`."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ORDER = re.compile(r"(?P<point>[a-z0-9.]+)=(?P<what>kill|stop)(?:@(?P<passage>[1-9][0-9]{0,8}))?")


@dataclass
class _Armed:
    what: str
    passage: int
    passages: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_armed: dict[str, _Armed] = {}


def arm(orders: str) -> None:
    """Take orders, instead of those there were; raises `SettingsError` for what cannot be one."""
    _armed.clear()
    for order in filter(None, orders.split(",")):
        match = _ORDER.fullmatch(order)
        if match is None or match["point"] not in POINTS:
            raise SettingsError(f"PENSTOCK_FAILPOINTS: {order!r} is not POINT=kill or POINT=stop, with @N or without")
        _armed[match["point"]] = _Armed(match["what"], int(match["passage"] or 1))


def failpoint(name: str) -> None:
    """Fail here if that was ordered; otherwise, and always outside of tests, go on."""
    if _armed:
        _pass(name)


def stage_failpoint(stage: Stage, *names: str) -> None:
    """Fail at a place that both workers' loops pass: by the one of its names that is of this worker's stage."""
    if _armed:
        for name in names:
            if name.startswith(stage):
                _pass(name)


def _pass(name: str) -> None:
    armed = _armed.get(name)
    if armed is not None and next(armed.passages) == armed.passage:
        os.write(2, f"failpoint {name}: {armed.what} at passage {armed.passage}\n".encode())
        os.kill(os.getpid(), SIGNALS[armed.what])
