"""Long messages are read beside the engine's steps, and nothing of the protocol changes by that."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.bus.contract import Delivery
from penstock.config.settings import RecordSettings
from penstock.messages import Job, Request, Sampling, compute_body_hash, decode_message
from penstock.names import Pipeline
from penstock.prefill_worker.role import MAX_INLINE_BYTES, PrefillRole
from penstock.prefill_worker.tokenize import PromptTokenizer
from penstock.record import Claim
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, run_until_idle
from sim.waiting import PATIENCE_S, wait_for
from sim.workload import load_demo_model, make_requests
from tests.pipeline.checks import check_tokens
from tests.record.play import alive, claim_prefill, die, say


class Reader(PromptTokenizer):
    """Reads the request `long` once it is let."""

    def __init__(self) -> None:
        super().__init__(load_demo_model())
        self.is_let = threading.Event()
        self.begun: list[str] = []
        self.failures = 0
        """So many times more reading `long` fails."""

    def tokenize_prompt(
        self, request: Request, *, may_wait: bool = True, is_raw: bool = False, **given: Any
    ) -> list[int]:
        self.begun.append(request.id)
        if request.id == "long":
            assert self.is_let.wait(PATIENCE_S)
            if self.failures:
                self.failures -= 1
                raise RuntimeError("a bug in the tokenizer")
        return super().tokenize_prompt(request, **given)


@pytest.fixture
def line(make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(record=RecordSettings(lease_s=0.4, retry_first_s=0.01))


@pytest.fixture
def patient(make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    """Nothing waits for two leases here: after these a message is parked, and may be read again."""
    return make_line(record=RecordSettings(lease_s=600))


@pytest.fixture
def work(pipeline: Pipeline) -> list[Request]:
    """Three that are neighbours of the fourth, which is called `long`."""
    found = make_requests(4, pipeline.name, max_tokens=4)
    return [*found[:3], found[3].model_copy(update={"id": "long"})]


def slowed(worker: Worker) -> Reader:
    assert isinstance(worker.role, PrefillRole)
    worker.role.prompt_reader = reader = Reader()
    return reader


def publish_long(line: InProcessPipeline, request: Request) -> None:
    line.publish_bytes(request.encode() + b" " * MAX_INLINE_BYTES, request.id)  # JSON may end in spaces


def turn_until(worker: Worker, request_id: str, reader: Reader) -> None:
    """Turn until the worker has begun to read a request."""

    def has_begun() -> bool:
        worker.run_once()
        return request_id in reader.begun

    wait_for(has_begun, f"{request_id} is being read", 0)


@pytest.mark.in_memory
def test_neighbours_go_on_while_a_long_message_is_read(patient: InProcessPipeline, work: list[Request]) -> None:
    reader = slowed(patient.prefill)
    publish_long(patient, work[-1])
    turn_until(patient.prefill, "long", reader)
    patient.send_requests(*work[:3])

    def are_handed_off() -> bool:
        patient.prefill.run_once()
        return len(patient.bus.read_all(patient.pipeline.job_topic("interactive"))) == 3

    wait_for(are_handed_off, "the neighbours' jobs", 0)
    status = patient.prefill.record.read_status("long")
    assert status is not None
    assert (status.session, status.attempts) == (patient.prefill.session.id, 1), "reading it is an attempt"
    reader.is_let.set()
    check_tokens(patient.run_until_results(4), work)
    assert reader.begun.count("long") == 1


@pytest.mark.in_memory
def test_who_has_read_a_message_waits_for_no_other(
    patient: InProcessPipeline, work: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker without other work waits in `poll`: the request that it is to claim would wait with it."""
    worker, reader, waits = patient.prefill, slowed(patient.prefill), list[bool]()
    publish_long(patient, work[-1])
    turn_until(worker, "long", reader)
    reader.is_let.set()
    wait_for(worker.intake.reader._open[0].task.done, "it is read")
    poll = worker.intake.queue.poll

    def note_wait(*args: int, is_idle: bool, wait_s: float) -> list[Delivery]:
        waits.append(is_idle)
        return poll(*args, is_idle=is_idle, wait_s=wait_s)

    monkeypatch.setattr(worker.intake.queue, "poll", note_wait)
    worker.run_once()
    assert waits == [False]
    assert "long" in worker.running


@pytest.mark.in_memory
def test_what_is_being_read_counts_against_capacity(patient: InProcessPipeline, work: list[Request]) -> None:
    reader = slowed(patient.prefill)
    patient.prefill.load.mean_prompt_tokens["interactive"].add(1)
    patient.prefill.run_once()
    capacity = patient.prefill.load.capacities["interactive"]
    assert capacity > 1
    publish_long(patient, work[-1])
    turn_until(patient.prefill, "long", reader)
    patient.prefill.run_once()
    assert patient.prefill.load.capacities["interactive"] == capacity - 1
    assert not patient.prefill.is_settled()
    reader.is_let.set()
    patient.run_until_results(1)


@pytest.mark.in_memory
def test_messages_that_wait_for_one_that_is_not_read_go_on_elsewhere(
    line: InProcessPipeline, work: list[Request]
) -> None:
    """The one that is being read stays where it is. Their first worker does not take the others back meanwhile."""
    first, reader = line.prefill, slowed(line.prefill)
    publish_long(line, work[-1])
    turn_until(first, "long", reader)
    for request in work[:3]:
        publish_long(line, request)

    def are_waiting() -> bool:
        first.run_once()
        return len(first.intake.reader) == 4

    wait_for(are_waiting, "four wait to be read", 0)
    line.add_prefill("prefill-1")

    def are_answered() -> bool:
        for worker in (first, line.prefill, line.decode):
            worker.run_once()
        return len(line.read_results()) == 3

    wait_for(are_answered, "the idle worker goes on with them", 0)
    assert reader.begun == ["long"]
    reader.is_let.set()
    run_until_idle(first)
    check_tokens(line.run_until_results(4), work)
    first.close()


def taking_over(line: InProcessPipeline, request: Request) -> tuple[Worker, Reader]:
    """A silent worker, and the reader of the worker that took its request over and is reading the message."""
    publish_long(line, request)
    silent, reader = line.silence_worker("prefill"), slowed(line.prefill)
    turn_until(line.prefill, "long", reader)
    return silent, reader


def test_a_request_that_is_taken_over_stays_held_while_it_is_read(line: InProcessPipeline, work: list[Request]) -> None:
    silent, reader = taking_over(line, work[-1])
    sessions, session = line.pipeline.sessions_key, line.prefill.session.id
    lease_ms = line.prefill.record.lease_s * 1000

    def lasts_until_ms() -> float:
        return float(line.client.zscore(sessions, session) or 0)

    begun_ms = lasts_until_ms()
    wait_for(lambda: lasts_until_ms() > begun_ms + 2 * lease_ms, "more than a lease")
    third = alive(line.prefill.record, "a-third")
    assert line.prefill.record.take_over_free("prefill", third, 10) == []
    reader.is_let.set()
    line.run_prefill(1)
    run_until_idle(line.decode)
    check_tokens(line.read_results(), work[-1:])
    run_until_idle(silent)
    silent.close()


@pytest.mark.in_memory
def test_a_worker_that_leaves_gives_back_what_it_took_over_and_reads(
    line: InProcessPipeline, work: list[Request]
) -> None:
    silent, reader = taking_over(line, work[-1])
    line.prefill.close()
    (taken,) = silent.record.take_over_free("prefill", alive(silent.record, "a-third"), 10)
    assert taken.claim.id == "long", "at once, though a lease has not passed"
    reader.is_let.set()
    silent.close()
    line.add_prefill("prefill-2")
    line.run_until_results(1)


@pytest.mark.in_memory
def test_a_request_that_was_taken_over_and_cannot_be_read_is_tried_again(
    line: InProcessPipeline, work: list[Request]
) -> None:
    silent, reader = taking_over(line, work[-1])
    reader.failures = 1
    reader.is_let.set()
    line.run_prefill(1)
    check_tokens(line.run_until_results(1), work[-1:])
    assert reader.begun.count("long") == 2
    silent.close()


def test_a_chat_that_an_older_worker_began_keeps_its_tokens(line: InProcessPipeline) -> None:
    """It read a control token in a text as one. The answer goes on behind the prompt that it was begun with."""
    turns, record = [{"role": "user", "content": "a</s>b"}], line.prefill.record
    requests = {
        name: Request.model_validate({"id": name, "messages": turns, "sampling": Sampling(max_tokens=4)})
        for name in ("older", "newer")
    }
    for name, request in requests.items():
        claim = claim_prefill(record, name, alive(record, "another"), compute_body_hash(request))
        assert isinstance(claim, Claim)
        say(record, claim, [5])
        if name == "older":
            line.client.hdel(line.pipeline.record_key(name), "reading")
        die(record, "another")
    line.send_requests(*requests.values())
    line.run_prefill(2)
    found = [decode_message(Job, one.value) for one in line.bus.read_all(line.pipeline.job_topic("interactive"))]
    tokenizer = load_demo_model().tokenizer
    assert {job.id: job.token_ids for job in found} == {
        "older": tokenizer("a</s>b", add_special_tokens=False)["input_ids"],
        "newer": line.prompt_tokenizer.tokenize_prompt(requests["newer"]),
    }
    assert {job.id: job.token_ids.count(tokenizer.eos_token_id) for job in found} == {"older": 1, "newer": 0}
