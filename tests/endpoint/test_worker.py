"""An endpoint worker answers what is in the requests topic, whatever endpoints and workers do."""

import json
import random
from typing import Any, Literal

import pytest

from penstock.client.core import StreamReader
from penstock.endpoint_worker.reply import Piece
from penstock.errors import StreamDiverged
from penstock.messages import EndEvent, TokenEvent, now_s
from penstock.names import piece_token
from sim.endpoint import CountingEndpoint, Fault, write_numbers
from sim.waiting import wait_for
from tests.endpoint.conftest import EndpointPipeline, engine_of

pytestmark = pytest.mark.in_memory


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


@pytest.mark.parametrize("tell_stop", [True, None])
def test_the_stop_string_that_ended_an_answer_is_told_if_asked_for(
    line: EndpointPipeline, endpoint: CountingEndpoint, tell_stop: Literal[True] | None
) -> None:
    line.add_worker(endpoint)
    request = line.send(max_tokens=8, stop=["never", " 3"], tell_stop=tell_stop)
    (result,) = line.run_until_results(1)
    assert (result.text, result.finish_reason) == (write_numbers(3), "stop")
    end = line.read_log(request.id)[-1]
    assert isinstance(end, EndEvent)
    assert end.stop == (" 3" if tell_stop else None)


def test_readers_follow_a_log_of_pieces_and_notice_another_text(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    line.add_worker(endpoint)
    request = line.send(max_tokens=4)
    line.run_until_results(1)
    events = line.read_log(request.id)
    assert StreamReader().feed_log(events) == events
    assert StreamReader(events[1].id if isinstance(events[1], TokenEvent) else None).feed_log(events[1:]) == events[2:]
    reader, other = StreamReader(), events[2]
    reader.feed_log(events[:2])
    assert isinstance(other, TokenEvent)
    with pytest.raises(StreamDiverged):
        reader.feed_live(other.model_copy(update={"token": piece_token(" 7")}))


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
    line.open_record().cancel_request("bad")
    results = {result.id: result for result in line.run_until_results(3)}
    assert results["bad"].finish_reason == "cancelled"
    assert [len(results[name].text.split()) for name in ("a", "z")] == [8, 8]


def test_usage_that_the_endpoint_does_not_tell_is_estimated(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    endpoint.with_usage = False
    line.add_worker(endpoint)
    line.send("x" * 40 + "|", max_tokens=3)
    (result,) = line.run_until_results(1)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (11, 3)


def test_usage_counts_the_endpoints_tokens_where_its_pieces_are_others(line: EndpointPipeline) -> None:
    """The end's place in the log is the number of pieces, and its usage the endpoint's."""
    with CountingEndpoint() as endpoint:
        line.add_worker(endpoint)
        endpoint.gate.clear()
        request = line.send(max_tokens=2)
        line.run_until(lambda: endpoint.num_under_way)
        task = line.workers[0].running[request.id]
        endpoint.gate.set()
        line.run_until(lambda: task.outcome)
    *_, end = line.read_log(request.id)
    assert isinstance(end, EndEvent)
    assert end.usage.prompt_tokens == 1
    longer = end.model_copy(update={"usage": end.usage.model_copy(update={"completion_tokens": 9})})
    events = [*line.read_log(request.id)[:-1], longer]
    assert StreamReader().feed_log(events) == events


@pytest.mark.parametrize(
    ("choice", "text", "code"),
    [
        ("continue", write_numbers(8), None),
        ("restart-if-unseen", " 0 1 2", "answer_interrupted"),
        ("fail", " 0 1 2", "answer_interrupted"),
    ],
)
@pytest.mark.parametrize("lost", ["worker", "endpoint"])
def test_an_answer_cut_in_the_middle(
    line: EndpointPipeline, endpoint: CountingEndpoint, choice: str, text: str, code: str | None, lost: str
) -> None:
    worker = line.add_worker(endpoint, interrupted=choice)
    endpoint.faults.append(Fault("hang" if lost == "worker" else "cut", after=3))
    request = line.send(max_tokens=8)
    if lost == "worker":
        line.run_until(lambda: len(line.read_log(request.id)) == 3)
        line.kill(worker)
        line.add_worker(endpoint, interrupted=choice)
    (result,) = line.run_until_results(1)
    assert result.text == text
    assert (None if result.error is None else result.error.code) == code
    if choice == "continue":
        assert endpoint.bodies[1]["prompt"] == "count| 0 1 2"
        assert endpoint.bodies[1]["max_tokens"] == 5
        # "count|" is one word, and the text so far three pieces of what the endpoint took for the prompt.
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (1, 8)


@pytest.mark.parametrize(("choice", "num_asked"), [("continue", 2), ("restart-if-unseen", 2), ("fail", 1)])
@pytest.mark.parametrize("lost", ["worker", "endpoint"])
def test_an_answer_cut_before_its_first_piece(
    line: EndpointPipeline, endpoint: CountingEndpoint, choice: str, num_asked: int, lost: str
) -> None:
    worker = line.add_worker(endpoint, interrupted=choice)
    endpoint.faults.append(Fault("hang" if lost == "worker" else "cut"))
    line.send(max_tokens=8)
    if lost == "worker":
        line.run_until(lambda: endpoint.bodies)
        line.kill(worker)
        line.add_worker(endpoint, interrupted=choice)
    (result,) = line.run_until_results(1)
    assert len(endpoint.bodies) == num_asked
    if choice == "fail":
        assert result.error is not None
        assert (result.text, result.error.code) == ("", "answer_interrupted")
    else:
        assert (result.text, result.error) == (write_numbers(8), None)


def test_a_chat_is_continued_where_the_server_can(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    line.add_worker(endpoint)
    endpoint.faults.append(Fault("cut", after=2))
    line.send(None, messages=[{"role": "user", "content": "count"}], max_tokens=4)
    (result,) = line.run_until_results(1)
    assert (result.text, result.error) == (write_numbers(4), None)
    asked = endpoint.bodies[1]
    assert asked["messages"] == [{"role": "user", "content": "count"}, {"role": "assistant", "content": " 0 1"}]
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)


def test_a_chat_ends_with_an_error_where_the_server_cannot_continue_it(line: EndpointPipeline) -> None:
    with CountingEndpoint(owner="somebody") as endpoint:
        line.add_worker(endpoint)
        endpoint.faults.append(Fault("cut", after=2))
        line.send(None, messages=[{"role": "user", "content": "count"}], max_tokens=4)
        (result,) = line.run_until_results(1)
    assert result.error is not None
    assert (result.text, result.error.code) == (" 0 1", "answer_interrupted")


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (None, {"token_ids": [1, 2]}),
        ("count|", {"response_format": {"type": "json_object"}}),
    ],
)
def test_what_cannot_be_continued_ends_with_an_error(
    line: EndpointPipeline, endpoint: CountingEndpoint, prompt: str | None, fields: dict[str, Any]
) -> None:
    line.add_worker(endpoint)
    endpoint.faults.append(Fault("cut", after=2))
    line.send(prompt, max_tokens=4, **fields)
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert (result.text, result.error.code) == (" 0 1", "answer_interrupted")


def test_an_endpoint_that_hangs_counts_as_lost(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    worker = line.add_worker(endpoint, silence_s=0.2)
    endpoint.faults.append(Fault("hang", after=1))
    line.send(max_tokens=3)
    line.run_until(lambda: endpoint.bodies)
    engine = engine_of(worker)
    engine.settings = engine.settings.model_copy(update={"silence_s": 600.0})
    (result,) = line.run_until_results(1)
    assert result.text == write_numbers(3)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=429, headers={"Retry-After": "0.1"}),
        Fault("status", status=503, headers={"retry-after-ms": "100"}),
        Fault("status", status=503),
        Fault("status", status=500),
        Fault("status", status=401),
        Fault("error", after=2),
    ],
)
def test_a_fault_that_passes_costs_nothing(line: EndpointPipeline, endpoint: CountingEndpoint, fault: Fault) -> None:
    line.add_worker(endpoint)
    endpoint.faults += [fault, fault]
    line.send(max_tokens=3)
    (result,) = line.run_until_results(1)
    assert (result.text, result.error) == (write_numbers(3), None)


def test_a_request_at_which_endpoints_fail_again_and_again_ends(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    line.add_worker(endpoint)
    endpoint.faults += [Fault("status", message="cannot")] * 3
    line.send(max_tokens=3)
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code == "model_error"
    assert "cannot" in result.error.message
    assert len(line.bus.read_all(line.pipeline.dead_letter_topic)) == 1


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("status", status=400, message="top_k is what?"), "invalid_request"),
        (Fault("status", status=400, message="maximum context length is 8 tokens"), "prompt_too_long"),
        (Fault("status", status=413), "request_too_large"),
        (Fault("error", status=400), "invalid_request"),
    ],
)
def test_what_the_endpoint_refuses_ends_with_a_typed_error(
    line: EndpointPipeline, endpoint: CountingEndpoint, fault: Fault, code: str
) -> None:
    line.add_worker(endpoint)
    endpoint.faults.append(fault)
    line.send()
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code == code
    assert fault.message in result.error.message


@pytest.mark.parametrize("field", ["reasoning_content", "tool_calls"])
def test_an_answer_with_more_than_text_is_refused(
    line: EndpointPipeline, endpoint: CountingEndpoint, field: str
) -> None:
    line.add_worker(endpoint)
    endpoint.delta_fields = {field: "x"}
    line.send(None, messages=[{"role": "user", "content": "count"}])
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code == "model_error"
    assert field in result.error.message


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
    assert {result.text for result in results} == {write_numbers(3)}
    assert max(endpoint.max_under_way, other.max_under_way) == 2
    assert endpoint.bodies
    assert other.bodies


def test_others_take_over_for_an_endpoint_that_is_away(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    gone = CountingEndpoint().start()
    gone.stop()
    line.add_worker(gone, endpoint)
    for _ in range(5):
        line.send(max_tokens=3)
    assert {result.text for result in line.run_until_results(5)} == {write_numbers(3)}


def test_a_request_waits_for_an_endpoint_that_comes_back(line: EndpointPipeline) -> None:
    gone = CountingEndpoint().start()
    gone.stop()
    worker = line.add_worker(gone)
    line.send(max_tokens=3)
    line.run_until(lambda: engine_of(worker).endpoints.current_problem)
    with CountingEndpoint(gone.port):
        (result,) = line.run_until_results(1)
    assert result.text == write_numbers(3)


def test_a_deadline_and_a_cancellation_end_an_answer_and_the_endpoints_work(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    worker = line.add_worker(endpoint)
    endpoint.faults += [Fault("hang", after=2), Fault("hang", after=2)]
    late, stopped = line.send(max_tokens=9, deadline=now_s() + 3600), line.send(max_tokens=9)
    line.run_until(lambda: all(len(line.read_log(one.id)) == 2 for one in (late, stopped)))
    worker.running[late.id].message = late.model_copy(update={"deadline": now_s()})
    line.open_record().cancel_request(stopped.id)
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
    line.publish(request.encode(), request.id)
    line.run_until_results(1)
    line.publish(request.encode(), request.id)
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
    line.publish(value, "a")
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code in ("invalid_request", "unsupported_version")


def test_a_worker_that_stops_hands_its_requests_to_another(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    worker = line.add_worker(endpoint)
    endpoint.faults.append(Fault("hang", after=2))
    request = line.send(max_tokens=5)
    line.run_until(lambda: len(line.read_log(request.id)) == 2)
    line.workers.remove(worker)
    worker.stop_accepting()
    worker.close()
    line.add_worker(endpoint)
    (result,) = line.run_until_results(1)
    assert result.text == write_numbers(5)


def test_the_load_counts_requests_and_no_prompt_tokens(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    worker = line.add_worker(endpoint)
    endpoint.faults.append(Fault("hang", after=2))
    request = line.send(max_tokens=9)
    line.run_until(lambda: len(line.read_log(request.id)) == 2)
    worker.run_once()  # it polls with the capacity that the request has left
    load = json.loads(json.dumps(worker.report_load()))
    assert load["interactive"] == {
        "requests": 1, "jobs": 0, "in_place": 0, "running": 1, "capacity": 31, "prompt_tokens": 0, "output_tokens": 7,
        "mean_prompt_tokens": 0.0, "mean_output_tokens": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ([Fault("status", status=400, message="cannot read: \ud83d")], "invalid_request"),
        ([Fault("status", status=500, message="cannot read: \ud83d")] * 3, "model_error"),
        ([Fault("error", status=400, message="cannot read: \ud83d")], "invalid_request"),
    ],
)
def test_half_a_surrogate_pair_in_an_endpoints_error_is_replaced(
    line: EndpointPipeline, endpoint: CountingEndpoint, faults: list[Fault], code: str
) -> None:
    line.add_worker(endpoint)
    endpoint.faults += faults
    line.send()
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code == code
    assert "cannot read: \ufffd" in result.error.message


def test_half_a_surrogate_pair_in_a_stop_reason_is_replaced(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    endpoint.end_fields = {"finish_reason": "stop", "stop_reason": "\ud83d"}
    line.add_worker(endpoint)
    request = line.send(max_tokens=2, stop=["q"], tell_stop=True)
    (result,) = line.run_until_results(1)
    end = line.read_log(request.id)[-1]
    assert isinstance(end, EndEvent)
    assert (result.error, end.stop) == (None, "\ufffd")


def test_a_token_count_that_no_float_holds_is_not_believed(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    endpoint.usage_fields = {"completion_tokens": 10**400}
    line.add_worker(endpoint)
    line.send(max_tokens=3)
    (result,) = line.run_until_results(1)
    assert (result.error, result.usage.completion_tokens) == (None, 3)


def test_an_answer_that_always_breaks_off_behind_its_first_piece_ends_with_an_error(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    line.add_worker(endpoint)
    endpoint.faults += [Fault("error", after=1, message="cannot")] * 6
    line.send(max_tokens=6)
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert (result.error.code, result.text, len(endpoint.bodies)) == ("model_error", " 0 1 2", 3)


@pytest.mark.parametrize("reason", ["abort", ["weird"]])
def test_an_end_for_an_unknown_reason_is_an_end(
    line: EndpointPipeline, endpoint: CountingEndpoint, reason: object
) -> None:
    endpoint.end_fields = {"finish_reason": reason}
    line.add_worker(endpoint)
    line.send(max_tokens=2)
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert (result.error.code, result.text, len(endpoint.bodies)) == ("model_error", " 0 1", 1)


def test_an_endpoint_that_ignores_the_limit_is_read_no_further(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    endpoint.num_pieces = 50
    line.add_worker(endpoint)
    line.send(max_tokens=3)
    (result,) = line.run_until_results(1)
    assert (result.error, result.text, result.finish_reason) == (None, " 0 1 2", "length")
