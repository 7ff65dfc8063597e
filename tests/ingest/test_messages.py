"""`/v1/messages` as data: what a body becomes, and what an answer's text becomes, whole and streamed."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from penstock.client.core import Answer
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.ingest.anthropic.client_tools import CLIENT_TOOLS
from penstock.ingest.anthropic.messages import MESSAGES, MessageAnswer, MessagesBody
from penstock.ingest.endpoints import make_error_body
from penstock.ingest.errors import ApiError
from penstock.ingest.ignored import strip_ignored_fields
from penstock.ingest.openai import CHAT, StreamMeta, make_stream_meta
from penstock.ingest.openai.body import parse_body
from penstock.ingest.openai.cursor import SentEvent
from penstock.ingest.openai.endpoint import TEXT, use_response_template
from penstock.messages import EndEvent, FinishReason, Timings, Usage
from tests.draws import mark_some
from tests.gateways import ScriptedPipeline
from tests.ingest.answers import TEMPLATE, make_log, read_stream
from tests.ingest.test_answer_parser import FIRST, PIECES, SECOND

ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {"name": "f", "description": "It does.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "ä"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USAGE = Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=3)


def text_block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def make_requests(**fields: Any) -> dict[str, Any]:
    """The one request of a body with these fields."""
    (args,) = MESSAGES.make_requests(MESSAGES.parse_body(ASKED | fields), "msg_1")
    return dict(args)


def make_turns(*messages: dict[str, Any], **fields: Any) -> list[Any]:
    turns: list[Any] = make_requests(messages=list(messages), **fields)["messages"]
    return turns


@pytest.mark.proof
def test_a_body_is_the_request_of_a_chat() -> None:
    options = {"temperature": 0.5, "top_k": 5, "top_p": 0.5}
    chat = {"model": "demo", "max_tokens": 9, "stop": ["x"], "messages": [{"role": "user", "content": "hi"}], **options}
    (expected,) = CHAT.make_requests(CHAT.parse_body(chat), "msg_1")
    assert make_requests(stop_sequences=["x"], **options) == {**expected, "tell_stop": True}


def test_what_has_no_effect_is_accepted() -> None:
    none = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "stream": False, "tool_choice": {"type": "auto"},
        "system": [text_block("") | CACHED], "messages": [{"role": "user", "content": [text_block("hi") | CACHED]}],
    }  # fmt: skip
    given = make_requests(**none, **CACHED, inference_geo="global", tools=None)
    given["messages"] = given["messages"][1:]
    assert given == make_requests()


@pytest.mark.proof
def test_blocks_become_turns_in_their_order() -> None:
    thinking = {"type": "thinking", "thinking": "I call.", "signature": "s"}
    parts = [text_block("a"), text_block("b")]
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "ä"})}}
    assert make_turns(
        {"role": "user", "content": [text_block("Do"), text_block(" it.")]},
        {"role": "assistant", "content": [thinking, text_block("So."), USE | CACHED]},
        {
            "role": "user",
            "content": [RESULT, RESULT | {"content": parts}, text_block("?")],
        },
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [text_block("Then?"), {"type": "tool_result", "tool_use_id": "toolu_2"}]},
        system=[text_block("Be"), text_block(" brief.")],
    ) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "content": "So.", "reasoning_content": "I call.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "done"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "ab"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Then?"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
    ]


def test_system_turns_are_turns_and_those_that_stand_first_are_one() -> None:
    user, system = ASKED["messages"][0], {"role": "system", "content": "Stay brief."}
    assert make_turns(system, user, {"role": "system", "content": [text_block("Now.")]}, user, system="Be kind.") == [
        {"role": "system", "content": "Be kind.\n\nStay brief."}, user, {"role": "system", "content": "Now."}, user,
    ]  # fmt: skip
    cleared = system | {"clear_at": "next_user_message", "output_config": {"effort": "low"}}
    assert make_turns(user, cleared, {"role": "assistant", "content": "a"}, user, cleared) == [
        user, {"role": "assistant", "content": "a"}, user, system,
    ]  # fmt: skip


SOURCE = {"type": "text", "media_type": "text/plain", "data": "It rains."}
WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "a document": (
        {"type": "document", "source": SOURCE, "title": "Day", "context": "news", "citations": {"enabled": True}},
        '<document title="Day" context="news">\nIt rains.\n</document>\n',
    ),
    "a document of blocks": (
        {"type": "document", "source": {"type": "content", "content": [text_block("a"), text_block("b")]}},
        "<document>\nab\n</document>\n",
    ),
    "a search result": (
        {"type": "search_result", "source": "s", "title": "t", "content": [text_block("x")], "citations": {}} | CACHED,
        '<search_result source="s" title="t">\nx\n</search_result>\n',
    ),
    "a reference": (
        {"type": "tool_reference", "tool_name": "f"}, "<tool_reference>\nf\n</tool_reference>\n",
    ),
    "a call of the server's": (
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rain"}, "caller": {}},
        '<server_tool_use name="web_search">\n{"query": "rain"}\n</server_tool_use>\n',
    ),
    "its results": (
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [
            {"title": "t", "url": "u", "encrypted_content": "x"}, text_block("y"),
        ]},
        '<web_search_tool_result>\n{"title": "t", "url": "u"}\ny\n</web_search_tool_result>\n',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_block_of_a_kind_that_templates_do_not_know_is_text(name: str) -> None:
    block, text = WRITTEN[name]
    in_results = name not in {"a call of the server's", "its results"}
    if name in {"a call of the server's", "its results"}:
        turns = make_turns({"role": "assistant", "content": [block, text_block("So.")]}, ASKED["messages"][0])
        assert turns[0] == {"role": "assistant", "content": f"{text}So."}
    elif name != "a reference":
        assert make_turns({"role": "user", "content": [block, text_block("?")]})[0]["content"] == f"{text}?"
    if in_results:
        assert make_turns({"role": "user", "content": [RESULT | {"content": [block]}]})[0]["content"] == text


def test_reasoning_that_nobody_can_read_is_left_out() -> None:
    block = {"type": "redacted_thinking", "data": "x"}
    turns = make_turns({"role": "assistant", "content": [block, text_block("a")]}, ASKED["messages"][0])
    assert turns[0] == {"role": "assistant", "content": "a"}


@pytest.mark.proof
def test_what_an_agent_of_anthropics_sends_is_accepted_and_its_hosted_tools_are_named() -> None:
    tools = [
        TOOL, SEARCH, {"type": "bash_20250124", "name": "bash"},
        {"type": "tool_search_tool_regex_20251119", "name": "s"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9, "strict": True},
        {"type": "memory_20250818", "name": "memory"},
    ]  # fmt: skip
    _, named = strip_ignored_fields("/v1/messages", ASKED | {"tools": tools})
    assert named == [
        "tools[web_search_20250305]", "tools[tool_search_tool_regex_20251119]", "tools.*.max_characters",
    ]  # fmt: skip
    offered = make_requests(tools=tools)["chat_template_kwargs"]["tools"]
    assert [one["function"]["name"] for one in offered] == ["f", "bash", "str_replace_based_edit_tool", "memory"]
    _, bash, editor, _ = (one["function"] for one in offered)
    assert bash["parameters"]["required"] == ["command"]
    assert editor["parameters"]["properties"]["command"] == {"enum": ["view", "create", "str_replace", "insert"]}
    with pytest.raises(ApiError, match="'tool_choice' names 'web_search', which is not in 'tools'"):
        make_requests(tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    for kind in CLIENT_TOOLS:
        (made,) = make_requests(tools=[{"type": kind, "name": "own", "strict": True}])["chat_template_kwargs"]["tools"]
        CompiledGrammar(make_schema_spec(made["function"]["parameters"], kind), GrammarTokenizer.make_bytes())


@pytest.mark.proof
def test_tools_and_thinking_are_given_to_the_chat_template() -> None:
    function = {"name": "f", "description": "It does.", "parameters": {"type": "object"}}
    variables = make_requests(tools=[TOOL | CACHED], thinking={"type": "enabled", "budget_tokens": 1024})
    assert variables["chat_template_kwargs"] == {
        "tools": [{"type": "function", "function": function}], "enable_thinking": True,
    }  # fmt: skip
    hidden = make_requests(tools=[TOOL], tool_choice={"type": "none"}, thinking={"type": "disabled"})
    assert hidden["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in make_requests(thinking={"type": "adaptive"})


@pytest.mark.proof
def test_a_format_is_the_grammar_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    chat = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    chat |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    (expected,) = CHAT.make_requests(CHAT.parse_body(chat), "msg_1")
    assert make_requests(output_config={"format": {"type": "json_schema", "schema": schema}}) == expected
    assert make_requests(output_config={"effort": "low", "format": None}) == make_requests()


def test_a_thread_is_refused_so_that_the_sdk_goes_on_without() -> None:
    with pytest.raises(ApiError) as refused:
        make_requests(thread={"type": "create"})
    error = MESSAGES.make_error_body(refused.value).model_dump()["error"]
    assert error["details"]["error_code"] == "thread_unsupported_request"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "an unknown field": ({"seed": 1}, "seed"),
    "too hot": ({"temperature": 1.5}, "temperature"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0"),
    "an image without a source": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.image.source",
    ),
    "a file": (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
        "messages.0.content.0.document.source",
    ),
    "servers of tools": ({"mcp_servers": [{"type": "url", "url": "https://example.com", "name": "a"}]}, "mcp_servers"),
    "a container": ({"container": "a"}, "container"),
    "an image as a result": (
        {"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]}, "messages.0.content.0",
    ),
    "a call of the user's": ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0.type"),
    "a beginning of the answer": (
        {"messages": [*ASKED["messages"], {"role": "assistant", "content": "I"}]}, "messages.1.role",
    ),
    "too many calls": (
        {"messages": [{"role": "assistant", "content": [USE] * 129}, *ASKED["messages"]]}, "messages.0.content",
    ),
    "a number as text": ({"system": 3}, "system"),
    "a tool that needs a screen": ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools.0.type"),
    "a system turn's end": ({"messages": [{**ASKED["messages"][0], "clear_at": "never"}]}, "messages.0.clear_at"),
    "a tool that must be called, without a name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    "another choice": ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    "another place": ({"inference_geo": "us"}, "inference_geo"),
    "another form": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    "a form by its old name": ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
    "a thread": ({"thread": {"type": "create"}}, "thread"),
}  # fmt: skip


@pytest.mark.proof
def test_what_cannot_be_had_is_named_and_not_published(scripted: ScriptedPipeline) -> None:
    with scripted.open_gateway() as gateway, gateway.client() as http:
        for fields, param in REFUSED.values():
            with pytest.raises(ApiError) as refused:
                make_requests(**fields)
            assert (refused.value.status, refused.value.param) == (400, param)
            answer = http.post("/v1/messages", json=ASKED | fields | {"model": scripted.model, "stream": True})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert param in error["message"]
    assert scripted.read_requests() == []


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud83d"'])
def test_input_that_is_no_json_is_refused(value: str) -> None:
    turns = [{"role": "assistant", "content": [USE | {"input": {"a": "HERE"}}]}, *ASKED["messages"]]
    with pytest.raises(ApiError) as refused:
        MESSAGES.parse_body(json.dumps(ASKED | {"messages": turns}).replace('"HERE"', value).encode())
    assert refused.value.status == 400


# The answer.


def make_meta(*, has_template: bool = True, is_held: bool = False, is_typed: bool = False) -> StreamMeta:
    typed = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}} if is_typed else {}
    body = MESSAGES.parse_body(ASKED | {"tools": [TOOL | {"strict": True} if is_held else TOOL]} | typed)
    form = use_response_template(MESSAGES, body, [], TEMPLATE) if has_template else TEXT
    return make_stream_meta(MESSAGES, body, "msg_1", form=form)


def answer_whole(text: str, reason: FinishReason = "stop", **options: bool) -> MessageAnswer:
    answer = Answer("msg_1", text, [], reason, USAGE, Timings(), [])
    return MESSAGES.make_answer(make_meta(**options), [answer])


def list_events(texts: list[str], after: str | None = None, **options: bool) -> list[SentEvent]:
    """All events of an answer whose tokens have these texts, but for the last one, which is the end's."""
    return read_stream(MESSAGES, make_meta(**options), make_log(texts[:-1], texts[-1]), after)


def accumulate(events: list[SentEvent]) -> dict[str, Any]:
    """The message that a stream's events make; they must come in their order."""
    bodies = [json.loads(one.event.data) for one in events]
    assert [one.event.event for one in events] == [body["type"] for body in bodies]
    start, ping, *middle, delta, stop = bodies
    assert [one["type"] for one in (start, ping, delta, stop)] == [
        "message_start", "ping", "message_delta", "message_stop",
    ]  # fmt: skip
    message: dict[str, Any] = start["message"]
    open_index, arguments = None, ""
    for body in middle:
        index = body["index"]
        match body["type"]:
            case "content_block_start":
                assert (open_index, index) == (None, len(message["content"]))
                message["content"].append(body["content_block"])
                open_index, arguments = index, ""
            case "content_block_delta":
                assert index == open_index
                kind = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                name = kind[body["delta"]["type"]]
                if name == "partial_json":
                    arguments += body["delta"][name]
                    message["content"][index]["input"] = from_json(arguments, allow_partial=True)
                else:
                    message["content"][index][name] += body["delta"][name]
            case "content_block_stop":
                assert index == open_index
                open_index = None
    assert open_index is None
    message |= delta["delta"] | {"usage": delta["usage"]}
    return message


@pytest.mark.proof
def test_an_answer_has_its_blocks_in_order() -> None:
    answer = answer_whole(f"<think>I see</think>\n\nNow {FIRST}\n{SECOND} and").model_dump()
    assert answer["content"] == [
        {"type": "thinking", "thinking": "I see", "signature": ""},
        text_block("\n\nNow ") | {"citations": []},
        {"type": "tool_use", "id": "toolu_1_2", "name": "f", "input": {"a": 'x"y'}, "caller": {"type": "direct"}},
        {"type": "tool_use", "id": "toolu_1_3", "name": "g", "input": {}, "caller": {"type": "direct"}},
        text_block(" and") | {"citations": []},
    ]
    assert (answer["id"], answer["role"], answer["stop_reason"]) == ("msg_1", "assistant", "tool_use")
    assert {name: num for name, num in answer["usage"].items() if isinstance(num, int)} == {
        "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    mark_some([
        ("a", "stop", "end_turn"), ("a", "length", "max_tokens"),
        (FIRST, "stop", "tool_use"), (FIRST, "length", "max_tokens"),
    ], pytest.mark.proof),
)  # fmt: skip
def test_why_an_answer_ended(text: str, reason: FinishReason, expected: str) -> None:
    assert answer_whole(text, reason).stop_reason == expected


def test_the_stop_sequence_that_ended_an_answer_is_told() -> None:
    answer = Answer("msg_1", f"a{FIRST}", [], "stop", USAGE, Timings(), [], stop="END")
    whole = MESSAGES.make_answer(make_meta(), [answer])
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")
    chunks = MESSAGES.make_chunks(make_meta())
    delta = json.loads(chunks.end_choice(0, EndEvent(finish_reason="stop", stop="END"))[-1].data)["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_an_answer_of_white_space_has_no_blocks() -> None:
    assert answer_whole(" \n").content == []
    assert accumulate(list_events([" ", "\n"]))["content"] == []


def test_without_a_response_template_an_answer_is_text() -> None:
    whole = answer_whole(f"<think>{FIRST}", has_template=False).model_dump()
    assert (whole["content"], whole["stop_reason"]) == (
        [text_block(f"<think>{FIRST}") | {"citations": []}],
        "end_turn",
    )
    assert accumulate(list_events(["<think>", FIRST], has_template=False))["content"] == whole["content"]


@pytest.mark.parametrize("is_typed", [False, True])
def test_the_arguments_of_a_held_call_come_in_pieces_and_a_cut_call_has_what_is_whole(is_typed: bool) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1, "x"], "b": "yz"}}</tool_call>'
    begin = text.index('{"a"')
    for end in range(begin + 1, len(text)):
        for step in (1, 4, 100):
            texts = [text[:end][place : place + step] for place in range(0, end, step)]
            events = list_events([*texts, ""], is_held=True, is_typed=is_typed)
            found = accumulate(events)["content"]
            assert found == answer_whole(text[:end], "length", is_held=True, is_typed=is_typed).model_dump()["content"]
            pieces = [json.loads(one.event.data) for one in events if one.event.event == "content_block_delta"]
            assert "".join(one["delta"]["partial_json"] for one in pieces) == text[begin : min(end, len(text) - 13)]
            if step == 4:
                for number, one in enumerate(events[:-1], 1):
                    assert list_events([*texts, ""], one.id, is_held=True, is_typed=is_typed) == events[number:]
    block = {"type": "tool_use", "id": "toolu_1_0", "name": "f", "input": {"a": [1, "x"], "b": "yz"}}
    assert found == [block | {"caller": {"type": "direct"}}]
    (cut,) = answer_whole(text[: begin + 22], "length", is_held=True, is_typed=is_typed).content
    assert cut.model_dump()["input"] == {"a": [1, "x"]}
    (cut,) = answer_whole(text[:begin] + '{"a": ' + "[" * 300, "length", is_held=True, is_typed=is_typed).content
    assert cut.model_dump()["input"] == {}


TEXTS = [*PIECES, FIRST, SECOND, f"</think>\n{SECOND}{FIRST}b", ""]


@pytest.mark.proof
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6), st.data())
def test_a_stream_has_the_same_blocks_and_can_be_resumed_at_any_event(texts: list[str], data: st.DataObject) -> None:
    events = list_events(texts)
    assert accumulate(events)["content"] == answer_whole("".join(texts)).model_dump()["content"]
    ids = [one.id for one in events]
    assert len({*ids, ""}) == len(ids) + 1
    seen = data.draw(st.integers(0, len(events) - 2))
    assert list_events(texts, events[seen].id) == events[seen + 1 :]


# Errors, and what the routes say of themselves.


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (409, "invalid_request_error"), (413, "request_too_large"),
        (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"), (504, "timeout_error"),
        (408, "invalid_request_error"),
    ],
)  # fmt: skip
def test_errors_have_the_form_of_their_path(status: int, kind: str) -> None:
    error = ApiError(status, "no", code="why")
    expected = {"type": "error", "error": {"type": kind, "message": "no", "details": {"error_code": "why"}}}
    assert make_error_body("/v1/messages", error).model_dump() == expected
    assert make_error_body("/v1/messages/count_tokens", error).model_dump() == expected
    assert make_error_body("/v1/messages_", error) == error.body
    assert make_error_body("/v1/chat/completions", error) == error.body


@pytest.mark.proof
async def test_routes_answer_errors_in_their_form(bare: httpx.AsyncClient) -> None:
    wrong = await bare.post("/v1/messages", json=ASKED | {"sed": 1})
    method = await bare.get("/v1/messages")
    unknown = await bare.post("/v1/messages/batches", json={})
    count = await bare.post("/v1/messages/count_tokens", json=ASKED)
    large = await bare.post("/v1/messages", content=b" " * (9 * 2**20))
    document = (await bare.get("/openapi.json")).json()
    answers = [(one.status_code, one.json()["error"]["type"]) for one in (wrong, method, unknown, count, large)]
    bad = "invalid_request_error"
    assert answers == [(400, bad), (405, bad), (404, "not_found_error"), (400, bad), (413, "request_too_large")]
    assert "max_tokens" in count.json()["error"]["message"]
    told = {status for path in document["paths"].values() for one in path.values() for status in one["responses"]}
    assert "422" not in told
    assert "ChatBody" in document["components"]["schemas"]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        responses = document["paths"][path]["post"]["responses"]
        errors = {
            name: one["content"]["application/json"]["schema"] for name, one in responses.items() if name != "200"
        }
        assert {schema["$ref"].rpartition("/")[2] for schema in errors.values()} == {"MessageErrorBody"}
        assert {"408", "413", "503"} <= responses.keys()


def test_the_document_has_both_forms_of_a_text() -> None:
    schema = MessagesBody.model_json_schema()
    content = schema["$defs"]["MessageParam"]["properties"]["content"]["anyOf"]
    assert [one["type"] for one in content] == ["string", "array"]
    assert parse_body(MessagesBody, ASKED).messages[0].content[0].type == "text"
