"""Custom tools, whose calls have a text: the same in chats and responses, whole and in pieces."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.client.core import build_answer
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.state import GrammarState
from penstock.ingest.errors import ApiError
from penstock.ingest.openai import CHAT, RESPONSES, ApiEndpoint, StreamMeta, make_stream_meta
from penstock.ingest.openai.custom_tools import TextReader, write_arguments
from penstock.ingest.openai.endpoint import use_response_template
from penstock.messages import GrammarSpec
from tests.ingest.answers import TEMPLATE, make_log, read_stream

LARK = {"syntax": "lark", "definition": 'start: line+\nline: "+" /.*/ LF\n%import common.LF'}
TEXT = '+a "b" \\ ä\n+\n'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODIES: dict[str, dict[str, Any]] = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]}}
BODIES["/v1/responses"] = {"input": "hi"}
BOTH = pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])


def make_tool(endpoint: ApiEndpoint[Any], grammar: dict[str, Any] | None = None) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": "patch", "description": "It patches."}
    if grammar is not None:
        nested = {"grammar": grammar} if endpoint is CHAT else grammar
        fields["format"] = {"type": "grammar", **nested}
    return {"type": "custom", **({"custom": fields} if endpoint is CHAT else fields)}


def parse_body(endpoint: ApiEndpoint[Any], **more: Any) -> Any:
    return endpoint.parse_body({"model": "m"} | BODIES[endpoint.path] | more)


def make_meta(endpoint: ApiEndpoint[Any], tool: dict[str, Any], requests: Any = ()) -> StreamMeta:
    body = parse_body(endpoint, tools=[tool])
    return make_stream_meta(endpoint, body, "r", form=use_response_template(endpoint, body, requests, TEMPLATE))


def write_call(arguments: str) -> str:
    return f'<tool_call>{{"name": "patch", "arguments": {arguments}}}</tool_call>'


def list_texts(endpoint: ApiEndpoint[Any], meta: StreamMeta, texts: list[str]) -> tuple[list[str], list[str]]:
    """The texts of the calls of an answer of these tokens, as the whole one and as the stream tells them."""
    log = make_log(texts[:-1], texts[-1])
    answer = endpoint.make_answer(meta, [build_answer(meta.id, log)]).model_dump()
    sent = [one.event.data for one in read_stream(endpoint, meta, log)]
    if endpoint is CHAT:
        calls = ChatCompletion.model_validate(answer).choices[0].message.tool_calls or []
        streamed = dict[int, str]()
        for data in sent[:-1]:
            for call in json.loads(data)["choices"][0]["delta"].get("tool_calls", ()):
                streamed[call["index"]] = streamed.get(call["index"], "") + call["custom"]["input"]
        return [call.custom.input for call in calls if call.type == "custom"], list(streamed.values())
    events = [EVENTS.validate_python(json.loads(data)) for data in sent]
    deltas = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
    done = [one.input for one in events if one.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == "".join(done)
    items = openai.types.responses.Response.model_validate(answer).output
    return [item.input for item in items if item.type == "custom_tool_call"], done


@BOTH
@pytest.mark.parametrize("grammar", [None, LARK])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_the_text_of_a_call_is_the_same_whole_and_streamed(
    endpoint: ApiEndpoint[Any], grammar: dict[str, Any] | None, step: int
) -> None:
    meta = make_meta(endpoint, make_tool(endpoint, grammar))
    text = write_call(write_arguments(TEXT)) + write_call(json.dumps({"input": "ä👍"}))
    pieces = [text[begin : begin + step] for begin in range(0, len(text), step)]
    assert list_texts(endpoint, meta, [*pieces, ""]) == ([TEXT, "ä👍"], [TEXT, "ä👍"])


@BOTH
def test_a_stream_that_is_resumed_anywhere_goes_on_with_the_same_text(endpoint: ApiEndpoint[Any]) -> None:
    meta, text = make_meta(endpoint, make_tool(endpoint, LARK)), f"so {write_call(write_arguments(TEXT))}"
    log = make_log([text[begin : begin + 2] for begin in range(0, len(text), 2)])
    sent = read_stream(endpoint, meta, log)
    for place, one in enumerate(sent[:-1]):
        assert read_stream(endpoint, meta, log, one.id) == sent[place + 1 :]


@BOTH
def test_arguments_of_another_form_are_the_text(endpoint: ApiEndpoint[Any]) -> None:
    meta = make_meta(endpoint, make_tool(endpoint))
    assert list_texts(endpoint, meta, [write_call('{"patch": 3}'), ""]) == (['{"patch": 3}'], ['{"patch": 3}'])


@BOTH
@pytest.mark.parametrize("grammar", [LARK, {"syntax": "regex", "definition": "^(?:[+].*\n)+$"}])
def test_the_text_of_a_call_is_held_to_its_grammar(endpoint: ApiEndpoint[Any], grammar: dict[str, Any]) -> None:
    requests: list[Any] = [{}]
    make_meta(endpoint, make_tool(endpoint, grammar), requests)
    spec: GrammarSpec = requests[0]["grammar"]
    assert spec.kind == "tools"
    state = GrammarState(CompiledGrammar(spec, GrammarTokenizer.make_bytes()))
    for text, is_allowed in ((TEXT, True), ("-a\n", False)):
        written = f'<tool_call>{{"name": "patch", "arguments": {write_arguments(text)}}}'.encode()
        assert (state.count_allowed(list(written)) == len(written)) == is_allowed
    (tool,) = parse_body(endpoint, tools=[make_tool(endpoint, grammar)]).offered_tools
    function = getattr(tool, "function", tool)
    assert function.parameters["properties"]["input"]["description"].endswith(grammar["definition"])


@BOTH
def test_what_cannot_be_held_says_why(endpoint: ApiEndpoint[Any]) -> None:
    grammar = LARK | {"definition": 'start: "(" start ")" | "x"'}
    with pytest.raises(ApiError, match="the rule 'start' needs itself") as refused:
        parse_body(endpoint, tools=[make_tool(endpoint, grammar)])
    assert (refused.value.status, (refused.value.param or "").startswith("tools.0")) == (400, True)


def test_a_chat_calls_by_name_and_has_calls_in_its_history() -> None:
    chosen = {"type": "custom", "custom": {"name": "patch"}}
    history = [
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "custom", "custom": {"name": "patch", "input": TEXT}},
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]  # fmt: skip
    body = parse_body(CHAT, tools=[make_tool(CHAT)], tool_choice=chosen, messages=history)
    assert (body.call_choice.names, body.call_choice.is_required) == (["patch"], True)
    (args,) = CHAT.make_requests(body, "r")
    (call,) = (args["messages"] or [{}])[0]["tool_calls"]  # type: ignore[index]
    assert call == {
        "id": "c", "type": "function", "function": {"name": "patch", "arguments": write_arguments(TEXT)},
    }  # fmt: skip
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [chosen]}}
    assert parse_body(CHAT, tools=[make_tool(CHAT)], tool_choice=allowed).call_choice.names == ["patch"]


def test_a_response_calls_by_name_and_goes_on_with_its_items() -> None:
    tools = [make_tool(RESPONSES)]
    body = parse_body(RESPONSES, tools=tools, tool_choice={"type": "custom", "name": "patch"})
    assert (body.call_choice.names, body.call_choice.is_required) == (["patch"], True)
    meta = make_meta(RESPONSES, tools[0])
    response = RESPONSES.make_answer(meta, [build_answer("r", make_log([write_call(write_arguments(TEXT))]))])
    assert response.model_dump()["tools"][0]["name"] == "patch"
    (item,) = response.output
    assert item.type == "custom_tool_call"
    assert (item.id.startswith("ctc_"), item.status) == (True, "completed")
    given = [item.model_dump(), {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}]
    turns = parse_body(RESPONSES, input=given, tools=tools).make_turns()
    assert turns[0]["tool_calls"][0]["function"] == {"name": "patch", "arguments": write_arguments(TEXT)}
    assert turns[1] == {"role": "tool", "content": "done", "tool_call_id": item.call_id}


@given(st.text(), st.booleans(), st.lists(st.integers(1, 9), min_size=1))
def test_a_text_is_read_from_whatever_pieces(text: str, is_ascii: bool, steps: list[int]) -> None:
    text = text.encode("utf-8", "replace").decode()
    written, reader, found, at = json.dumps({"input": text}, ensure_ascii=is_ascii), TextReader(), "", 0
    while at < len(written):
        step = steps[at % len(steps)]
        found += reader.add_text(written[at : at + step], is_last=at + step >= len(written))
        at += step
    assert found == text
