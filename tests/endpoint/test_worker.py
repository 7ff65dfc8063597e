"""An endpoint worker answers what is in the requests topic, whatever endpoints and workers do."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.client.core import StreamReader
from penstock.endpoint_worker.answer import Piece
from penstock.errors import StreamDiverged
from penstock.messages import EndEvent, TokenEvent, now_s
from penstock.names import piece_token
from sim.endpoint import CountingEndpoint, Fault, write_numbers
from sim.waiting import wait_for
from tests.draws import mark_some
from tests.endpoint.conftest import EndpointPipeline, MakeEndpointPipeline, engine_of

pytestmark = pytest.mark.in_memory


@pytest.mark.proof
def test_an_answer_is_a_log_of_pieces_and_one_result(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    line.add_worker(endpoint)
    request = line.send("count to five|", max_tokens=5, tenant="acme")
    (result,) = line.run_until_results(1)
    assert (result.id, result.text, result.finish_reason) == (request.id, write_numbers(5), "length")
    assert (result.tenant, result.model, result.token_ids) == ("acme", "counting", [])
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.completion_tokens) == (3, 1, 5)
    *pieces, end = line.read_log(request.id)
    assert [event.text for event in pieces] == [" 0", " 1", " 2", " 3", " 4"]
    assert isinstance(end, EndEvent)
    assert (end.pieces, end.num_events) == (5, 5)
    assert endpoint.bodies == [
        {
            "model": "counting", "prompt": "count to five|", "max_tokens": 5, "temperature": 1.0, "top_p": 1.0,
            "stream": True, "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What an endpoint does with one request, and what becomes of it."""

    text: str = ""
    """The answer's, in part where it ends with an error."""
    code: str | None = None
    """The error's."""
    faults: tuple[Fault, ...] = ()
    """Those of the first replies."""
    does: dict[str, Any] = field(default_factory=dict)
    """What the endpoint does in each reply, see `CountingEndpoint`."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Fields of the request beside `max_tokens`, which is 3 if it is not among them."""
    says: str = ""
    """Words of the error's message."""
    num_asked: int | None = None
    """How often the endpoint is asked."""
    num_dead: int = 0
    usage: tuple[int, int] | None = None
    """Tokens of prompt and answer."""
    stop: str | None = None
    """The stop string that the end tells of."""
    again: dict[str, Any] = field(default_factory=dict)
    """What the endpoint is asked the second time, in part."""


def status(code: int, message: str = "as told", **headers: str) -> Fault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Fault("status", status=code, message=message, headers=named)


CHAT = {"messages": [{"role": "user", "content": "count"}]}
CUT = (Fault("cut", after=2),)
HALF = "cannot read: \ud83d"
PASSES = [
    status(429, Retry_After="0.1"), status(503, retry_after_ms="100"), status(503), status(500), status(401),
    Fault("error", after=2),
]  # fmt: skip
WHOLE = write_numbers(3)
CASES = {
    **{f"{one.kind} {one.status} {one.headers} passes": Case(WHOLE, faults=(one, one)) for one in PASSES},
    "a stop string that is told": Case(
        WHOLE, asked={"max_tokens": 8, "stop": ["never", " 3"], "tell_stop": True}, stop=" 3"
    ),
    "a stop string that is not told": Case(WHOLE, asked={"max_tokens": 8, "stop": ["never", " 3"]}),
    "half a character in a stop reason": Case(
        WHOLE, does={"end_fields": {"finish_reason": "stop", "stop_reason": "\ud83d"}}, stop="\ufffd",
        asked={"stop": ["q"], "tell_stop": True},
    ),
    "no usage": Case(WHOLE, does={"with_usage": False}, asked={"prompt": "x" * 40 + "|"}, usage=(11, 3)),
    "a usage that no float holds": Case(WHOLE, does={"usage_fields": {"completion_tokens": 10**400}}, usage=(2, 3)),
    "more than was asked for": Case(WHOLE, does={"num_pieces": 50}),
    "it fails again and again": Case(
        "", "model_error", (status(500, "cannot"),) * 3, says="cannot", num_asked=3, num_dead=1
    ),
    "it breaks off behind each first piece": Case(
        WHOLE, "model_error", (Fault("error", after=1, message="cannot"),) * 6, asked={"max_tokens": 6}, num_asked=3,
        num_dead=1,
    ),
    "it refuses": Case(
        "", "invalid_request", (status(400, "top_k is what?"),) * 3, says="HTTP 400: top_k is what?", num_asked=3
    ),
    "it refuses a long prompt": Case(
        "", "prompt_too_long", (status(400, "maximum context length is 8 tokens"),), says="maximum context length is 8"
    ),
    "it refuses a large body": Case("", "request_too_large", (status(413),), says="as told"),
    "it refuses in the stream": Case("", "invalid_request", (Fault("error", status=400),) * 3, says="as told"),
    "it refuses in the middle": Case(" 0", "invalid_request", (Fault("error", 1, 400),), says="as told", num_asked=1),
    "half a character in a refusal": Case("", "invalid_request", (status(400, HALF),) * 3, says="cannot read: \ufffd"),
    "half a character in a failure": Case(
        "", "model_error", (status(500, HALF),) * 3, says="cannot read: \ufffd", num_dead=1
    ),
    "half a character in the stream": Case(
        "", "invalid_request", (Fault("error", status=400, message=HALF),) * 3, says="cannot read: \ufffd"
    ),
    "reasoning for a reader of text alone": Case(WHOLE, does={"delta_fields": {"reasoning": "x"}}, asked=CHAT),
    "a field of calls that has none": Case(WHOLE, does={"delta_fields": {"tool_calls": "x"}}, asked=CHAT),
    "a call as it was before tools": Case(
        "", "model_error", does={"delta_fields": {"function_call": {"name": "f"}}}, asked=CHAT, says="function_call",
        num_dead=1,
    ),
    **{
        f"an end for {reason}": Case(
            WHOLE, "model_error", does={"end_fields": {"finish_reason": reason}}, num_asked=1, num_dead=1
        )
        for reason in ("abort", ["weird"])
    },
    "a chat that is cut": Case(
        WHOLE, faults=CUT, asked=CHAT,
        again={
            "messages": [*CHAT["messages"], {"role": "assistant", "content": " 0 1"}], "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    "a chat that is cut, and cannot go on": Case(
        " 0 1", "answer_interrupted", CUT, does={"owner": "somebody"}, asked=CHAT
    ),
    "a chat that is cut, and no list of models": Case(
        " 0 1", "model_error", CUT, does={"models_status": 404}, asked=CHAT, says="HTTP 404 to GET /models", num_dead=1
    ),
    "tokens that are cut": Case(" 0 1", "answer_interrupted", CUT, asked={"prompt": None, "token_ids": [1, 2]}),
    "JSON that is cut": Case(
        " 0 1", "answer_interrupted", CUT, asked={"response_format": {"type": "json_object"}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of_an_answer(line: EndpointPipeline, endpoint: CountingEndpoint, name: str) -> None:
    case = CASES[name]
    for attribute, value in case.does.items():
        setattr(endpoint, attribute, value)
    endpoint.faults += case.faults
    line.add_worker(endpoint)
    prompt = None if "messages" in case.asked else "count|"
    request = line.send(**{"prompt": prompt, "max_tokens": 3, **case.asked})
    (result,) = line.run_until_results(1)
    assert result.text == case.text
    assert (result.error and result.error.code) == case.code
    assert result.error is None or case.says in result.error.message
    assert case.num_asked in (None, len(endpoint.bodies))
    assert case.usage in (None, (result.usage.prompt_tokens, result.usage.completion_tokens))
    assert case.code is not None or result.finish_reason == ("stop" if "stop" in case.asked else "length")
    line.run_until(lambda: len(line.bus.read_all(line.pipeline.dead_letter_topic)) >= case.num_dead)
    assert len(line.bus.read_all(line.pipeline.dead_letter_topic)) == case.num_dead
    end = line.read_log(request.id)[-1]
    assert isinstance(end, EndEvent)
    assert end.stop == case.stop
    assert not case.again or case.again.items() <= endpoint.bodies[1].items()


@pytest.mark.parametrize("lost", mark_some(["worker", "endpoint"], pytest.mark.proof))
@pytest.mark.parametrize("num_pieces", [0, 3])
@pytest.mark.parametrize("choice", ["continue", "restart-if-unseen", "fail"])
def test_an_answer_that_is_cut(
    line: EndpointPipeline, endpoint: CountingEndpoint, choice: str, num_pieces: int, lost: str
) -> None:
    """In the middle, or before its first piece."""
    worker = line.add_worker(endpoint, interrupted=choice)
    endpoint.faults.append(Fault("hang" if lost == "worker" else "cut", after=num_pieces))
    request = line.send(max_tokens=8)
    if lost == "worker":
        line.run_until(lambda: endpoint.bodies and len(line.read_log(request.id)) == num_pieces)
        line.kill(worker)
        line.add_worker(endpoint, interrupted=choice)
    (result,) = line.run_until_results(1)
    goes_on = choice == "continue" or (choice == "restart-if-unseen" and not num_pieces)
    assert result.text == (write_numbers(8) if goes_on else write_numbers(num_pieces))
    assert (result.error and result.error.code) == (None if goes_on else "answer_interrupted")
    assert len(endpoint.bodies) == 1 + goes_on
    if choice == "continue" and num_pieces:
        assert (endpoint.bodies[1]["prompt"], endpoint.bodies[1]["max_tokens"]) == ("count| 0 1 2", 5)
        # "count|" is one word, and the text so far three pieces of what the endpoint took for the prompt.
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (1, 8)


def test_readers_follow_a_log_of_pieces_and_notice_another_text(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    """The end's place in the log is the number of pieces, also where its usage, the endpoint's, is another."""
    line.add_worker(endpoint)
    request = line.send(max_tokens=4)
    line.run_until_results(1)
    events = line.read_log(request.id)
    assert StreamReader().feed_log(events) == events
    assert StreamReader(events[1].id if isinstance(events[1], TokenEvent) else None).feed_log(events[1:]) == events[2:]
    reader, other, end = StreamReader(), events[2], events[-1]
    reader.feed_log(events[:2])
    assert isinstance(other, TokenEvent)
    with pytest.raises(StreamDiverged):
        reader.feed_live(other.model_copy(update={"token": piece_token(" 7")}))
    assert isinstance(end, EndEvent)
    longer = [*events[:-1], end.model_copy(update={"usage": end.usage.model_copy(update={"completion_tokens": 9})})]
    assert StreamReader().feed_log(longer) == longer


def test_pieces_of_several_answers_that_came_in_turns_are_each_judged_by_their_own_reply(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    """All pieces are there before the loop looks, those of the three answers in any order; one request is cancelled."""
    worker = line.add_worker(endpoint)
    endpoint.gate.clear()
    for name in ("a", "bad", "z"):
        line.send(max_tokens=8, id=name)
    line.run_until(lambda: endpoint.num_under_way == 3)
    endpoint.gate.set()
    engine = engine_of(worker)
    wait_for(lambda: engine._arrived.qsize() == 3 * 9, "all pieces and ends have arrived")
    arrived = sorted((engine._arrived.get() for _ in range(3 * 9)), key=lambda _: random.random())
    for kind in (True, False):  # pieces in any order, then the ends
        for answer, event in arrived:
            if isinstance(event, Piece) is kind:
                engine._arrived.put((answer, event))
    line.make_record().cancel_request("bad")
    results = {result.id: result for result in line.run_until_results(3)}
    assert results["bad"].finish_reason == "cancelled"
    assert [len(results[name].text.split()) for name in ("a", "z")] == [8, 8]


@pytest.mark.proof
def test_an_endpoint_that_hangs_counts_as_lost(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    worker = line.add_worker(endpoint, silence_s=0.2)
    endpoint.faults.append(Fault("hang", after=1))
    line.send(max_tokens=3)
    line.run_until(lambda: endpoint.bodies)
    engine = engine_of(worker)
    engine.settings = engine.settings.model_copy(update={"silence_s": 600.0})
    (result,) = line.run_until_results(1)
    assert result.text == WHOLE


@pytest.mark.proof
def test_requests_wait_for_endpoints_and_are_never_more_than_the_limit(
    line: EndpointPipeline, endpoint: CountingEndpoint, other: CountingEndpoint
) -> None:
    line.add_worker(endpoint, other, max_requests=2)
    for one in (endpoint, other):
        one.gate.clear()
    for _ in range(12):
        line.send(max_tokens=3)
    line.run_until(lambda: endpoint.num_under_way == other.num_under_way == 2)
    for one in (endpoint, other):
        one.gate.set()
    results = line.run_until_results(12)
    assert {result.text for result in results} == {WHOLE}
    assert max(endpoint.max_under_way, other.max_under_way) == 2
    assert endpoint.bodies
    assert other.bodies


@pytest.mark.proof
def test_a_request_waits_for_an_endpoint_that_comes_back(line: EndpointPipeline) -> None:
    gone = CountingEndpoint().start()
    gone.stop()
    worker = line.add_worker(gone)
    line.send(max_tokens=3)
    line.run_until(lambda: engine_of(worker).endpoints.current_problem)
    with CountingEndpoint(gone.port):
        (result,) = line.run_until_results(1)
    assert result.text == WHOLE


@pytest.mark.proof
@pytest.mark.parametrize("header", [{}, {"Connection": "close"}])
def test_a_deadline_and_a_cancellation_end_an_answer_and_the_endpoints_work(
    line: EndpointPipeline, endpoint: CountingEndpoint, header: dict[str, str]
) -> None:
    endpoint.stream_headers |= header
    worker = line.add_worker(endpoint)
    endpoint.faults += [Fault("hang", after=2), Fault("hang", after=2)]
    late, stopped = line.send(max_tokens=9, deadline=now_s() + 3600), line.send(max_tokens=9)
    line.run_until(lambda: all(len(line.read_log(one.id)) == 2 for one in (late, stopped)))
    worker.running[late.id].message = late.model_copy(update={"deadline": now_s()})
    line.make_record().cancel_request(stopped.id)
    results = {result.id: result for result in line.run_until_results(2)}
    line.run_until(lambda: endpoint.num_under_way == 0)
    assert results[stopped.id].finish_reason == "cancelled"
    assert results[late.id].error is not None
    assert [result.text for result in results.values()] == [" 0 1", " 0 1"]
    assert results[late.id].error.code == "deadline_exceeded"  # type: ignore[union-attr]


def test_a_request_sent_twice_is_answered_once_and_another_body_is_a_conflict(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    line.add_worker(endpoint)
    request = line.send(max_tokens=3)
    line.publish_bytes(request.encode(), request.id)
    line.run_until_results(1)
    line.publish_bytes(request.encode(), request.id)
    line.send("other|", id=request.id)
    line.run_until(lambda: line.bus.read_all(line.pipeline.dead_letter_topic))
    line.run_until(lambda: not any(line.bus.count_unsettled().values()))
    assert len(line.read_results()) == 1
    (letter,) = line.bus.read_all(line.pipeline.dead_letter_topic)
    assert letter.headers["penstock-reason"].startswith("id_conflict")
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize("value", [b"{", b'{"v": 1, "id": "a", "prompt": "x", "what": 1}', b'{"v": 2, "id": "a"}'])
def test_a_message_that_cannot_be_read_has_one_result(
    line: EndpointPipeline, endpoint: CountingEndpoint, value: bytes
) -> None:
    line.add_worker(endpoint)
    line.publish_bytes(value, "a")
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code in ("invalid_request", "unsupported_version")


def test_the_load_counts_requests_and_no_prompt_tokens(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    worker = line.add_worker(endpoint)
    endpoint.faults.append(Fault("hang", after=2))
    request = line.send(max_tokens=9)
    line.run_until(lambda: len(line.read_log(request.id)) == 2)
    worker.run_once()  # it polls with the capacity that the request has left
    load = json.loads(json.dumps(worker.report_load()))
    assert load["interactive"] == {
        "requests": 1, "jobs": 0, "in_place": 0, "running": 1, "capacity": 31, "prompt_tokens": 0, "output_tokens": 7,
        "mean_prompt_tokens": 0.0, "mean_output_tokens": None, "partitions": [], "waiting_tokens": 0,
        "job_partitions": [], "waiting_jobs": 0,
    }  # fmt: skip


@pytest.mark.parametrize("bus", mark_some(["embedded", "kafka"], pytest.mark.proof))
def test_on_real_servers_workers_are_lost_in_the_middle(make_pipeline: MakeEndpointPipeline, bus: str) -> None:
    """Twenty requests, and their worker lost twice."""
    pipeline = make_pipeline(bus)
    with CountingEndpoint(pause_s=0.02) as endpoint:
        worker = pipeline.add_worker(endpoint, max_requests=20)
        sent = {pipeline.send(max_tokens=20).id for _ in range(20)}
        for _ in range(2):
            pipeline.run_until(lambda: any(task.log_events for task in worker.running.values()))  # noqa: B023
            pipeline.kill(worker)
            worker = pipeline.add_worker(endpoint, max_requests=20)
        results = pipeline.run_until_results(20)
        pipeline.run_until(worker.is_settled)
    assert {result.id for result in results} == sent
    assert len(pipeline.read_results()) == 20
    assert {(result.text, result.error) for result in results} == {(write_numbers(20), None)}
