"""A worker whose loop stands still keeps its requests up to a limit; then others go on, and its process ends."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.messages import Request, Sampling
from penstock.worker.watch import LIMIT_IN_STEPS, STALLED_EXIT_CODE, LoopWatch
from sim.line import InProcessPipeline
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import compute_answers
from tests.pipeline.site import worker_process

REQUEST = Request(id="a", prompt="In the beginning", sampling=Sampling(max_tokens=6, temperature=0, ignore_eos=True))


@pytest.mark.parametrize("point", ["decode.7.stepped", "decode.6.claimed"])
def test_a_process_whose_loop_stands_ends_itself_and_says_where(
    addresses: Addresses, tmp_path: Path, point: str
) -> None:
    settings = {"WORKER_STALL_LIMIT_S": "10"}
    with (
        worker_process("prefill", addresses, tmp_path),
        worker_process("decode", addresses, tmp_path, f"{point}=hold", settings) as held,
        Client(addresses) as client,
    ):
        client.submit("In the beginning", id="a", **REQUEST.sampling.model_dump())
        wait_for(lambda: not held.is_alive(), "the process ends itself")
        assert held.returncode == STALLED_EXIT_CODE
        log = held.read_log_tail(200)
        assert "the loop has stood still for more than" in log
        assert "failpoints.py:" in log
        assert "run_once" in log, "the stack"
        with worker_process("decode", addresses, tmp_path):
            assert client.result("a", timeout_s=PATIENCE_S).token_ids == compute_answers([REQUEST])["a"].token_ids


@pytest.mark.proof
def test_what_the_watch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("penstock.worker.watch.time.monotonic", lambda: now_s[0])
    watch = LoopWatch(8.0)

    def pass_time(time_s: float) -> bool:
        now_s[0] += time_s
        return watch.is_stalled()

    assert not pass_time(1000), "no worker is made yet"
    watch.note_turn()
    assert [pass_time(1.0) for _ in range(10)] == [False] * 9 + [True], "the first look finds the turn"
    watch.note_turn()
    assert not pass_time(1.0), "it goes on"
    assert [pass_time(3600.0) for _ in range(4)] == [False] * 4, "the process was stopped meanwhile: counted as 2 s"
    assert pass_time(3600.0)
    watch.note_turn()
    watch.note_step(now_s[0] - 1.0)
    assert watch.limit_s == LIMIT_IN_STEPS
    watch.note_left()
    assert [pass_time(2.0) for _ in range(20)] == [False] * 20


@pytest.mark.parametrize(
    ("bus", "expected"),
    [("embedded", []), ("kafka", ["kafka-another", "kafka-lookup-another", "penstock-rescue"])],
)
def test_a_worker_runs_no_more_threads_than_these(
    make_line: Callable[..., InProcessPipeline], bus: str, expected: list[str]
) -> None:
    """Beside its loop's and those that move KV. In a process of its own the session's is the heartbeat's as well."""
    line = make_line(bus=bus)
    before = set(threading.enumerate())
    line.add_decode("another")
    assert sorted(one.name for one in set(threading.enumerate()) - before) == [*expected, "penstock-session", "settler"]
