"""What an endpoint is asked, field by field, and what it says."""

import email.message
import email.utils
import json
from typing import Any, cast

import pytest

from penstock.client.core import RequestFields, make_request
from penstock.endpoint_worker.question import OPEN_MAX_TOKENS, build_question, check_request
from penstock.endpoint_worker.reply import describe_error, parse_retry_after, read_usage
from penstock.errors import AnswerInterrupted, InvalidRequest, UnknownModel
from penstock.grammar.tools import ENDPOINT_TEMPLATE, THINK_CLOSE, THINK_OPEN, ConstrainedTool, constrain_calls
from penstock.ingest.openai.chat import CHAT as CHAT_ENDPOINT
from penstock.ingest.openai.endpoint import AnswerForm, build_request, use_response_template
from penstock.messages import Request, Sampling, now_s
from penstock.worker.whole_role import check_addressee

NEVER_SENT = {"logprobs", "prompt_logprobs", "special_text", "tell_stop"}
"""Fields of `Sampling` that are refused, or for chats alone, and those that are about the answer."""
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]


def ask(prompt: str | None = "Say", text: str = "", num_pieces: int = 0, **fields: Any) -> dict[str, Any]:
    request = make_request(prompt, cast("RequestFields", fields))
    check_addressee(request, "interactive", "served")
    check_request(request)
    body: dict[str, Any] = json.loads(build_question(request, "theirs", text, num_pieces).body)
    return body


SENT_AS_THEY_ARE: dict[str, Any] = {
    "temperature": 0.0, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0,
    "repetition_penalty": 1.5, "seed": 7, "stop": ["x"], "stop_token_ids": [3], "max_tokens": 9, "min_tokens": 3,
    "ignore_eos": True,
}  # fmt: skip
SCHEMA = {"name": "answer", "schema": {"type": "object"}, "strict": True}
SENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({name: value}, {name: value}) for name, value in SENT_AS_THEY_ARE.items()),
    ({"logit_bias": {302: -100}}, {"logit_bias": {"302": -100}}),
    ({"max_tokens": OPEN_MAX_TOKENS, "fit_context": True}, {"max_tokens": None}),
    ({"grammar": {"kind": "json_object"}}, {"response_format": {"type": "json_object"}}),
    ({"grammar": {"kind": "regex", "source": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ({"grammar": {"kind": "choice", "source": '["a"]'}}, {"structured_outputs": {"choice": ["a"]}}),
    ({"grammar": {"kind": "lark", "source": "start: A"}}, {"structured_outputs": {"grammar": "start: A"}}),
    (
        {"grammar": {"kind": "json_schema", "source": '{"type": "object"}'}},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
]


@pytest.mark.proof
@pytest.mark.parametrize(("fields", "sent"), SENT)
def test_each_field_is_sent(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    assert ask(**fields) == ask() | sent


def test_no_field_of_a_request_is_forgotten() -> None:
    """A field that is added is mapped, refused, or named here: else it would be left out silently."""
    assert {name for fields, _ in SENT for name in fields} | NEVER_SENT == Sampling.model_fields.keys()
    sent = {"model", "prompt", "messages", "token_ids", "chat_template_kwargs", "sampling"}
    about_the_pipeline = {"v", "id", "priority_class", "tenant", "weight", "session", "deadline", "retain_s"}
    refused = {"texts", "embed"}
    assert sent | about_the_pipeline | refused == Request.model_fields.keys()


@pytest.mark.proof
@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"messages": CHAT, "chat_template_kwargs": {"tools": TOOLS}},
        {
            "messages": CHAT,
            "grammar": constrain_calls(ENDPOINT_TEMPLATE, [], is_required=True, is_parallel=True).make_spec(),
        },
    ],
)
def test_what_no_endpoint_can_be_asked_is_refused_by_name(fields: dict[str, Any]) -> None:
    name = "(tools|a grammar of calls)" if "messages" in fields else next(iter(fields))
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported"):
        ask(None if "messages" in fields else "Say", **fields)


@pytest.mark.parametrize("num_top", [0, 5])
def test_a_chat_asks_for_log_probabilities(num_top: int) -> None:
    asked = ask(None, messages=CHAT, logprobs=num_top)
    assert asked == ask(None, messages=CHAT) | {"logprobs": True} | ({"top_logprobs": num_top} if num_top else {})


SINGLE = {"parallel_tool_calls": False}
NAMED = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "h")]
ANY = {"type": "json_object"}
NUMBER = {"type": "json_schema", "json_schema": {**SCHEMA, "schema": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        pytest.param({"tool_choice": "required"}, {"tool_choice": "required"}, marks=pytest.mark.proof),
        ({}, {}),
        ({"tool_choice": "auto"}, {}),
        ({"parallel_tool_calls": False}, SINGLE),
        ({"tool_choice": NAMED[1]}, {"tool_choice": NAMED[1]}),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": NAMED[:2]}}},
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": NAMED[:2]}}},
        ),
        ({"response_format": ANY}, {"response_format": ANY}),
        ({"response_format": NUMBER, **SINGLE}, {"response_format": NUMBER, **SINGLE}),
    ],
)
def test_a_chats_tools_and_what_is_said_of_them_reach_the_endpoint(given: dict[str, Any], sent: dict[str, Any]) -> None:
    """From the body that the gateway got to the one that the endpoint gets. One schema is strict, and no grammar's."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}
    last = {"type": "function", "function": {"name": "h", "parameters": schema, "strict": True, "description": "d"}}
    tools = [*TOOLS, last]
    body = CHAT_ENDPOINT.parse_body({"model": "served", "messages": CHAT, "tools": tools, **given})
    requests = CHAT_ENDPOINT.make_requests(body, "r")
    form = use_response_template(CHAT_ENDPOINT, body, requests, ENDPOINT_TEMPLATE)
    assert form == AnswerForm(ENDPOINT_TEMPLATE, "held")
    request = build_request(requests[0])
    check_request(request)
    asked = json.loads(build_question(request, "theirs").body)
    assert {name: asked[name] for name in asked.keys() - ask(None, messages=CHAT).keys()} == {"tools": tools, **sent}


def test_without_tools_the_answers_form_is_sent_and_reasoning_is_told_all_the_same() -> None:
    body = CHAT_ENDPOINT.parse_body({"model": "served", "messages": CHAT, "response_format": ANY})
    requests = CHAT_ENDPOINT.make_requests(body, "r")
    assert use_response_template(CHAT_ENDPOINT, body, requests, ENDPOINT_TEMPLATE).template == ENDPOINT_TEMPLATE
    assert json.loads(build_question(build_request(requests[0]), "theirs").body)["response_format"] == ANY


def test_another_class_or_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="class"):
        ask(priority_class="batch")
    with pytest.raises(UnknownModel):
        ask(model="another")
    check_addressee(make_request("x", {"priority_class": "batch"}), "batch", "any")
    assert ask(model="served")["model"] == "theirs"


def test_texts_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="ask a pipeline whose model computes vectors"):
        ask(None, texts=["x"])


def test_a_chat_goes_as_it_is() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    body = ask(None, messages=turns, chat_template_kwargs={"thinking": True})
    assert (body["messages"], body["chat_template_kwargs"]) == (turns, {"thinking": True})
    # vLLM reads reasoning under the second name alone, others under the first.
    thought = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
    asked = ask(None, messages=[*CHAT, thought, *CHAT])
    assert asked["messages"] == [*CHAT, {**thought, "reasoning": "2 and 3"}, *CHAT]
    assert "max_tokens" not in ask(None, messages=turns, max_tokens=OPEN_MAX_TOKENS, fit_context=True)


def test_an_answer_is_continued_behind_its_text() -> None:
    body = ask("Say", " it", 2, max_tokens=9, min_tokens=3)
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ("Say it", 7, 1)
    assert "min_tokens" not in ask("Say", " it", 2, max_tokens=9, min_tokens=2)
    with pytest.raises(AnswerInterrupted):
        ask(None, " it", 2, token_ids=[1])
    with pytest.raises(AnswerInterrupted):
        ask("Say", " it", 2, grammar={"kind": "json_object"})
    assert ask(None, "", 0, token_ids=[1, 2])["prompt"] == [1, 2]


@pytest.mark.proof
def test_a_chat_is_continued_behind_its_content_and_asked_for_anew_behind_its_reasoning() -> None:
    fields: dict[str, Any] = {"messages": CHAT, "special_text": True, "max_tokens": 9}
    for text in (f"{THINK_OPEN}so", f"{THINK_OPEN}so{THINK_CLOSE}\n\n", "\n"):
        assert ask(None, text, 3, **fields) == ask(None, **{**fields, "max_tokens": 6})
    told = {"role": "assistant", "content": "\n\n5, as", "reasoning_content": "so on", "reasoning": "so on"}
    text = f"{THINK_OPEN}so on{THINK_CLOSE}\n\n5, as"
    continued = ask(None, text, 3, **fields)
    assert (continued["messages"], continued["continue_final_message"]) == ([*CHAT, told], True)
    for answer, is_continued in ((None, True), ({"type": "object"}, False)):
        calls = constrain_calls(
            ENDPOINT_TEMPLATE, [ConstrainedTool("f", None)], is_required=False, is_parallel=False, answer=answer
        )
        held = {**fields, "chat_template_kwargs": {"tools": TOOLS}, "grammar": calls.make_spec()}
        if is_continued:
            assert ask(None, text, 3, **held)["messages"] == continued["messages"]
        else:
            with pytest.raises(AnswerInterrupted):
                ask(None, text, 3, **held)


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({}, None),
        ({"Retry-After": "3"}, 3.0),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"retry-after-ms": "250", "Retry-After": "3"}, 0.25),
        ({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
    ],
)
def test_retry_after_in_all_its_forms(headers: dict[str, str], wait_s: float | None) -> None:
    message = email.message.Message()
    for name, value in headers.items():
        message[name] = value
    assert parse_retry_after(message) == wait_s


def test_retry_after_as_a_date() -> None:
    message = email.message.Message()
    message["Retry-After"] = email.utils.formatdate(now_s() + 60, usegmt=True)
    wait_s = parse_retry_after(message)
    assert wait_s is not None
    assert 0 < wait_s <= 60


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            b'{"error": {"message": "too long", "code": "context_length_exceeded"}}',
            "too long (context_length_exceeded)",
        ),
        (b'{"error": {"message": "bad", "code": 400}}', "bad"),
        (b'{"object": "error", "message": "bad"}', "bad"),
        (b'{"detail": "bad"}', "bad"),
        (b"<html>", "<html>"),
        (b"[]", "[]"),
    ],
)
def test_errors_in_all_their_forms(content: bytes, text: str) -> None:
    assert describe_error(content) == text


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 1}, {"prompt_tokens": "1", "completion_tokens": 2}])
def test_usage_that_cannot_be_read_is_none(usage: object) -> None:
    assert read_usage({"usage": usage}) is None
