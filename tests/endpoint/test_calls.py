"""Calls and reasoning of an endpoint's answer: how they are written to the log, and who goes on with them."""

import json
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest

from penstock.client.core import RequestFields, make_request
from penstock.endpoint_worker.answer import MAX_HELD_CHARS, AnswerWriter, Piece, ToldAnswer
from penstock.endpoint_worker.engine import EndpointEngine, EndpointSequence
from penstock.endpoint_worker.reply import EndpointReply, Finished, ReplyEvent
from penstock.errors import ModelError
from penstock.grammar.tools import CALL_OPEN, ENDPOINT_TEMPLATE, MARK, THINK_CLOSE, THINK_OPEN
from penstock.ingest.openai.answer_parser import AnswerParser, AnswerPart
from penstock.messages import Logprobs, Request, TokenEvent, TokenLogprob
from penstock.names import piece_token
from sim.endpoint import NUM_TOLD, CountingEndpoint, Fault, write_arguments, write_numbers
from tests.draws import mark_some
from tests.endpoint.conftest import EndpointPipeline, engine_of

pytestmark = pytest.mark.in_memory
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "think, then call"}], "special_text": True,
    "max_tokens": 64, "chat_template_kwargs": {"tools": TOOLS},
}  # fmt: skip
CALLS = [(name, write_arguments(name)) for name in ("f", "g")]
THOUGHT = "I must count."


def make_chat(**fields: Any) -> Request:
    return make_request(None, cast("RequestFields", {**CHAT, **fields}))


def write_answer(deltas: Sequence[dict[str, Any]], request: Request | None = None, before: str = "") -> list[Piece]:
    writer = AnswerWriter(request or make_chat(), ToldAnswer.parse_log(before))
    pieces = [piece for delta in deltas for piece in writer.add_choice({"delta": delta})]
    return [*pieces, *writer.end_answer()]


def parse(text: str) -> AnswerPart:
    """Return the parts that a gateway tells, however the text is cut into pieces."""
    cut = random.randrange(len(text) + 1)
    parser = AnswerParser(ENDPOINT_TEMPLATE, TOOLS, "held")
    return parser.add_text(text[:cut]) + parser.end(text[cut:])


def call(index: int | None = None, call_id: str = "", name: str | None = None, arguments: Any = None) -> dict[str, Any]:
    """Return a delta of one call."""
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}


F, G = [("f", '{"a": 1.0}')], [("g", "{}")]
CALL_CASES: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]]]] = {
    "at once": ([call(0, "x", "f", '{"a": 1.0}')], F),
    "in pieces": ([call(0, "x", "f", ""), call(0, "", None, '{"a"'), call(0, "", None, ": 1.0}")], F),
    "two in turns": (
        [call(0, "x", "f"), call(1, "y", "g"), call(0, arguments='{"a"'), call(1, arguments="{"),
         call(0, arguments=": 1.0}"), call(1, arguments="}")], F + G,
    ),
    "another id in each delta": ([call(0, "x", "f", ""), call(0, "y", None, '{"a": 1.0}')], F),
    "one index, two ids": ([call(0, "x", "f", '{"a": 1.0}'), call(0, "y", "g", "{}")], F + G),
    "no index and no id": ([call(None, "", "f", '{"a": 1.0}'), call(None, "", "g", "{}")], F + G),
    "no index, in pieces": ([call(None, "x", "f"), call(None, "x", "f", '{"a": 1.0}'), call(None, "y", "g")], F + G),
    "no id": ([call(0, "", "f", '{"a": 1.0}'), call(1, "", "g", "{}")], F + G),
    "a name in pieces": ([call(0, "x", "f"), call(0, "", "un", None), call(0, "", "", "{}")], [("fun", "{}")]),
    "a name each time": ([call(0, "x", "f", '{"a"'), call(0, "x", "f", ": 1.0}")], F),
    "arguments as an object": ([call(0, "x", "f", {"a": 1.0})], F),
    "no arguments": ([call(0, "x", "g"), call(1, "y", "g", " \n")], G + G),
    "arguments in the server's own spelling": (
        [call(0, "x", "f", '{ "a":"3","b":[1e3],\n"c":"<tool_call>\\ud83d\\u0000é" }')],
        [("f", '{ "a":"3","b":[1e3],\n"c":"<tool_call>\\ud83d\\u0000é" }')],
    ),
    "no calls": ([{"tool_calls": []}, {"tool_calls": None}, {"tool_calls": "f"}, {"tool_calls": ["f"]}], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CALL_CASES)
def test_calls_in_all_the_forms_in_which_servers_stream_them(name: str) -> None:
    deltas, calls = CALL_CASES[name]
    pieces = write_answer([{"content": "so "}, *deltas])
    assert [piece.text for piece in pieces[:1]] == ["so "]
    assert len(pieces) == 1 + bool(calls), "all of them are one piece"
    told = parse("".join(piece.text for piece in pieces))
    assert (told.content, told.reasoning, told.calls) == ("so ", "", calls)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("f", '{"a": 1'),
        ("f", '"a"'),
        ("f", '{"a": NaN}'),
        ("f", "[" * 100_000),
        ("", "{}"),
        ('f"', "{}"),
        ("x" * 257, "{}"),
    ],
)
def test_a_call_that_is_none_is_content(name: str, arguments: str) -> None:
    deltas = [call(0, "x", name, arguments), call(1, "y", "g", "{}")]
    told = parse("".join(piece.text for piece in write_answer(deltas)))
    assert told.calls == G
    assert json.loads(told.content) == {"name": name, "arguments": arguments}


def test_a_call_where_no_tools_were_offered_is_content() -> None:
    for request in (make_chat(chat_template_kwargs={"x": 1}), make_chat(chat_template_kwargs=None, special_text=None)):
        told = parse("".join(piece.text for piece in write_answer([call(0, "x", "f", "{}")], request)))
        assert (told.content, told.calls) == ('{"name": "f", "arguments": "{}"}', [])


def test_reasoning_stands_between_marks_that_no_text_can_have() -> None:
    deltas: list[dict[str, Any]] = [
        {"reasoning": "one", "reasoning_content": "one"}, {"reasoning": " two"}, {"content": f"a{THINK_OPEN}"},
        {"content": "\ud83d", "reasoning": None}, {"reasoning_content": f"three{THINK_CLOSE}"}, call(0, "x", "g"),
        {"content": "after"}, {"reasoning": "four"}, call(1, "y", "f", {"a": MARK}),
    ]  # fmt: skip
    pieces = write_answer(deltas)
    texts = [piece.text for piece in pieces]
    assert texts[:3] == [f"{THINK_OPEN}one", " two", f"{THINK_CLOSE}a\ufffd<think>"], "as they come"
    told = parse("".join(texts))
    assert told.reasoning == "one twothree\ufffd</think>four"
    assert told.content == "a\ufffd<think>\ufffdafter"
    assert told.calls == [*G, ("f", '{"a": "\ufffd"}')]
    alone = write_answer(deltas[:5], make_chat(special_text=None, chat_template_kwargs=None))
    assert "".join(piece.text for piece in alone) == "a\ufffd<think>\ufffd", "without marks, content alone"


def test_the_text_so_far_says_where_an_answer_goes_on() -> None:
    thought = f"{THINK_OPEN}one"
    assert ToldAnswer.parse_log(thought) == ("", "one", True, False)
    assert ToldAnswer.parse_log(f"{thought}{THINK_CLOSE}a\nb{THINK_OPEN}\n") == ("a\nb", "one\n", True, False)
    assert ToldAnswer.parse_log(f"a{CALL_OPEN}{{}}") == ("a", "", False, True)
    anew = [piece.text for piece in write_answer([{"reasoning": "two"}, {"content": "a"}], before=thought)]
    assert anew == ["\n\ntwo", f"{THINK_CLOSE}a"]
    closed = f"{thought}{THINK_CLOSE}\n"
    anew = [piece.text for piece in write_answer([{"reasoning": "two"}, {"content": "a"}], before=closed)]
    assert anew == [f"{THINK_OPEN}\n\ntwo", f"{THINK_CLOSE}a"]
    anew = [piece.text for piece in write_answer([{"content": "a"}], before=thought)]
    assert anew == [f"{THINK_CLOSE}a"]
    # A parser of reasoning that does not see the beginning of an answer takes the rest for reasoning.
    continued = write_answer([{"reasoning": " b"}, call(0, "x", "g")], before=f"{closed}a")
    assert parse(f"{closed}a" + "".join(piece.text for piece in continued)) == parse(
        f"{closed}a b" + "".join(piece.text for piece in write_answer([call(0, "x", "g")]))
    )


def test_what_is_held_back_has_a_limit() -> None:
    with pytest.raises(ModelError, match="characters"):
        write_answer([call(0, "x", "f", "x" * MAX_HELD_CHARS), call(0, arguments="x")])
    with pytest.raises(ModelError, match="characters"):
        write_answer([call(0, "x", "f"), {"content": "x" * MAX_HELD_CHARS}, {"content": "x"}])
    with pytest.raises(ModelError, match="128"):
        write_answer([call(index, "", "f") for index in range(129)])


@pytest.mark.proof
def test_an_answer_with_reasoning_and_calls_is_a_log_of_text_and_one_result(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    line.add_worker(endpoint)
    request = line.send(None, **CHAT)
    (result,) = line.run_until_results(1)
    told = parse(result.text)
    assert (told.reasoning, told.content, told.calls) == (THOUGHT, write_numbers(NUM_TOLD), CALLS)
    assert (result.finish_reason, result.error) == ("stop", None)
    *pieces, _ = line.read_log(request.id)
    assert len(pieces) == 3 + NUM_TOLD + 1, "reasoning and content as they come, all calls at the end"


def test_an_answer_that_is_cut_in_a_call_tells_it_as_content(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    endpoint.write_choices = lambda body: [
        {"delta": call(0, "x", "g", "{}")}, {"delta": call(1, "y", "f", '{"a": [1')}, {"finish_reason": "length"},
    ]  # fmt: skip
    line.add_worker(endpoint)
    line.send(None, **CHAT)
    (result,) = line.run_until_results(1)
    told = parse(result.text)
    assert (told.content, told.calls) == ('{"name": "f", "arguments": "{\\"a\\": [1"}', G)
    assert result.finish_reason == "length"


FIRST_CALL = 3 + NUM_TOLD
"""How many chunks come before the calls."""


@pytest.mark.parametrize("lost", ["worker", "endpoint"])
@pytest.mark.parametrize(
    "num_chunks", mark_some([FIRST_CALL + 1, 0, 1, 3, 4, FIRST_CALL, FIRST_CALL + 6], pytest.mark.proof)
)
def test_an_answer_with_calls_is_cut(
    line: EndpointPipeline, endpoint: CountingEndpoint, num_chunks: int, lost: str
) -> None:
    """Before it began, in its reasoning, behind that, in its content, and in its calls: each call is told once."""
    worker = line.add_worker(endpoint)
    endpoint.faults.append(Fault("hang" if lost == "worker" else "cut", after=num_chunks))
    request = line.send(None, **CHAT)
    num_told = min(num_chunks, FIRST_CALL)
    if lost == "worker":
        line.run_until(lambda: endpoint.bodies and len(line.read_log(request.id)) == num_told)
        line.kill(worker)
        line.add_worker(endpoint)
    (result,) = line.run_until_results(1)
    told = parse(result.text)
    assert (told.content, told.calls, result.error) == (write_numbers(NUM_TOLD), CALLS, None)
    # It reasons anew as long as no content was told.
    broken = THOUGHT[: [0, 1, 6, 13][num_told]] + "\n\n" if 0 < num_told <= 3 else ""
    assert told.reasoning == broken + THOUGHT
    assert len(endpoint.bodies) == 2
    assert ("continue_final_message" in endpoint.bodies[1]) == (num_told > 3)
    assert result.usage.prompt_tokens > 0


@pytest.mark.parametrize(("choice", "owner"), [("restart-if-unseen", "vllm"), ("fail", "vllm"), ("continue", "other")])
def test_an_answer_whose_content_was_told_ends_where_nobody_may_or_can_continue_it(
    line: EndpointPipeline, endpoint: CountingEndpoint, choice: str, owner: str
) -> None:
    endpoint.owner = owner
    line.add_worker(endpoint, interrupted=choice)
    endpoint.faults.append(Fault("cut", after=FIRST_CALL + 4))
    line.send(None, **CHAT)
    (result,) = line.run_until_results(1)
    told = parse(result.text)
    assert (told.reasoning, told.content, told.calls) == (THOUGHT, write_numbers(NUM_TOLD), [])
    assert result.error is not None
    assert result.error.code == "answer_interrupted"


@pytest.mark.parametrize("choice", ["continue", "restart-if-unseen"])
def test_calls_without_a_word_before_them_are_asked_for_again(
    line: EndpointPipeline, endpoint: CountingEndpoint, choice: str
) -> None:
    """Also at a server that continues no chats, and where only one run may answer."""
    endpoint.owner = "other"
    endpoint.write_choices = lambda body: [
        {"delta": call(0, "x", "f", '{"a"')}, {"delta": call(0, arguments=": 1.0}")}, {"finish_reason": "tool_calls"},
    ]  # fmt: skip
    line.add_worker(endpoint, interrupted=choice)
    endpoint.faults.append(Fault("cut", after=1))
    line.send(None, **CHAT)
    (result,) = line.run_until_results(1)
    assert parse(result.text).calls == F
    assert len(endpoint.bodies) == 2


def test_calls_in_the_log_are_whole_and_nobody_is_asked_again(
    line: EndpointPipeline, endpoint: CountingEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their worker was lost before it wrote the end."""
    handle = EndpointEngine._handle_event

    def lose_end(self: EndpointEngine, seq: EndpointSequence, answer: EndpointReply, event: ReplyEvent) -> None:
        if not isinstance(event, Finished):
            handle(self, seq, answer, event)

    worker = line.add_worker(endpoint)
    with monkeypatch.context() as patched:
        patched.setattr(EndpointEngine, "_handle_event", lose_end)
        request = line.send(None, **CHAT)
        line.run_until(lambda: CALL_OPEN in "".join(event.text for event in line.read_log(request.id)))
        line.kill(worker)
    line.add_worker(endpoint)
    (result,) = line.run_until_results(1)
    assert (parse(result.text).calls, result.finish_reason) == (CALLS, "stop")
    assert len(endpoint.bodies) == 1


def test_readers_get_an_empty_piece_now_and_then_while_calls_are_held_back(
    line: EndpointPipeline, endpoint: CountingEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.endpoint_worker.reply.MAX_SILENCE_S", 0.0)
    endpoint.owner = "other"
    endpoint.pause_s = 0.01
    endpoint.write_choices = lambda body: [
        *({"delta": call(0, "x", "f", "" if number else "{}")} for number in range(5)), {"finish_reason": "tool_calls"},
    ]  # fmt: skip
    line.add_worker(endpoint, interrupted="restart-if-unseen")
    endpoint.faults.append(Fault("cut", after=4))
    request = line.send(None, **CHAT)
    (result,) = line.run_until_results(1)
    assert parse(result.text).calls == [("f", "{}")]
    empty, *_, last, _ = [event.text for event in line.read_log(request.id)]
    assert (empty, last) == ("", result.text)
    assert len(endpoint.bodies) == 2, "an empty piece is nothing that was seen"


@pytest.mark.parametrize("fields", [{}, {"special_text": None, "chat_template_kwargs": None}])
def test_an_endpoint_that_has_begun_what_is_not_told_has_answered(
    line: EndpointPipeline, endpoint: CountingEndpoint, fields: dict[str, Any]
) -> None:
    """Calls, or reasoning for a reader of text alone: whether it rests is judged by that."""
    endpoint.write_choices = lambda body: [{"delta": call(0, "x", "f", "{}")}, {"delta": {}}, {"finish_reason": "stop"}]
    endpoint.delta_fields = {"content": None, "reasoning": "so"} if fields else {}
    worker = line.add_worker(endpoint)
    endpoint.faults.append(Fault("hang", after=1))
    request = line.send(None, **{**CHAT, **fields})
    (one,) = engine_of(worker).endpoints.all
    line.run_until(lambda: one.answered_s > 0)
    assert line.read_log(request.id) == []


TOKEN: dict[str, Any] = {
    "token": " 5", "logprob": -0.5, "bytes": [32, 53],
    "top_logprobs": [{"token": " 5", "logprob": -0.5}, {"token": "\ufffd", "logprob": -2, "bytes": [240, 159]}],
}  # fmt: skip


@pytest.mark.proof
def test_log_probabilities_are_in_the_log_one_event_for_each_token(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    others = [{"token": "x" * 101, "logprob": float("-inf")}, {"token": "y", "logprob": 10**400}, {"token": "z"}, 5]
    endpoint.write_choices = lambda body: [
        {"delta": {"content": " 5"}, "logprobs": {"content": [TOKEN]}},
        {"delta": {"content": " 6 7"}, "logprobs": {"content": others}},
        {"delta": {"content": " 8"}, "logprobs": None},
        {"delta": call(0, "x", "f", "{}"), "logprobs": {"content": [TOKEN]}},
        {"delta": {}, "logprobs": {"content": [TOKEN]}},
        {"delta": {}, "finish_reason": "tool_calls"},
    ]
    line.add_worker(endpoint)
    request = line.send(None, **{**CHAT, "logprobs": 1})
    (result,) = line.run_until_results(1)
    top = [TokenLogprob(token=piece_token(" 5"), logprob=-0.5, text=" 5")]
    first = Logprobs(logprob=-0.5, text=" 5", top=top)
    whole = [first, Logprobs(logprob=-9999.0), Logprobs(logprob=0.0, text="y"), first, first]
    assert result.logprobs == whole
    pieces = [event for event in line.read_log(request.id) if isinstance(event, TokenEvent)]
    call_text = result.text[result.text.index(MARK) :]
    assert [event.text for event in pieces] == [" 5", " 6 7", "", " 8", call_text, ""]
    assert [event.logprobs for event in pieces] == [*whole[:3], None, *whole[3:]]
    writer = AnswerWriter(make_chat(logprobs=2), ToldAnswer())
    (piece,) = writer.add_choice({"delta": {"content": " 5"}, "logprobs": {"content": [TOKEN]}})
    assert piece.logprobs is not None
    assert piece.logprobs.top[1] == TokenLogprob(
        token=piece_token("\ufffd"), logprob=-2.0, text="\ufffd", bytes=[240, 159]
    )
