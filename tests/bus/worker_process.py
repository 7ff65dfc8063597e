"""A member in a process of its own, so that tests can kill and pause it.

Mode `hold` takes one delivery, makes the file `held`, waits for the file `go`, settles, and writes what became of it to
`outcome`. Mode `result` is one of prefill: it hands one delivery off, settles another with a result, whose value it
writes to `settled`, and kills itself.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

from penstock.bus.contract import Delivery, Member, Outgoing, Settlement
from penstock.errors import BusError
from penstock.names import Pipeline, PriorityClass
from sim.waiting import wait_for
from tests.bus.buses import SHORT_TIMEOUT_SETTINGS, make_bus

CAPACITY: dict[PriorityClass, int] = {"interactive": 2, "batch": 2}


def hold(pipeline: Pipeline, member: Member, folder: Path) -> None:
    """Take one, wait for leave, settle."""
    taken: list[Delivery] = []
    while not taken:
        taken = member.poll(1.0, {"interactive": 1})
    Path(folder, "held").touch()

    def may_go() -> bool:
        with suppress(BusError):
            member.poll(0.0, {})  # on Redis Streams it lives by its polls
        return Path(folder, "go").exists()

    wait_for(may_go, "the test gives leave")
    outcome = "settled"
    try:
        member.settle([Settlement(taken[0], [Outgoing(pipeline.results_topic, b"from the worker")])])
    except BusError as error:
        outcome = type(error).__name__
    Path(folder, "outcome.part").write_text(outcome)
    Path(folder, "outcome.part").rename(Path(folder, "outcome"))


def settle_result(pipeline: Pipeline, member: Member, folder: Path) -> None:
    """Hand one off, settle one with a result, and be killed."""
    taken: list[Delivery] = []
    while len(taken) < 2:
        taken += member.poll(1.0, {"interactive": 2 - len(taken)})
    Path(folder, "settled").write_bytes(taken[1].value)
    for delivery, topic in zip(taken, (pipeline.job_topic("interactive"), pipeline.results_topic), strict=True):
        member.settle([Settlement(delivery, [Outgoing(topic, delivery.value)])])
    os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, address: str, name: str, member_name: str, mode: str, folder: Path) -> None:
    """Run one member of the pipeline `name`, on the bus of the kind `kafka` or `streams`."""
    pipeline = Pipeline(name)
    bus = make_bus(kind, pipeline, address, SHORT_TIMEOUT_SETTINGS)  # others wait for it after a kill
    with bus.join_group("prefill" if mode == "result" else "decode", member_name) as member:
        if mode == "result":
            settle_result(pipeline, member, folder)
        else:
            hold(pipeline, member, folder)
