"""The items and events of responses: the same of a whole answer and of a stream, from whatever event it is resumed."""

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.client.core import Event, build_answer
from penstock.ingest.errors import ApiError
from penstock.ingest.openai import RESPONSES, StreamMeta, make_stream_meta
from penstock.ingest.openai.cursor import SentEvent
from penstock.ingest.openai.endpoint import use_response_template
from penstock.ingest.openai.response_items import OutputClientCall
from penstock.ingest.openai.responses import Response, describe_input_items
from penstock.messages import FinishReason
from tests.ingest.answers import TEMPLATE, make_log, read_stream

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
NAME = {"type": "function", "name": "f"}
CALL = '<tool_call>{"name": "f", "arguments": {"a": "b c"}}</tool_call>'
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELD = {"parallel_tool_calls": True, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAME]}}
TYPED = HELD | {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}}
PIECES = ["<think>", "</think>", CALL, CALL, " ", "\n", "some", " text", "<tool_call>", "</tool_call>", "<", "ä👍"]


def make_meta(**more: Any) -> StreamMeta:
    body = RESPONSES.parse_body({"model": "m", "input": "hi", "tools": [TOOL]} | more)
    return make_stream_meta(RESPONSES, body, "resp_1", form=use_response_template(RESPONSES, body, [], TEMPLATE))


def cut_text(text: str, step: int) -> list[str]:
    return [text[begin : begin + step] for begin in range(0, len(text), step)]


def make_whole(meta: StreamMeta, log: Sequence[Event]) -> Response:
    return RESPONSES.make_answer(meta, [build_answer(meta.id, log)])


def describe_items(response: Response) -> list[tuple[str, str, str]]:
    """Return type, text and status of each item."""
    found: list[tuple[str, str, str]] = []
    for item in response.output:
        if item.type == "custom_tool_call":
            text = item.input
        elif isinstance(item, OutputClientCall):
            text = str(item.action or item.operation)
        else:
            text = f"{item.name}({item.arguments})" if item.type == "function_call" else item.content[0].text
        found.append((item.type, text, item.status))
    return found


F = ("function_call", 'f({"a": "b c"})', "completed")
CASES: dict[str, tuple[str, FinishReason, list[tuple[str, str, str]]]] = {
    "text": ("Hello.", "stop", [("message", "Hello.", "completed")]),
    "nothing": ("", "stop", [("message", "", "completed")]),
    "white space": (" \n", "stop", [("message", " \n", "completed")]),
    "all": (
        f"<think>Hm</think>\n\nNow: {CALL}\n{CALL}\n", "stop",
        [("reasoning", "Hm", "completed"), ("message", "\n\nNow: ", "completed"), F, F],
    ),
    "text after a call": (f"{CALL} Done.", "stop", [F, ("message", " Done.", "completed")]),
    "empty reasoning": ("<think>\n\n</think>Yes", "stop", [("message", "Yes", "completed")]),
    "cut in reasoning": ("<think>Hm", "length", [("reasoning", "Hm", "incomplete")]),
    "cut in text": ("<think>Hm</think>Yes", "length", [
        ("reasoning", "Hm", "completed"), ("message", "Yes", "incomplete"),
    ]),
    "cut in a call": (f'{CALL}<tool_call>{{"name": "f"', "length", [F, ("message", '{"name": "f"', "incomplete")]),
    "cut in a held call": (f'{CALL}\n{CALL[:-16]}', "length", [F, ("function_call", 'f({"a": "b )', "incomplete")]),
    "cut after a held call": (CALL[:-5], "length", [F]),
    "no call": ('<tool_call>{"name": 1}</tool_call>', "stop", [("message", '{"name": 1}', "completed")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_items_of_an_answer_are_in_its_order(name: str) -> None:
    text, reason, expected = CASES[name]
    meta = make_meta(**(HELD if "held" in name else {}))
    for step in (1, 2, 5, 100):
        texts = cut_text(text, step)
        log = make_log(texts, reason=reason)
        whole = make_whole(meta, log)
        assert describe_items(whole) == expected
        last = json.loads(read_stream(RESPONSES, meta, log)[-1].event.data)
        assert last["response"] == whole.model_dump(mode="json")
        assert last["type"] == f"response.{'incomplete' if reason == 'length' else 'completed'}"


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=10),
    step=st.integers(1, 9),
    has_logprobs=st.booleans(),
    is_held=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
    more=st.sampled_from([{}, HELD, TYPED]),
)
def test_openais_reader_puts_the_same_together_and_goes_on_after_any_event(
    pieces: list[str], step: int, has_logprobs: bool, is_held: bool, reason: FinishReason, more: dict[str, Any]
) -> None:
    text = "".join(pieces)
    if more and reason == "length":
        text += CALL[: step - 20]
    texts = cut_text(text, step)
    rest = texts.pop() if texts and is_held else ""
    meta = make_meta(**({"include": ["message.output_text.logprobs"]} if has_logprobs else {}), **more)
    log = make_log(texts, rest, reason, has_logprobs=has_logprobs)
    sent = read_stream(RESPONSES, meta, log)
    check_as_openai(sent, make_whole(meta, log))
    ids = [one.id for one in sent]
    assert len(set(ids)) == len(ids)
    for place, one in enumerate(sent[:-1]):
        assert read_stream(RESPONSES, meta, log, after=one.id) == sent[place + 1 :]
        assert [later.event for later in read_stream(RESPONSES, meta, log, number=place)] == [
            later.event for later in sent[place + 1 :]
        ]


def check_as_openai(sent: list[SentEvent], whole: Response) -> None:
    """Check what OpenAI's SDK makes of a stream, event by event."""
    state = ResponseStreamState(input_tools=[], text_format=openai.omit)
    deltas: dict[tuple[int, str], list[Any]] = {}
    done: dict[int, Any] = {}
    for number, one in enumerate(sent):
        raw = json.loads(one.event.data)
        event = EVENTS.validate_python(raw)
        assert event.model_dump(mode="json", exclude_unset=True, by_alias=True)["type"] == one.event.event
        assert event.sequence_number == number
        state.handle_event(event)
        if event.type.endswith(".delta"):
            assert event.item_id == raw["item_id"]
            deltas.setdefault((event.output_index, event.item_id), []).append(raw)
        if event.type == "response.output_item.done":
            done[event.output_index] = raw["item"]
    output = whole.model_dump(mode="json")["output"]
    assert list(done.values()) == output
    for (place, item_id), found in deltas.items():
        item = output[place]
        assert item["id"] == item_id
        text = "".join(one["delta"] for one in found)
        if item["type"] == "function_call":
            assert text == item["arguments"]
            continue
        assert text == item["content"][0]["text"]
        if item["type"] == "message":
            assert [entry for one in found for entry in one["logprobs"]] == item["content"][0]["logprobs"]
    if whole.status == "completed":
        assert state._completed_response is not None
        assert [item.type for item in state._completed_response.output] == [item["type"] for item in output]


def test_the_tokens_of_reasoning_are_counted_and_have_no_log_probabilities() -> None:
    texts = [
        "<think>", "I", " see", "</think>", "Yes", ".", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>",
    ]  # fmt: skip
    meta = make_meta(include=["message.output_text.logprobs"])
    whole = make_whole(meta, make_log(texts, has_logprobs=True))
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 3, "the mark's too"
    thought, message, call = whole.output
    assert (thought.type, call.type) == ("reasoning", "function_call")
    assert message.type == "message"
    assert [one.token for one in message.content[0].logprobs] == ["<3>", "<4>", "<5>"]


def test_an_answer_without_a_template_is_a_message_as_it_is() -> None:
    body = RESPONSES.parse_body({"model": "m", "input": "hi"})
    meta = make_stream_meta(RESPONSES, body, "resp_1")
    log = make_log(["\n", "<think>", CALL])
    assert describe_items(make_whole(meta, log)) == [("message", f"\n<think>{CALL}", "completed")]
    kinds = [one.event.event for one in read_stream(RESPONSES, meta, log)]
    assert kinds.count("response.output_text.delta") == 3


def make_turns(*items: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    (request,) = RESPONSES.make_requests(RESPONSES.parse_body({"model": "m", "input": list(items)} | more), "resp_1")
    return [dict(turn) if isinstance(turn, dict) else turn.model_dump() for turn in request["messages"] or ()]


USER = {"role": "user", "content": "hi"}


def call(call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", "id": "fc_1"}


def result(call_id: str, output: Any = "red") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(*call_ids: str) -> list[dict[str, Any]]:
    return [{"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}} for one in call_ids]


def test_what_the_model_said_in_one_go_is_one_turn() -> None:
    said = {
        "type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Now", "annotations": []}],
    }  # fmt: skip
    parts = [{"type": "input_text", "text": "gr"}, {"type": "input_text", "text": "een"}]
    turns = make_turns(
        USER, reasoning("Hm"), said, call("a"), call("b"), result("b"), result("a", parts), reasoning("So"), call("c"),
        result("c", ""), said, said, instructions="Be short.",
    )  # fmt: skip
    assert turns == [
        {"role": "system", "content": "Be short."}, USER,
        {"role": "assistant", "content": "Now", "reasoning_content": "Hm", "tool_calls": called("a", "b")},
        {"role": "tool", "content": "red", "tool_call_id": "b"},
        {"role": "tool", "content": "green", "tool_call_id": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "So", "tool_calls": called("c")},
        {"role": "tool", "content": "", "tool_call_id": "c"}, {"role": "assistant", "content": "Now"},
        {"role": "assistant", "content": "Now"},
    ]  # fmt: skip
    assert make_turns(USER, {"type": "reasoning", "encrypted_content": "x", "summary": []}) == [USER]


@pytest.mark.parametrize(
    ("items", "param", "message"),
    [
        ([USER, result("a")], "input", "No tool call found for function call output with call_id a."),
        ([USER, result("a"), call("a")], "input", "No tool call found"),
        ([USER, call("a"), result("a", [{"type": "input_image", "image_url": "x"}])], "input.2.output.0", "only text"),
        ([USER, {"type": "computer_call", "id": "cu_1"}], "input.1", "items of the types message, reasoning, fun"),
        ([USER, {"type": "item_reference", "id": "fc_1"}], "input.1", "send the item itself"),
        ([{"type": "additional_tools", "role": "developer", "tools": [TOOL]}], "input", "an empty input"),
        ([USER, {"type": "function_call", "call_id": "a", "name": "f"}], "input.1.arguments", "Missing"),
        ([USER, call("a") | {"namespace": "n" * 255}], "input.1", "at most 255 characters together"),
        ([USER, {"type": "local_shell_call_output", "id": "a", "output": "x"}], "input", "No tool call found"),
        ([{"type": "compaction", "encrypted_content": "x"}], "input", "at least 1 item"),
        ([{"type": "reasoning", "encrypted_content": "x"}], "input", "an empty input"),
    ],
)
def test_items_that_cannot_be_turns_are_refused(items: list[Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        make_turns(*items)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_agents_send_besides_becomes_turns() -> None:
    output = {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "done"}]}
    turns = make_turns(
        USER, {"type": "agent_reasoning", "text": "Hm"}, call("a") | {"namespace": "notes"}, result("a"),
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "ä\n", "namespace": "files"}, output,
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "{}"},
        {"type": "web_search_call", "id": "ws_1", "action": {}}, {"type": "compaction", "encrypted_content": "x"},
        {"type": "agent_message", "author": "/root/b", "recipient": "/root", "content": [
            {"type": "input_text", "text": "It works."},
        ]},
        {"type": "agent_message", "content": "Good."},
    )  # fmt: skip
    functions = [
        {"name": "notes.f", "arguments": "{}"}, {"name": "files.patch", "arguments": '{"input": "ä\\n"}'},
        {"name": "local_shell", "arguments": '{"type": "exec", "command": ["ls"]}'},
    ]  # fmt: skip
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
        for call_id, function in zip("abc", functions, strict=True)
    ]
    calls[0]["reasoning_content"] = "Hm"
    assert turns == [
        USER, calls[0], {"role": "tool", "content": "red", "tool_call_id": "a"},
        calls[1], {"role": "tool", "content": "done", "tool_call_id": "b"},
        calls[2], {"role": "tool", "content": "{}", "tool_call_id": "c"},
        {"role": "user", "content": "/root/b: It works."}, {"role": "user", "content": "Good."},
    ]  # fmt: skip


SHELL, PATCH = {"type": "shell", "environment": {"type": "local"}}, {"type": "apply_patch"}
COMMANDS, CHANGE = {"commands": ["ls", "pwd"]}, {"type": "update_file", "path": "a", "diff": "@@\n-ä\n+b"}


def write_call(name: str, arguments: Any) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def test_tools_that_the_client_runs_are_functions_whose_calls_are_items_of_their_own() -> None:
    required = {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}, PATCH]}}
    deletion = {"type": "delete_file", "path": "b", "diff": ""}
    said = [("shell", COMMANDS), ("apply_patch", CHANGE), ("apply_patch", deletion)]
    for more in ({}, required):
        meta = make_meta(tools=[TOOL, SHELL, PATCH], **more)
        assert meta.calls == ("held" if more else "free")
        log = make_log(cut_text("".join(write_call(*one) for one in said), 5))
        whole = make_whole(meta, log)
        check_as_openai(read_stream(RESPONSES, meta, log), whole)
        items = whole.model_dump(mode="json")["output"]
        assert [item["type"] for item in items] == ["shell_call", "apply_patch_call", "apply_patch_call"]
        assert (items[0]["action"], items[0]["environment"]) == (COMMANDS, {"type": "local"})
        assert [item["operation"] for item in items[1:]] == [CHANGE, {"type": "delete_file", "path": "b"}]
        assert len({item["call_id"] for item in items}) == 3
        ended = {"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
        results = [
            {"type": "shell_call_output", "call_id": items[0]["call_id"], "output": [ended], "max_output_length": 9},
            {"type": "apply_patch_call_output", "call_id": items[1]["call_id"], "status": "failed", "output": "no a"},
            {"type": "apply_patch_call_output", "call_id": items[2]["call_id"], "status": "completed"},
        ]
        _, answer, *told = make_turns(USER, *items, *results)
        functions = [
            (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in answer["tool_calls"]
        ]
        assert functions == [("shell", COMMANDS), ("apply_patch", CHANGE), ("apply_patch", items[2]["operation"])]
        assert [turn["content"] for turn in told] == [json.dumps([ended]), "failed: no a", "completed"]


def test_a_call_with_arguments_that_such_a_tool_does_not_have_is_a_functions() -> None:
    meta = make_meta(tools=[SHELL, PATCH])
    log = make_log(cut_text(write_call("shell", {"command": "ls"}) + write_call("apply_patch", {"path": "a"}), 7))
    whole = make_whole(meta, log)
    check_as_openai(read_stream(RESPONSES, meta, log), whole)
    assert describe_items(whole) == [
        ("function_call", 'shell({"command": "ls"})', "completed"),
        ("function_call", 'apply_patch({"path": "a"})', "completed"),
    ]
    held = make_meta(tools=[SHELL], tool_choice={"type": "shell"})
    log = make_log(cut_text(write_call("shell", COMMANDS)[:-20], 7), reason="length")
    ((kind, text, status),) = describe_items(make_whole(held, log))
    assert (kind, text[:20], status) == ("function_call", 'shell({"commands": [', "incomplete")
    with pytest.raises(ApiError, match="has no containers"):
        make_meta(tools=[{"type": "shell", "environment": {"type": "container_auto"}}])


def test_an_item_may_add_tools() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [
        TOOL, SHELL, {"type": "web_search"}, {"type": "custom", "name": "patch"},
    ]}  # fmt: skip
    body = RESPONSES.parse_body({"model": "m", "input": [added, USER], "tools": [TOOL]})
    assert body.make_turns() == [USER]
    assert [tool.name for tool in body.offered_tools] == ["f", "shell", "patch"]
    meta = make_stream_meta(RESPONSES, body, "resp_1", form=use_response_template(RESPONSES, body, [], TEMPLATE))
    whole = make_whole(meta, make_log([write_call("shell", COMMANDS), write_call("patch", {"input": "x"})]))
    assert [item.type for item in whole.output] == ["shell_call", "custom_tool_call"]
    later = RESPONSES.parse_body({"model": "m", "input": "go on"}).add_history(body.make_items())
    assert [tool.name for tool in later.offered_tools] == ["f", "shell", "patch"], "an earlier turn's too"


NAMESPACE = {"type": "namespace", "name": "notes", "description": "Notes.", "tools": [TOOL, TOOL | {"name": "g"}]}
NAMESPACED = {"type": "function", "name": "f", "namespace": "notes"}


def test_the_model_knows_functions_of_a_namespace_by_qualified_names() -> None:
    search = {"type": "web_search", "external_web_access": True}
    some = {"type": "allowed_tools", "mode": "required", "tools": [NAMESPACED, search]}
    for choice, allowed in (
        ("auto", None), ("none", None), (NAMESPACED, ["notes.f"]), (NAME, ["f"]), (some, ["notes.f"]),
    ):  # fmt: skip
        body = RESPONSES.parse_body({
            "model": "m", "input": "hi", "tools": [TOOL, search, NAMESPACE], "tool_choice": choice,
        })  # fmt: skip
        assert [tool.name for tool in body.offered_tools] == ([] if choice == "none" else ["f", "notes.f", "notes.g"])
        assert body.call_choice.names == allowed
        (request,) = RESPONSES.make_requests(body, "resp_1")
        told = (request.get("chat_template_kwargs") or {}).get("tools", [])
        assert [tool["function"]["name"] for tool in told] == [tool.name for tool in body.offered_tools]
        held = body.hold_calls(TEMPLATE)
        assert (None if held is None else [tool.name for tool in held.tools]) == allowed


@pytest.mark.parametrize(
    ("tool", "choice", "message"),
    [
        (NAMESPACE, {"type": "function", "name": "g"}, "names 'g', which is not in 'tools'"),
        ({"type": "web_search"}, "required", "asks for a call, and there are no functions"),
        (NAMESPACE, {"type": ["web_search"]}, "it is 'none', 'auto', 'required'"),
    ],
)
def test_a_choice_that_no_function_fits_is_refused(tool: Any, choice: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        RESPONSES.parse_body({"model": "m", "input": "hi", "tools": [tool], "tool_choice": choice})


@pytest.mark.parametrize("more", [{}, HELD | {"tool_choice": NAMESPACED}])
def test_a_call_of_a_namespace_says_so(more: dict[str, Any]) -> None:
    meta = make_meta(tools=[TOOL, NAMESPACE], **more)
    text = CALL.replace('"f"', '"notes.f"')
    names = [{"name": "f", "namespace": "notes"}]
    if not more:
        text += CALL + CALL.replace('"f"', '"other.f"')
        names += [{"name": "f"}, {"name": "other.f"}]
    log = make_log(cut_text(text, 5))
    whole = make_whole(meta, log)
    sent = read_stream(RESPONSES, meta, log)
    check_as_openai(sent, whole)
    items = whole.model_dump(mode="json")["output"]
    assert [{key: item[key] for key in ("name", "namespace") if key in item} for item in items] == names
    begun = [json.loads(one.event.data)["item"] for one in sent if one.event.event == "response.output_item.added"]
    assert [(item["name"], item.get("namespace")) for item in begun] == [
        (name["name"], name.get("namespace")) for name in names
    ]
    assert whole.model_dump(mode="json", exclude_none=True)["tools"] == [TOOL, NAMESPACE]
    again = make_turns(USER, *items)
    assert [one["function"]["name"] for one in again[1]["tool_calls"]] == [
        ".".join(filter(None, (name.get("namespace"), name["name"]))) for name in names
    ]


def test_a_template_is_given_tools_in_the_form_of_chats() -> None:
    body = RESPONSES.parse_body({
        "model": "m", "input": "hi", "tools": [TOOL], "reasoning": {"effort": "low", "summary": "auto"},
        "chat_template_kwargs": {"enable_thinking": False},
    })  # fmt: skip
    (request,) = RESPONSES.make_requests(body, "resp_1")
    function = {"name": "f", "parameters": TOOL["parameters"]}
    assert request["chat_template_kwargs"] == {
        "enable_thinking": False, "reasoning_effort": "low", "tools": [{"type": "function", "function": function}],
    }  # fmt: skip


def test_what_was_asked_is_listed_with_ids_by_type() -> None:
    given = [USER, reasoning("Hm") | {"id": None}, call("a") | {"id": None}, result("a")]
    body = RESPONSES.parse_body({"model": "m", "input": given})
    meta = make_stream_meta(RESPONSES, body, "resp_1", input_items=body.make_items())
    items = describe_input_items(meta)
    assert [item["id"] for item in items] == ["msg_1_in_0", "rs_1_in_1", "fc_1_in_2", "fco_1_in_3"]
    assert items[3] | {"id": ""} == result("a") | {"id": "", "status": "completed"}
