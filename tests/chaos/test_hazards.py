"""What the rounds do to disks and clocks reaches the workers, and only those it is meant for."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import failpoints
from penstock.client.sync import Client
from penstock.errors import DeadlineExceeded
from penstock.kvstore.tiers.host import HostTier
from penstock.local.stack import WorkerSlot
from penstock.messages import now_s
from sim.chaos import clock
from sim.chaos.disk import SmallDisk, simulate_full_disk
from sim.chaos.faults import ANY_TIME, KillPlan
from sim.chaos.fork_server import ForkServer
from sim.chaos.history import History
from sim.chaos.system import ChaosStack, Servers
from sim.waiting import PATIENCE_S, wait_for
from tests.kvstore.blocks import make_form, new_names, put

TOKENS = list(range(10, 110))


@pytest.fixture(scope="module")
def stack(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosStack]:
    """One worker of each stage, which nobody kills."""
    directory = tmp_path_factory.mktemp("hazards")

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
            (1, 2),
            fork_server.disk.make_settings(),
            away={"decode-1"},
        )
        with made:
            wait_for(lambda: all_ready(made), "both workers are ready")
            yield made


def all_ready(stack: ChaosStack) -> bool:
    stack.restart_dead()
    return all(stack.is_ready(worker) for worker in stack.workers if worker.name not in stack.absent)


def ask(stack: ChaosStack, first: int, deadline_in_s: float | None = None) -> list[int]:
    """The answer to a prompt that begins with a token of its own."""
    deadline = None if deadline_in_s is None else now_s() + deadline_in_s
    with Client(stack.addresses) as client:
        sent = client.submit(
            token_ids=[first, *TOKENS], max_tokens=8, temperature=0.0, ignore_eos=True, deadline=deadline
        )
        return client.result(sent, timeout_s=PATIENCE_S).token_ids


def test_a_full_disk_takes_no_block_and_does_no_harm(stack: ChaosStack) -> None:
    disk = stack.disk
    disk.fill_up()
    answer = ask(stack, 1)
    assert ask(stack, 2)
    assert ask(stack, 1) == answer
    assert disk.count_blocks() == 0
    disk.free_space()

    others = itertools.count(10)
    wait_for(lambda: ask(stack, next(others)) and disk.count_blocks() > 0, "blocks are on the disk again")


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_one_workers_clock_is_put_forward_and_back(stack: ChaosStack, stage: str) -> None:
    path = stack.clocks[f"{stage}-0"]
    answer = ask(stack, 1, deadline_in_s=600.0)
    for by_s in (900.0, -900.0):
        clock.set_clock(path, by_s)
        assert ask(stack, 1, deadline_in_s=600.0) == answer
        with pytest.raises(DeadlineExceeded):
            ask(stack, 1, deadline_in_s=-1.0)
    clock.set_clock(path, 0.0)


def test_where_nothing_can_be_mounted_the_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", {})
    disk, form = SmallDisk(tmp_path), make_form("a model")
    disk.is_real = False
    simulate_full_disk(str(disk.path))
    disk.fill_up()
    with contextlib.closing(HostTier.open_disk(form, disk.path / "blocks", 2**20, str(tmp_path))) as tier:
        assert put(tier, new_names(1), form) == [False]
        assert tier.counters.errors == 1
    disk.free_space()
    with contextlib.closing(HostTier.open_disk(form, disk.path / "blocks", 2**20, str(tmp_path))) as tier:
        assert put(tier, new_names(1), form) == [True]


def test_a_freeze_stops_every_worker_until_it_is_over(stack: ChaosStack, fork_server: ForkServer) -> None:
    pids = [worker.child.pid for worker in stack.workers if worker.child is not None]
    stack.freeze_all(lambda: wait_for(lambda: all(map(fork_server.is_stopped, pids)), "all are stopped"))
    assert ask(stack, 4)
    assert [worker.child.pid for worker in stack.workers if worker.child is not None] == pids


def test_a_worker_comes_and_leaves(stack: ChaosStack) -> None:
    stack.absent.discard("decode-1")
    wait_for(lambda: all_ready(stack), "it serves")
    stack.absent.add("decode-1")

    def is_gone() -> bool:
        stack.restart_dead()
        return stack.get_child("decode-1") is None

    wait_for(is_gone, "it has left")
    assert stack.counts.crashes == []


def test_a_worker_follows_one_whose_clock_was_ahead(stack: ChaosStack) -> None:
    """A step back between two lives of a worker: the older one's heartbeat is of a later time."""
    worker = next(worker for worker in stack.workers if worker.stage == "decode")

    def serves() -> bool:
        stack.restart_dead()
        return stack.is_ready(worker)

    for by_s in (900.0, 0.0):
        clock.set_clock(stack.clocks[worker.name], by_s)
        stack.kill_worker(worker)
        stack.restart_dead()
        wait_for(serves, "the next one serves")
    assert ask(stack, 3)
