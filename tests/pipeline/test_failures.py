"""Requests that fail or kill their workers end with a typed error, and all others are answered."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from penstock import names
from penstock.bus.contract import Outgoing
from penstock.config.settings import RecordSettings
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.steps.step_batch import StepBatch
from penstock.errors import KVStoreError
from penstock.messages import Request, Result, Sampling, compute_body_hash
from penstock.names import Stage
from penstock.record import Busy, Claim
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, core_of, run_until_idle, serving_engine
from sim.waiting import wait_for
from sim.workload import compute_answers, make_requests
from tests.record.play import claim_prefill

pytestmark = pytest.mark.in_memory

POISON = 499
"""A token that no other prompt of the tests has."""
RECORD = RecordSettings(retry_first_s=0.05, lease_s=0.4)


@pytest.fixture
def line(make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(record=RECORD)


def poison(name: str = "poison", max_tokens: int = 8) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(id=name, token_ids=[7, 8, POISON, 9], sampling=sampling)


GOOD = Request(id="good", prompt="In the beginning", sampling=Sampling(max_tokens=4))


def breaks(
    line: InProcessPipeline, stage: Stage, error: Callable[[], Exception], output: int = 0, times: int = 1000
) -> None:
    """Let steps of a worker fail, `times` times, that have a poisoned request with `output` or more output tokens."""
    engine = core_of(line.prefill if stage == "prefill" else line.decode)
    right, left = engine.runner.run_step, [times]

    def broken(batch: StepBatch) -> object:
        if left[0] and any(POISON in seq.token_ids and seq.num_output_tokens >= output for seq, _ in batch.plan):
            left[0] -= 1
            raise error()
        return right(batch)

    engine.runner.run_step = broken  # type: ignore[assignment, method-assign]


def check(
    line: InProcessPipeline, work: list[Request], results: list[Result], num_errors: int = 1
) -> dict[str, Result]:
    """Check that each request has one result, those in `work` with the right answer. Return the others."""
    assert len({result.id for result in results}) == len(results) == len(work) + num_errors
    expected = compute_answers(work)
    found = {result.id: result for result in results}
    for request in work:
        assert found.pop(request.id).token_ids == expected[request.id].token_ids
    assert core_of(line.prefill).num_free_blocks == core_of(line.prefill).pool.num_blocks
    assert core_of(line.decode).num_free_blocks == core_of(line.decode).pool.num_blocks
    return found


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_who_makes_steps_fail_ends_alone(stage: Stage, make_line: Callable[..., InProcessPipeline]) -> None:
    line = make_line(record=RecordSettings(retry_first_s=0.05, lease_s=600))
    begun_ms = time.time_ns() // 1_000_000
    work, output = make_requests(8, line.pipeline.name), 0 if stage == "prefill" else 3
    breaks(line, stage, lambda: ZeroDivisionError("a bug"), output)
    line.send_requests(*work[:4], poison(), *work[4:])
    result = check(line, work, line.run_until_results(9))["poison"]
    assert result.error is not None
    assert (result.error.code, result.error.message) == ("model_error", "ZeroDivisionError: a bug")
    assert len(result.token_ids) == output
    (dead,) = line.run_until_dead(1)
    assert dead.key == "poison"
    assert dead.headers[names.REASON_HEADER] == "model_error: ZeroDivisionError: a bug"
    assert dead.headers[names.STACK_HEADER].rstrip().endswith("ZeroDivisionError: a bug")
    assert "in broken" in dead.headers[names.STACK_HEADER]
    assert dead.headers[names.ORIGIN_HEADER] == line.pipeline.input_topics(stage)["interactive"]
    assert dead.headers[names.ATTEMPT_HEADER] == "3"  # in decode without the attempt that appended tokens
    assert begun_ms <= int(dead.headers[names.BURIED_HEADER]) <= time.time_ns() // 1_000_000


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_what_fails_for_a_while_is_answered(line: InProcessPipeline, stage: Stage) -> None:
    breaks(line, stage, lambda: MemoryError("not now"), times=2)
    line.send_requests(poison())
    (result,) = line.run_until_results(1)
    assert result.error is None
    assert len(result.token_ids) == 8
    assert line.read_dead_letters() == []


@pytest.mark.parametrize(
    ("place", "error", "code"),
    [
        ("make_hasher", KVStoreError, "store_unreachable"),
        ("make_hasher", KeyError, "internal_error"),
        ("tokenize_prompt", ZeroDivisionError, "internal_error"),
    ],
)
def test_what_cannot_even_begin_ends_and_stops_nobody(
    line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch, place: str, error: type[Exception], code: str
) -> None:
    owner = serving_engine(line.prefill).store if place == "make_hasher" else line.prompt_tokenizer
    right = getattr(owner, place)

    def broken(about: Any, *given: Any, **how: Any) -> Any:
        if about == "odd" or getattr(about, "tenant", "") == "odd":
            raise error("a bug")
        return right(about, *given, **how)

    monkeypatch.setattr(owner, place, broken)
    work = make_requests(2, line.pipeline.name)
    line.send_requests(work[0], poison().model_copy(update={"tenant": "odd"}), work[1])
    result = check(line, work, line.run_until_results(3))["poison"]
    assert result.error is not None
    assert result.error.code == code
    (dead,) = line.run_until_dead(1)
    assert "in broken" in dead.headers[names.STACK_HEADER]
    assert dead.headers[names.ATTEMPT_HEADER] == "3"


BAD_JOB = b'{"v": 1, "id": "bad", "job": "j1", "of_a_later_version": true}'


def test_a_job_that_cannot_be_read_has_a_result(line: InProcessPipeline) -> None:
    """And only one: it is bound by its name, as any other. A copy is in the dead letters."""
    headers = {names.TENANT_HEADER: "acme"}
    topic = line.pipeline.job_topic("interactive")
    stale = BAD_JOB.replace(b"j1", b"j2")
    line.publisher.publish([Outgoing(topic, value, "bad", headers) for value in (BAD_JOB, stale)])
    line.send_requests(GOOD)
    results = {result.id: result for result in line.run_until_results(2)}
    run_until_idle(line.decode)
    assert len(line.read_results()) == 2
    assert results[GOOD.id].error is None
    assert results["bad"].tenant == "acme"
    assert results["bad"].error is not None
    assert results["bad"].error.code == "internal_error"
    assert "of_a_later_version" in results["bad"].error.message
    (letter,) = line.run_until_dead(1)
    assert (letter.value, letter.headers[names.ORIGIN_HEADER]) == (BAD_JOB, topic)


def test_waiting_times_grow_up_to_the_cap(make_line: Callable[..., InProcessPipeline]) -> None:
    """Nobody may claim the record or take it over meanwhile, and the worker keeps the delivery."""
    settings = RecordSettings(fail_attempts=9, retry_first_s=200.0, retry_factor=3.0, retry_cap_s=1000.0)
    line = make_line(record=settings)
    breaks(line, "prefill", lambda: ZeroDivisionError("a bug"))
    waits = []
    for number in range(3):
        request = poison(f"poison-{number}")
        for _ in range(number):
            claim = claim_prefill(line.prefill.record, request.id, line.prefill.session.id, compute_body_hash(request))
            assert isinstance(claim, Claim)
            line.prefill.record.release_claim(claim, failed=True)
        line.send_requests(request)
        while len(line.prefill.intake.queue) <= number:
            line.prefill.run_once()
        busy = claim_prefill(line.prefill.record, request.id, line.prefill.session.id, compute_body_hash(request))
        assert isinstance(busy, Busy)
        waits.append(busy.wait_s)
    assert waits == pytest.approx([200, 600, 1000], abs=150)
    assert line.prefill.record.take_over_free("prefill", line.prefill.session.id, 9) == []
    assert line.prefill.member.count_held() == 3
    line.send_requests(GOOD)
    while not line.bus.read_all(line.pipeline.job_topic("interactive")):  # what is kept holds up nobody
        line.prefill.run_once()


def test_a_worker_has_one_at_a_time_that_may_kill_it(line: InProcessPipeline) -> None:
    """The others are given back, and their attempts do not count while they wait."""
    work, record, most = make_requests(4, line.pipeline.name), line.prefill.record, 0
    for request in work:
        for _ in range(2):
            claim = claim_prefill(record, request.id, line.prefill.session.id, compute_body_hash(request))
            assert isinstance(claim, Claim)
            record.release_claim(claim, failed=True)
    line.send_requests(*work)

    def is_through() -> bool:
        line.prefill.run_once()
        nonlocal most
        seqs = [task.seq for task in line.prefill.running.values()]
        num_suspects = sum(isinstance(seq, EngineSequence) and seq.is_suspect for seq in seqs)
        most = max(most, num_suspects)
        assert num_suspects <= 1
        return most > 0 and not line.prefill.running and line.prefill.is_settled()

    wait_for(is_through, "all through", 0)
    check(line, work, line.run_until_results(4), num_errors=0)
    assert line.read_dead_letters() == []


def kill(worker: Worker) -> None:
    """Let a worker end as by SIGKILL, and its session at once."""
    worker.session.stop()
    worker.settler.abandon()
    worker.intake.rescuer.close()
    worker.engine.abandon()
    worker.member.close()
    worker.record.end_expired_sessions(0, worker.session.id)
    worker.record.close()


class Killed(BaseException):
    """A fault in native code, which no worker handles."""


@pytest.mark.proof
def test_who_kills_its_workers_is_given_up_and_its_neighbours_are_answered(
    make_line: Callable[..., InProcessPipeline],
) -> None:
    """One request for each stage: in decode the first attempt made tokens, and those after it none."""
    line = make_line(record=RecordSettings(max_attempts=3, lease_s=600))  # none ends as the machine is slow
    work, num_killed = make_requests(4, line.pipeline.name), {"prefill": 0, "decode": 0}
    line.send_requests(*work[:2], poison("kills-prefill", 1), *work[2:], poison("kills-decode", 30))

    def run(worker: Worker) -> None:
        """Turn a worker, or kill it by a poisoned step and start the next one."""
        right = core_of(worker).runner.run_step

        def deadly(batch: StepBatch) -> object:
            for seq, _ in batch.plan:
                kills = seq.id == "kills-prefill" if worker.stage == "prefill" else seq.num_output_tokens == 3
                if POISON in seq.token_ids and kills:
                    raise Killed
            return right(batch)

        for session in worker.session._sessions.parts:  # they learn what the dead have left
            session.renew()
        try:
            with mock.patch.object(core_of(worker).runner, "run_step", deadly):
                worker.run_once()
        except Killed:
            kill(worker)
            num_killed[worker.stage] += 1
            add = line.add_prefill if worker.stage == "prefill" else line.add_decode
            add(f"{worker.stage}-{num_killed[worker.stage]}")

    def have_ended() -> bool:
        run(line.prefill)
        run(line.decode)
        return len(line.read_results()) == 6

    wait_for(have_ended, "all have their results", 0)
    for worker in (line.prefill, line.decode):  # a result can be read before its worker has seen that it is settled
        run_until_idle(worker)
    found = check(line, work, line.read_results(), num_errors=2)
    for result in found.values():
        assert result.error is not None
        assert result.error.code == "attempts_exhausted"
        assert result.error.message.startswith("worker lost: 3 in a row")
    assert num_killed == {"prefill": 3, "decode": 4}  # in decode once more, with the first tokens
    letters = {letter.key: letter.headers[names.ATTEMPT_HEADER] for letter in line.run_until_dead(2)}
    assert letters == {"kills-prefill": "3", "kills-decode": "3"}
