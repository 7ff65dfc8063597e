"""A worker whose loop stands still keeps its requests up to a limit; then others go on, and its process ends."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock import failpoints
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, Request, Sampling
from penstock.names import Stage
from penstock.worker.loop import run_until_idle
from penstock.worker.watch import LIMIT_IN_STEPS, STALLED_EXIT_CODE, LoopWatch
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, run_until_running
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import compute_answers
from tests.pipeline.workers import worker_process
from tests.record.play import alive

REQUEST = Request(id="a", prompt="In the beginning", sampling=Sampling(max_tokens=6, temperature=0, ignore_eos=True))
POINTS: dict[Stage, str] = {"prefill": "prefill.3.stepped", "decode": "decode.7.stepped"}


@pytest.fixture
def line(make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(record=RecordSettings(lease_s=0.3))


class HeldStep:
    """A worker whose next turn stands still on a thread of its own, in the engine's step, until it is let go on."""

    def __init__(self, worker: Worker, stage: Stage) -> None:
        self._is_held, self._is_let = threading.Event(), threading.Event()
        failpoints.arm_action(POINTS[stage], self._hold, 1)
        self._thread = threading.Thread(target=worker.run_once)
        self._thread.start()
        assert self._is_held.wait(PATIENCE_S)

    def _hold(self) -> None:
        self._is_held.set()
        self._is_let.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._is_let.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def begin(line: InProcessPipeline, stage: Stage) -> Worker:
    """Let the worker of a stage run the request. Return the worker."""
    line.send_requests(REQUEST)
    if stage == "decode":
        line.run_prefill(1)
    worker = line.prefill if stage == "prefill" else line.decode
    run_until_running(worker)
    return worker


@pytest.mark.in_memory
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_long_step_loses_nothing(line: InProcessPipeline, stage: Stage) -> None:
    worker = begin(line, stage)
    held, session = HeldStep(worker, stage), worker.session._sessions.parts[0]
    begun_ms, four_leases_ms = session._last.until_ms, 4000 * worker.record.lease_s
    wait_for(lambda: session._last.until_ms > begun_ms + four_leases_ms, "four leases of renewals")
    assert worker.record.take_over_free(stage, alive(worker.record, "another"), 9) == []
    held.let_go()
    assert session.collect_events() == []
    run_until_idle(worker)
    (result,) = line.run_until_results(1)
    assert result.token_ids == compute_answers([REQUEST])["a"].token_ids


@pytest.mark.in_memory
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_step_that_does_not_return_keeps_no_request(line: InProcessPipeline, stage: Stage) -> None:
    worker = begin(line, stage)
    held = HeldStep(worker, stage)
    (line.add_prefill if stage == "prefill" else line.add_decode)("another")
    other = line.prefill if stage == "prefill" else line.decode
    worker.watch._limit_s = 0.5
    worker.watch._longest_step_s = 0.0

    def has_taken() -> bool:
        other.run_once()
        return bool(other.running)

    wait_for(has_taken, "another worker goes on", 0)
    expected = compute_answers([REQUEST])["a"].token_ids

    def has_ended() -> bool:
        other.run_once()
        line.decode.run_once()
        return is_ended(other)

    wait_for(has_ended, "the answer's end", 0)
    held.let_go()
    while not line.read_results():
        worker.run_once()
        line.decode.run_once()
    run_until_idle(worker)
    assert [result.token_ids for result in line.read_results()] == [expected]
    worker.close()


def is_ended(worker: Worker) -> bool:
    """Return whether the request's log has its end."""
    return any(isinstance(event, EndEvent) for event in worker.record.read_log("a"))


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
        log = held.read_log_tail(80)
        assert "the loop has stood still for more than" in log
        assert "failpoints.py:" in log
        assert "run_once" in log, "the stack"
        with worker_process("decode", addresses, tmp_path):
            assert client.result("a", timeout_s=PATIENCE_S).token_ids == compute_answers([REQUEST])["a"].token_ids


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
