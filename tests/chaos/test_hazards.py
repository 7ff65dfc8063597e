"""What the rounds do to clocks, disks and processes reaches the workers, and only those it is meant for."""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import failpoints
from penstock.client.sync import Client
from penstock.errors import DeadlineExceeded
from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.tiers.host import HostTier
from penstock.messages import now_s
from penstock.names import CLASSES
from penstock.worker.load import UNKNOWN_PROMPT_TOKENS, WorkerLoad
from sim.chaos.faults import ANY_TIME, KillPlan
from sim.chaos.hazards import fail_where_full, set_clock, tell_wrong_load
from sim.chaos.history import History
from sim.chaos.system import ChaosStack, Servers
from sim.forked import is_stopped
from sim.waiting import PATIENCE_S, wait_for
from tests.kvstore.blocks import make_form, new_names, put


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosStack]:
    """One worker of each stage, which nobody kills."""
    directory = tmp_path_factory.mktemp("quiet")
    plan, size = KillPlan(ANY_TIME, 1, math.inf), {"prefill": 1, "decode": 1}
    with History(directory / "history.jsonl") as history, Servers(directory, "embedded", {}) as servers:
        made = ChaosStack(directory / "stack", history, servers, lambda _, __: plan, size)  # type: ignore[arg-type]
        with made:
            wait_for(lambda: all_ready(made), "both workers are ready")
            yield made


def all_ready(stack: ChaosStack) -> bool:
    """Return whether every worker that should run serves. Those that died are started again."""
    stack.restart_dead()
    return all(map(stack.is_ready, stack.workers))


def ask(stack: ChaosStack, first: int, deadline_in_s: float | None = None) -> list[int]:
    """Return the answer to a prompt that begins with a token of its own."""
    deadline = None if deadline_in_s is None else now_s() + deadline_in_s
    with Client(stack.addresses) as client:
        sent = client.submit(
            token_ids=[first, *range(10, 110)], max_tokens=8, temperature=0.0, ignore_eos=True, deadline=deadline
        )
        return client.result(sent, timeout_s=PATIENCE_S).token_ids


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_one_workers_clock_is_put_forward_and_back(stack: ChaosStack, stage: str) -> None:
    path = stack.clocks[f"{stage}-0"]
    answer = ask(stack, 1, deadline_in_s=600.0)
    for by_s in (900.0, -900.0):
        set_clock(path, by_s)
        assert ask(stack, 1, deadline_in_s=600.0) == answer
        with pytest.raises(DeadlineExceeded):
            ask(stack, 1, deadline_in_s=-1.0)
    set_clock(path, 0.0)


def test_a_freeze_stops_every_worker_until_it_is_over(stack: ChaosStack) -> None:
    pids = [worker.child.pid for worker in stack.workers if worker.child is not None]
    stack.freeze_all(lambda: wait_for(lambda: all(map(is_stopped, pids)), "all are stopped"))
    assert not any(map(is_stopped, pids))
    assert ask(stack, 4)
    assert [worker.child.pid for worker in stack.workers if worker.child is not None] == pids


def test_a_worker_follows_one_whose_clock_was_ahead(stack: ChaosStack) -> None:
    """A step back between two lives of a worker: the older one's heartbeat is of a later time."""
    worker = next(worker for worker in stack.workers if worker.stage == "decode")

    def serves() -> bool:
        stack.restart_dead()
        return stack.is_ready(worker)

    for by_s in (900.0, 0.0):
        set_clock(stack.clocks[worker.name], by_s)
        stack.kill_worker(worker)
        stack.restart_dead()
        wait_for(serves, "the next one serves")
    assert ask(stack, 3)


def test_while_a_disk_counts_as_full_it_takes_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", {})
    form, mark = make_form("a model"), tmp_path / "full"
    fail_where_full(mark)
    for is_full in (True, False):
        mark.touch() if is_full else mark.unlink()
        with contextlib.closing(HostTier(Arena.open_on_disk(form, tmp_path / "blocks", 2**20, str(tmp_path)))) as tier:
            assert put(tier, new_names(1), form) == [not is_full]
            assert tier.counters.errors == is_full


def test_a_worker_tells_a_load_that_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerLoad, "summarize_load", WorkerLoad.summarize_load)  # is undone with what is done here
    tell_wrong_load(100.0)
    told: Any = WorkerLoad().summarize_load(
        [], Counter(), dict.fromkeys(CLASSES, ()), dict.fromkeys(CLASSES, 3)
    )  # of which no length is known
    assert told["interactive"]["waiting_tokens"] == 100 * 3 * UNKNOWN_PROMPT_TOKENS
