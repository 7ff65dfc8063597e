"""What the rounds do to clocks and processes reaches the workers, and only those it is meant for."""

import pytest

from penstock.errors import DeadlineExceeded
from sim.chaos import clock
from sim.chaos.fork_server import ForkServer
from sim.chaos.system import ChaosStack
from sim.waiting import wait_for
from tests.chaos.quiet import all_ready, ask


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
