"""Each way in which a request leaves a worker is a row of a table in docs/structure.md, and does what its row says."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan

from penstock.bus.contract import Delivery
from penstock.bus.joined import JoinedMember
from penstock.config.settings import RecordSettings, StaySettings
from penstock.engine.contract import Outcome
from penstock.errors import PicturesNeeded, SequenceFailed
from penstock.messages import EndEvent, Job, Request, Result, Sampling, decode_message
from penstock.names import CLASSES, REASON_HEADER, STAGES, Pipeline, Stage
from penstock.prefill_worker.role import PrefillRole
from penstock.prefill_worker.stay import StayPolicy
from penstock.record import AppendOutcome, Claim
from penstock.telemetry import tracing
from penstock.testing.bus import Entry, MemoryMember
from penstock.testing.record import MemoryRecord, RequestRecord
from penstock.worker.task import StageOutput, Task
from penstock.worker.worker import Worker
from sim.endpoint import CountingEndpoint
from sim.line import InProcessPipeline, core_of, run_until_idle, run_until_running
from tests.endpoint.conftest import EndpointPipeline
from tests.record.play import alive, end

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "structure.md").read_text("utf-8").partition("\n## How a request leaves a worker\n")[2]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.partition("\n## ")[0].splitlines()]
TABLE = {row[0].strip("*").replace(" ", "_").lower(): row[1:] for row in ROWS if row[0].startswith("**")}
"""By exit the cells of its row: where, message, claim, log, result."""
# No lease and no waiting time passes here.
RECORD = RecordSettings(lease_s=600, retry_first_s=500, retry_cap_s=500, fail_attempts=3, max_attempts=3)


class View:
    """A request as a worker's bus and record have it. `key` is that of its messages, if they have one."""

    def __init__(self, worker: Worker, key: str | None) -> None:
        bus, pipeline = member_of(worker)._bus, worker.pipeline
        topics = [*member_of(worker)._topics.values(), *pipeline.input_topics("decode").values()]
        waiting = [one for topic in topics for one in bus.topics[topic].entries.values()]
        self.entry: Entry | None = next((one for one in waiting if one.message.key == key), None)
        self.status, self.log = worker.record.read_status(key or ""), worker.record.read_log(key or "")
        ends = [one for one in self.log if isinstance(one, EndEvent)]
        self.outcome = "" if not ends else "answer" if ends[0].error is None else "error"
        self.jobs, self.dead, self.results = (
            [one for one in bus.read_all(topic) if one.key == key]
            for topic in (pipeline.job_topic("interactive"), pipeline.dead_letter_topic, pipeline.results_topic)
        )


def member_of(worker: Worker) -> MemoryMember:
    """Return the member through which the worker's message came: of requests, where it has two."""
    member = worker.member._requests if isinstance(worker.member, JoinedMember) else worker.member
    assert isinstance(member, MemoryMember)
    return member


def records_of(worker: Worker) -> dict[str, RequestRecord]:
    assert isinstance(worker.record, MemoryRecord)
    return worker.record._records.records


def describe_exit(worker: Worker, before: View, after: View) -> list[str]:
    """Return message, claim, log and result in the words of the table."""
    entry, is_settled, added = before.entry, after.entry is not before.entry, after.log[len(before.log) :]
    assert entry is not None
    assert len(after.results) <= 1
    deferred = [one.delivery.position for one in worker.intake.queue._deferred]
    kept = "another's" if entry.member is not member_of(worker) else "held"
    kept = "deferred" if kept == "held" and str(entry.offset) in deferred else kept
    message = ("settled" if is_settled else kept) + ", dead letter" * (len(after.dead) - len(before.dead))
    log = "lost" if len(after.log) < len(before.log) else "as it was"
    if added:
        tokens = "token 0" if len(after.log) == 1 else "tokens"
        log = {"": tokens, "answer": "tokens, end", "error": "error"}[after.outcome]
    result = "none" if is_settled else "later"
    if len(after.results) > len(before.results):
        result = "answer" if decode_message(Result, after.results[-1].value).error is None else "error"
    elif len(after.jobs) > len(before.jobs):
        result = after.outcome or "decode's"
    result = "as logged" if before.outcome == result else result
    return [message, describe_claim(worker, before, after), log, result]


def describe_claim(worker: Worker, before: View, after: View) -> str:
    """Return what became of a request's claim in the words of the table."""
    was, now = before.status, after.status
    if now is None:
        return "none"
    if now.session:
        return "held" if now.session == worker.session.id else "another's"
    if was is not None and (was == now or was.stage == now.stage in ("end", "handed")):
        return "as it was"
    if now.stage in ("end", "handed"):
        return "ended" if now.stage == "end" else "handed off"
    if was is None:
        return "free"
    if now.stage != worker.stage:
        return "passed on"
    has_counted = now.attempts > was.attempts - bool(was.session)  # the claim itself is an attempt
    return "released, counts" if has_counted else "released"


def ask(key: str, **fields: Any) -> Request:
    sampling = Sampling(max_tokens=5, temperature=0, ignore_eos=True)
    return Request(id=key, **{"prompt": "In the beginning", "sampling": sampling, **fields})


def end_session(worker: Worker) -> None:
    worker.record.end_expired_sessions(0, worker.session.id)


def renew_session(worker: Worker) -> None:
    worker.session._sessions.parts[0].renew()


def give_away(worker: Worker) -> None:
    """Let the bus give a worker's deliveries to another member."""
    member_of(worker).give_back_all()
    member_of(worker)._bus.join_group(worker.role.kind, "another").poll(0.0, dict.fromkeys(CLASSES, 9))


def turn_until_deferred(worker: Worker) -> None:
    while worker.running or not len(worker.intake.queue):
        worker.run_once()


def turn_without_reading(worker: Worker) -> None:
    with patch.object(worker.role, "identify_request", side_effect=RuntimeError):
        worker.run_once()


def turn_after_giving_away(worker: Worker) -> None:
    run_until_running(worker)
    give_away(worker)
    run_until_idle(worker)


def turn_without_blocks(worker: Worker) -> None:
    """Turn a worker that finds no block any more for its request, which has two tokens and is preempted."""
    run_until_running(worker)
    (task,), core = worker.running.values(), core_of(worker)
    while len(task.log_events) < 2:
        worker.run_once()
    core.scheduler.preempt_sequence(core.scheduler.running[0])
    core.pool.allocate_blocks(core.num_free_blocks)
    run_until_idle(worker)


class Exits:
    """The exits, each a method of its row's name, on a pipeline on doubles of the servers."""

    def __init__(self, line: InProcessPipeline, row: list[str]) -> None:
        self._line, self._row = line, row

    def _check(self, worker: Worker, key: str | None = "r", act: Callable[[Worker], object] = run_until_idle) -> None:
        """Check that a request leaves the worker by `act` as its row says."""
        before = View(worker, key)
        act(worker)
        assert key not in worker.running
        assert describe_exit(worker, before, View(worker, key)) == self._row

    def _send(self, stage: Stage, key: str = "r", *, num_failed: int = 0, **fields: Any) -> Worker:
        """Let a request, or its job, wait for a stage; so many attempts were in vain. Return the stage's worker."""
        self._line.send_requests(ask(key, **fields))
        if stage == "decode":
            run_until_idle(self._line.prefill)
        worker = self._line.prefill if stage == "prefill" else self._line.decode
        for _ in range(num_failed):
            worker.record.release_claim(self._claim(worker, key), failed=True)
        return worker

    def _run(self, stage: Stage, key: str = "r", **given: Any) -> Worker:
        """Let a worker run a request, and return it. It has made no step with it."""
        run_until_running(worker := self._send(stage, key, **given))
        return worker

    def _claim(self, worker: Worker, key: str, session: str = "") -> Claim:
        """Claim a request that waits, by the worker's session or another."""
        entry = View(worker, key).entry
        assert entry is not None
        delivery = Delivery(entry.message.topic, str(entry.offset), entry.message.value, key, {}, "interactive", 0.0)
        asked = worker.intake.make_claim_request(delivery)
        assert asked is not None
        (claim,) = worker.record.claim_all(worker.stage, session or worker.session.id, [asked])
        assert isinstance(claim, Claim)
        return claim

    def _check_taken_over(self, stage: Stage, act: Callable[[Worker], object] = run_until_idle, **given: Any) -> None:
        """Let a worker with a request fall silent, and its session end; check the one that takes the request over."""
        self._send(stage, **given)
        with closing(self._line.silence_worker(stage)) as silent:
            worker = self._line.prefill if stage == "prefill" else self._line.decode
            end_session(silent)
            renew_session(worker)
            self._check(worker, act=act)

    def _check_stays(
        self,
        key: str,
        act: Callable[[Worker], object] = run_until_idle,
        settings: StaySettings | None = None,
        num_failed: int = 0,
        **fields: Any,
    ) -> None:
        """Let a worker of both stages have a request beside another that decodes; check how it leaves that.

        It is given no jobs: it could take its own.
        """
        self._send("prefill", key, num_failed=num_failed, **fields)
        stays = StayPolicy(settings or StaySettings(), lambda: {"decode"})
        with closing(self._line.make_auto(f"auto-{key}", stays)) as worker:
            assert isinstance(worker.member, JoinedMember)
            with patch.object(worker.member._jobs, "poll", return_value=[]):
                self._check(worker, key, act)

    # The exits.

    def answered(self) -> None:
        self._check(self._send("decode"))
        self._check(self._send("prefill", "short", sampling=Sampling(max_tokens=1)), "short")
        with CountingEndpoint() as endpoint, closing(EndpointPipeline(Pipeline("endpoints"))) as line:
            self._check(line.add_worker(endpoint), line.send(max_tokens=3).id)

    def answered_where_it_was_read(self) -> None:
        self._check_stays("here")
        self._check_stays("short", sampling=Sampling(max_tokens=1))

    def answered_behind_another_claim(self) -> None:
        self._check_stays("again", num_failed=1)

    def ended_with_an_error(self) -> None:
        """It is too late, cancelled before it hears of that or after, or invalid."""
        for stage in STAGES:
            worker = self._run(stage, f"{stage}-late")
            task = worker.running[f"{stage}-late"]
            task.message = task.message and task.message.model_copy(update={"deadline": 1.0})
            self._check(worker, task.id)
            for is_heard in (False, True):
                worker = self._run(stage, key := f"{stage}-{is_heard}")
                worker.record.cancel_request(key)
                if is_heard:
                    renew_session(worker)
                self._check(worker, key)
        self._check(self._send("prefill", prompt=None, token_ids=[5] * 5000))

    def given_up(self) -> None:
        """Its workers died, or it failed in each."""
        for stage in STAGES:
            for num_failed in (3, 2):
                worker = self._send(stage, key := f"{stage}-{num_failed}", num_failed=num_failed)
                with patch.object(core_of(worker).runner, "run_step", side_effect=RuntimeError):
                    self._check(worker, key)

    def unwritable(self) -> None:
        with patch.object(self._line.decode.role, "build_stage_output", side_effect=RuntimeError):
            self._check(self._send("decode"))

    def refused_by_redis(self) -> None:
        """The record is ended, and takes no end in its log, which is no log (`finish.lua`)."""
        records = records_of(self._line.decode)

        def refuse(claim: Claim, *_: object) -> AppendOutcome:
            records[claim.id] = records[claim.id]._replace(stage="end", session=None)
            return AppendOutcome.REFUSED

        with patch.object(self._line.decode.record, "_finish", refuse):
            self._check(self._send("decode"))

    def ended_before(self) -> None:
        for stage in STAGES:
            worker = self._send(stage, stage)
            worker.record.finish_request(self._claim(worker, stage), end())
            self._check(worker, stage)

    def ended_without_its_message(self) -> None:
        """It was taken over, or the bus gave the message to another worker while it ran."""
        self._check_taken_over("decode")
        give_away(decode := self._run("decode", "moved"))
        self._check(decode, "moved")
        self._check_stays("here", turn_after_giving_away)

    def handed_off(self) -> None:
        self._check(self._send("prefill"))
        self._check_stays("prompt", settings=StaySettings(max_prompt_tokens=1))

    def handed_off_later(self) -> None:
        """Its blocks went to others."""
        self._check_stays("preempted", turn_without_blocks)

    def handed_off_without_its_message(self) -> None:
        self._check_taken_over("prefill")

    def hand_off_refused(self) -> None:
        give_away(prefill := self._run("prefill"))
        self._check(prefill)

    def given_back(self) -> None:
        self._give_back()

    def passed_to_decode_again(self) -> None:
        with patch.object(self, "_row", TABLE["given_back"][1:]):
            self._give_back()
        renew_session(self._line.prefill)
        self._check(self._line.prefill)

    def _give_back(self) -> None:
        core = core_of(self._line.decode)

        def lack_pixels(*_: object) -> None:
            raise SequenceFailed(core.scheduler.running[0], PicturesNeeded("a row of a picture is not here"))

        with patch.object(core.runner, "run_step", lack_pixels):
            self._check(self._send("decode"), act=turn_until_deferred)

    def stale(self) -> None:
        """A request that was handed off comes again, or another job of one comes."""
        run_until_idle(self._send("prefill"))
        (job,) = self._line.bus.read_all(self._line.pipeline.job_topic("interactive"))
        self._check(self._send("prefill"))
        run_until_idle(self._line.decode)
        another = decode_message(Job, job.value).model_copy(update={"job": "another"})
        self._line.publish_bytes(another.encode(), "r", job.topic)
        self._check(self._line.decode)

    def conflict(self) -> None:
        run_until_idle(self._send("prefill"))
        self._check(prefill := self._send("prefill", prompt="And God said"))
        assert View(prefill, "r").dead[0].headers[REASON_HEADER].startswith("id_conflict")

    def unreadable(self) -> None:
        self._line.publish_bytes(b"{not json")
        self._check(self._line.prefill, None)
        with patch.object(self._line.prefill.role, "identify_request", side_effect=RuntimeError):
            self._check(self._send("prefill"))

    def busy(self) -> None:
        decode = self._send("decode")
        self._claim(decode, "r", alive(decode.record, "another"))
        self._check(decode, act=turn_until_deferred)

    def moved_before_its_claim(self) -> None:
        with patch.object((decode := self._send("decode")).intake, "is_long", lambda _: give_away(decode)):
            self._check(decode)

    def parked(self) -> None:
        prefill = self._send("prefill")
        fetched = prefill.member.poll(0.0, {"interactive": 1})
        with (
            patch.object(prefill.member, "list_prefetched", return_value=fetched),
            patch("penstock.worker.rescue.PATIENCE_LEASES", 0.0),
        ):
            self._check(prefill, act=lambda worker: worker.intake.rescuer.park_waiting_messages())

    def suspect(self) -> None:
        decode = self._run("decode", "another", num_failed=2)
        self._send("decode", num_failed=2)
        with patch.object(decode.engine, "begin_step", return_value=False):
            self._check(decode, act=Worker.run_once)

    def for_another_worker(self) -> None:
        """It asks for an adapter that another worker has."""
        prefill = self._send("prefill", model="sql")
        assert isinstance(prefill.role, PrefillRole)
        beat = {"stage": "auto", "state": "ready", "adapters": {"sql": "1" * 64}}
        prefill.role.adapters.read_beats = lambda: [beat]
        self._check(prefill, act=turn_until_deferred)
        assert prefill.record.take_over_free("prefill", alive(prefill.record, "another"), 1) == []  # it waits a moment

    def tried_again(self) -> None:
        with patch.object(core_of(self._line.decode).runner, "run_step", side_effect=RuntimeError):
            self._check(self._send("decode"), act=turn_until_deferred)

    def claim_lost(self) -> None:
        """Its token or its end is refused, or the worker hears of it."""
        for key in ("token", "end", "heard"):
            decode = self._run("decode", key)
            end_session(decode)
            assert decode.record.take_over_free("decode", alive(decode.record, "another"), 1)
            if key == "end":
                self._check(decode, key, lambda worker: worker._end_with(worker.running["end"], Outcome("stop")))
            if key == "heard":
                renew_session(decode)
            if key != "end":
                self._check(decode, key, turn_until_deferred)
            renew_session(decode)

    def unreadable_here(self) -> None:
        self._check_taken_over("decode", turn_without_reading)

    def given_up_here(self) -> None:
        self._check_taken_over("decode", turn_without_reading, num_failed=2)

    def record_lost(self) -> None:
        """Redis loses the record between the claim and the reading of the log."""
        decode = self._send("decode")
        records, build = records_of(decode), decode.role.build_stage_output
        decode.record.finish_request(self._claim(decode, "r"), end())

        def lose(task: Task) -> StageOutput | None:
            del records[task.id], task.claim.log[:]
            return build(task)

        with patch.object(decode.role, "build_stage_output", lose):
            self._check(decode, act=turn_until_deferred)

    def worker_leaves(self) -> None:
        decode = self._run("decode")
        for leave in (Worker.close, Worker.abandon):
            self._check(decode, act=leave)
            self._line.renew_decode()
            run_until_running(decode := self._line.decode)


PLAYED = [name for name in vars(Exits) if not name.startswith("_")]


def test_each_row_is_played_and_names_functions_of_the_worker() -> None:
    assert list(TABLE) == PLAYED
    source = "".join(path.read_text("utf-8") for path in (ROOT / "worker" / "penstock" / "worker").glob("*.py"))
    named = [name for where, *_ in TABLE.values() for name in re.findall(r"`(\w+)`", where)]
    assert [name for name in named if f"def {name}(" not in source] == []


@pytest.mark.in_memory
@pytest.mark.parametrize("name", PLAYED)
def test_a_request_leaves_a_worker_as_its_row_says(name: str, make_line: Callable[..., InProcessPipeline]) -> None:
    getattr(Exits(make_line(record=RECORD), TABLE[name][1:]), name)()


@pytest.mark.in_memory
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_settlement_that_is_refused_has_no_span(
    is_lost: bool, make_line: Callable[..., InProcessPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = list[str]()

    class NotedSpan(NonRecordingSpan):
        def __init__(self, name: str, *_: object, **attributes: object) -> None:
            super().__init__(INVALID_SPAN_CONTEXT)
            self._name = name

        def end(self, end_time: int | None = None) -> None:
            recorded.append(self._name)

    exits = Exits(make_line(record=RECORD), [])
    worker = exits._run("prefill")
    if is_lost:
        give_away(worker)
    monkeypatch.setattr(tracing, "start_span", NotedSpan)
    run_until_idle(worker)
    assert recorded.count("hand_off") == (not is_lost), recorded
