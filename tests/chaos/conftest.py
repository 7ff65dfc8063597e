"""What the tests of chaos share."""

import math
from collections.abc import Iterator

import pytest

from penstock.local.stack import WorkerSlot
from sim.chaos.faults import ANY_TIME, KillPlan
from sim.chaos.fork_server import ForkServer
from sim.chaos.history import History
from sim.chaos.system import ChaosStack, Servers
from sim.waiting import wait_for
from tests.chaos.quiet import all_ready


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Where workers are forked."""
    made = ForkServer(tmp_path_factory.mktemp("fork-server"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def stack(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosStack]:
    """One worker of each stage, which nobody kills."""
    directory = tmp_path_factory.mktemp("quiet")

    def plan_kill(worker: WorkerSlot, life: int) -> KillPlan:
        return KillPlan(ANY_TIME, 1, math.inf)

    with History(directory / "history.jsonl") as history, Servers(directory, "embedded", {}) as servers:
        fork_server.disk.remove_all()
        made = ChaosStack(
            directory / "stack",
            fork_server,
            history,
            servers,
            plan_kill,
            {"prefill": 1, "decode": 2},
            fork_server.disk.make_settings(),
            away={"decode-1"},
        )
        with made:
            wait_for(lambda: all_ready(made), "both workers are ready")
            yield made
