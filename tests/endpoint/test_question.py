"""What an endpoint is asked, field by field, and what it says."""

import email.message
import email.utils
import json
from typing import Any, cast

import pytest

from penstock.client.core import RequestFields, make_request
from penstock.endpoint_worker.question import OPEN_MAX_TOKENS, build_question, check_request
from penstock.endpoint_worker.reply import describe_error, parse_retry_after, read_text, read_usage
from penstock.errors import AnswerInterrupted, InvalidRequest, UnknownModel
from penstock.messages import Request, Sampling, now_s

NEVER_SENT = {"logprobs", "prompt_logprobs", "special_text", "tell_stop"}
"""Fields of `Sampling` that are refused, and the one that is about the answer."""


def ask(prompt: str | None = "Say", text: str = "", num_pieces: int = 0, **fields: Any) -> dict[str, Any]:
    request = make_request(prompt, cast("RequestFields", fields))
    check_request(request, "interactive", "served")
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
    about_the_pipeline = {"v", "id", "priority_class", "tenant", "weight", "session", "deadline"}
    assert sent | about_the_pipeline == Request.model_fields.keys()


@pytest.mark.proof
@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"special_text": True},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tools": []}},
    ],
)
def test_what_no_endpoint_can_be_asked_is_refused_by_name(fields: dict[str, Any]) -> None:
    name = "tools" if "messages" in fields else next(iter(fields))
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported"):
        ask(None if "messages" in fields else "Say", **fields)


def test_another_class_or_model_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="class"):
        ask(priority_class="batch")
    with pytest.raises(UnknownModel):
        ask(model="another")
    check_request(make_request("x", {"priority_class": "batch"}), "batch", "any")
    assert ask(model="served")["model"] == "theirs"


def test_a_chat_goes_as_it_is() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    body = ask(None, messages=turns, chat_template_kwargs={"thinking": True})
    assert (body["messages"], body["chat_template_kwargs"]) == (turns, {"thinking": True})
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


def test_half_a_character_does_no_harm() -> None:
    assert read_text(json.loads('{"text": "a\\ud83d"}')) == "a\ufffd"


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 1}, {"prompt_tokens": "1", "completion_tokens": 2}])
def test_usage_that_cannot_be_read_is_none(usage: object) -> None:
    assert read_usage({"usage": usage}) is None
