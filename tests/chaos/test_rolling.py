"""Every worker is restarted in its turn while it is used, with streams that it has to hand back: no error, no loss."""

import contextlib
import math
from pathlib import Path

import pytest

from benchmarks.rolling_phases import Roll, work
from penstock.local.kafka import SHORT_TIMEOUTS
from penstock.local.stack import WorkerSlot
from sim.chaos.checker import check
from sim.chaos.faults import ANY_TIME, Bus, Fate
from sim.chaos.history import History, read
from sim.chaos.nursery import Nursery
from sim.chaos.runner import write_down
from sim.chaos.system import DoomedStack, Servers
from tests.chaos.test_chaos import BUSES, needs


def fate(worker: WorkerSlot, life: int) -> Fate:
    """Nobody is killed."""
    return Fate(ANY_TIME, 1, math.inf)


@pytest.mark.thorough  # pipeline/test_kafka_outages.py restarts a worker of each stage under load
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bus", BUSES)
def test_a_rolling_restart_adds_no_error(bus: Bus, nursery: Nursery, tmp_path: Path) -> None:
    needs(bus)
    work()
    with contextlib.ExitStack() as exits:
        history = exits.enter_context(History(tmp_path / "history.jsonl"))
        servers = exits.enter_context(Servers(tmp_path, bus, SHORT_TIMEOUTS))
        settings = {"PENSTOCK_WORKER_DRAIN_S": "0.2"}
        stack = DoomedStack(tmp_path / "stack", nursery, history, servers, fate, (2, 2), settings)
        exits.enter_context(stack)
        stack.wait_until_ready(120)
        roll = Roll(stack, [], history, lambda line: None)
        roll.workers("rolling")
        write_down(stack, history)
    entries = list(read(history.path))
    assert len(roll.drains) == len(stack.workers) == sum(entry["what"] == "fell" for entry in entries)
    assert [entry for entry in entries if entry["what"] == "end" and entry["error"]] == []
    assert check(entries) == []
