"""What endpoints take and refuse without a pipeline behind them, and how they say so."""

import gzip
import json
import re
import uuid
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from penstock.bus.streams.bus import StreamsBus
from penstock.client.core import RequestFields, make_request
from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, GuardSettings, load_group
from penstock.errors import BusUnavailable, InvalidRequest, PromptTooLong, SettingsError
from penstock.ingest.anthropic.messages import MESSAGES
from penstock.ingest.endpoints import ENDPOINTS, find_prompt_field
from penstock.ingest.errors import ApiError, to_api_error
from penstock.ingest.gateway.app import create_app
from penstock.ingest.http.guard import HOST_NAMES, GuardMiddleware
from penstock.ingest.http.site import read_page_files
from penstock.ingest.openai import CHAT, COMPLETIONS, RESPONSES, ApiEndpoint, make_stream_meta
from penstock.ingest.openai.body import TRANSLATED_FIELDS
from penstock.ingest.openai.endpoint import SubmitArgs, build_request, use_response_template
from penstock.ingest.openai.responses import make_unfinished_response
from penstock.messages import Request, encode_request
from tests.ingest.answers import TEMPLATE

TURN = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"
NO_SUCH: dict[str, tuple[ApiEndpoint[Any], dict[str, Any], str, str]] = {
    "a format": (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format", INVALID),
    "a user's call": (CHAT, {"messages": [TURN | {"tool_calls": [CALL]}]}, "messages.0.tool_calls", INVALID),
    "a tool's turn that answers no call": (
        CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", INVALID,
    ),
    "a turn without anything": (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", UNSUPPORTED),
    "a refusal of the user's": (CHAT, {"messages": [TURN | {"refusal": "no"}]}, "messages.0.refusal", INVALID),
    "a part of one": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "messages.0.content.0", UNSUPPORTED,
    ),
    "a tool that must be called, by another word": (
        CHAT, {"tools": [TOOL], "tool_choice": "any"}, "tool_choice", INVALID,
    ),
    "a tool of a response in the form of chats": (
        RESPONSES, {"tools": [TOOL]}, "tools.0.name", "missing_required_parameter",
    ),
    "a stored prompt": (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt", UNSUPPORTED),
    "an effort": (RESPONSES, {"reasoning": {"effort": "most"}}, "reasoning.effort", INVALID),
    "a tool of a response that writes no JSON": (
        RESPONSES, {"tools": [{"type": "computer", "name": "f"}]}, "tools.0", INVALID,
    ),
    "a search of a response that is demanded": (
        RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice",
        UNSUPPORTED,
    ),
    "nothing but searches of a response": (
        RESPONSES,
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}},
        "tool_choice", UNSUPPORTED,
    ),
    "thoughts of all turns": (RESPONSES, {"reasoning": {"context": "all_turns"}}, "reasoning.context", UNSUPPORTED),
    "tools and an expression": (
        RESPONSES, {"tools": [{"type": "function", "name": "f"}], "guided_regex": "a+"}, "guided_regex", INVALID,
    ),
    "a search": (CHAT, {"web_search_options": {}}, "web_search_options", UNSUPPORTED),
    "options of a stream in a chat": (CHAT, {"stream_options": {}}, "stream_options", INVALID),
    "options of a stream in a text": (COMPLETIONS, {"stream_options": {}}, "stream_options", INVALID),
    "options of a stream in a response": (RESPONSES, {"stream_options": {}}, "stream_options", INVALID),
    "padding": (
        CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation",
        UNSUPPORTED,
    ),
    "JSON": (CHAT, {"response_format": {"type": "xml"}}, "response_format", INVALID),
    "audio": (CHAT, {"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    "an image": (
        CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages.0.content.0", UNSUPPORTED,
    ),
    "a function's turn": (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", UNSUPPORTED),
    "an endless grammar": (CHAT, {"guided_regex": "a+", "ignore_eos": True}, "ignore_eos", INVALID),
    "beams": (CHAT, {"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
    "special tokens": (RESPONSES, {"skip_special_tokens": False}, "skip_special_tokens", UNSUPPORTED),
    "a prompt as it is": (COMPLETIONS, {"add_special_tokens": False}, "add_special_tokens", UNSUPPORTED),
    "a priority": (COMPLETIONS, {"priority": 3}, "priority", UNSUPPORTED),
    "more tokens than the limit": (COMPLETIONS, {"min_tokens": 17}, "min_tokens", INVALID),
    "two grammars": (
        CHAT, {"guided_regex": "a+", "response_format": {"type": "json_object"}}, "response_format", INVALID,
    ),
    "too hot": (CHAT, {"temperature": 3}, "temperature", INVALID),
    "no choice": (CHAT, {"n": 0}, "n", INVALID),
    "no turn": (CHAT, {"messages": []}, "messages", INVALID),
}  # fmt: skip
EFFORTS = "must be 'none', 'minimal', 'low', 'medium', 'high' or 'xhigh'"
OURS = (
    "tenant", "epoch", "class", "priority_class", "weight", "id", "deadline", "session", "attempt", "v", "token_ids",
    "request_ids",
)  # fmt: skip
"""Fields of requests and records: who sends them would speak for others."""


def prompted(endpoint: ApiEndpoint[Any], given: dict[str, Any]) -> dict[str, Any]:
    """A body with a prompt, and what is given."""
    prompt: dict[str, dict[str, Any]]
    prompt = {CHAT.path: {"messages": [TURN]}, COMPLETIONS.path: {"prompt": "hi"}, RESPONSES.path: {"input": "hi"}}
    prompt |= {MESSAGES.path: {"messages": [TURN], "max_tokens": 9}}
    return {"model": "demo", **prompt[endpoint.path], **given}


@pytest.mark.proof
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
def test_each_field_with_the_name_of_a_requests_is_in_the_request(endpoint: ApiEndpoint[Any]) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3], "logit_bias": {5: 1.0}, "max_tokens": 7,
    }  # fmt: skip
    kind: Any = endpoint.body_model
    same = kind.model_fields.keys() & RequestFields.__annotations__.keys() - TRANSLATED_FIELDS
    sent = prompted(endpoint, {name: value for name, value in given.items() if name in same})
    found = endpoint.parse_body(json.dumps(sent).encode()).request_fields()
    assert {name: found.get(name) for name in same} == {name: given[name] for name in same}


@pytest.mark.parametrize(("endpoint", "given", "param", "code"), NO_SUCH.values(), ids=NO_SUCH)
def test_what_cannot_be_had_is_named_by_its_whole_path(
    endpoint: ApiEndpoint[Any], given: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(ApiError) as refused:
        endpoint.make_requests(endpoint.parse_body(prompted(endpoint, given)), "r")
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert f"'{param}'" in str(refused.value)


@pytest.mark.parametrize("field", ["temprature", *OURS])
def test_a_field_that_is_none_of_the_apis_is_refused(field: str) -> None:
    with pytest.raises(ApiError) as refused:
        CHAT.parse_body(prompted(CHAT, {field: 1}))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, field, "unknown_parameter")


DEFAULTS: dict[str, Any] = {
    "use_beam_search": False, "length_penalty": 1.0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "no_stop_trim": False, "truncate_prompt_tokens": None, "bad_words": [],
    "allowed_token_ids": None, "priority": 0, "return_token_ids": False, "return_tokens_as_token_ids": None,
    "cache_salt": None, "kv_transfer_params": None, "vllm_xargs": None, "regex": None, "ebnf": None, "top_k": -1,
    "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": [], "min_tokens": 0, "ignore_eos": False,
}  # fmt: skip
"""What vLLM and SGLang have if nothing is given."""
CHAT_DEFAULTS = {
    "echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False,
    "documents": None, "chat_template": None,
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize(
    ("endpoint", "defaults"), [(CHAT, CHAT_DEFAULTS), (COMPLETIONS, {"add_special_tokens": True}), (RESPONSES, {})]
)
def test_defaults_of_other_servers_change_nothing(endpoint: ApiEndpoint[Any], defaults: dict[str, Any]) -> None:
    (plain,) = endpoint.make_requests(endpoint.parse_body(prompted(endpoint, {})), "r")
    (given,) = endpoint.make_requests(endpoint.parse_body(prompted(endpoint, DEFAULTS | defaults)), "r")
    prompts = plain.pop("prompt", None), given.pop("prompt", None)
    assert prompts[0] == prompts[1]
    samplings = [make_request(prompts[0], args).sampling for args in (plain, given)]
    assert samplings[1].model_copy(update={"min_tokens": None}) == samplings[0]


FUNCTION = {"name": "f", "description": "é", "parameters": {"type": "object"}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "é"]}'}}
TURNS = [
    {"role": "developer", "content": "Be brief.", "name": "ops"},
    {"role": "user", "content": [{"type": "text", "text": "ü"}], "name": "Ada"},
    {"role": "assistant", "content": None, "tool_calls": [CALLED, CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "c1", "content": "7", "name": "f"}, {"role": "user", "content": ""},
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {
            "messages": TURNS, "n": 2, "seed": 3, "tools": [{"type": "function", "function": FUNCTION}], "stop": "x",
            "logit_bias": {"7": 1, "3": -1}, "chat_template_kwargs": {"z": 1, "a": [None]}, "prompt_cache_key": "k",
        }),
        ("chat/completions", {"messages": TURNS[:2], "response_format": {"type": "json_object"}}),
        ("completions", {"prompt": ["a", "é"], "n": 2}), ("completions", {"prompt": [[1, 2], [3]], "logprobs": 2}),
        ("responses", {"instructions": "Be brief.", "input": [
            {"role": "user", "content": "u"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "H"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "no JSON"},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ]}),
        ("messages", {"max_tokens": 9, "system": "Be brief.", "stop_sequences": ["x"], "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}]},
        ]}),
        ("embeddings", {"input": ["a", "é"] * 40, "dimensions": 7, "prompt_name": "query", "service_tier": "flex"}),
        ("rerank", {"query": "q", "documents": ["a", {"text": "é"}]}),
    ],
)  # fmt: skip
def test_the_request_of_a_body_is_the_one_that_its_arguments_make(path: str, body: dict[str, Any]) -> None:
    endpoint = ENDPOINTS[f"/v1/{path}"]
    for args in endpoint.make_requests(endpoint.parse_body({"model": "m"} | body), "r"):
        fields = args.copy()
        made, built = make_request(fields.pop("prompt", None), fields), build_request(args)
        assert encode_request(built) == encode_request(made)
        assert Request.model_validate_json(encode_request(built).value, by_alias=True, by_name=False) == made
        turns = [turn.model_dump(exclude_none=True) for turn in made.messages or ()]
        for turn in turns:
            for call in turn.get("tool_calls", ()):
                if call["function"]["arguments"].startswith("{"):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        assert [turn.describe() for turn in built.messages or ()] == turns


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"content": None}, {"content": ""}), ({}, {"content": ""}), ({"content": "a", "name": "b"}, None),
        ({"reasoning_content": "Hm."}, {"content": "", "reasoning_content": "Hm."}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": "Well. ", "refusal": "No."}, {"content": "Well. No."}),
        ({"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]}, {"content": "aNo."}),
    ],
)  # fmt: skip
def test_an_assistants_turn_may_have_said_nothing_or_refused(message: dict[str, Any], turn: Any) -> None:
    body = CHAT.parse_body({"model": "m", "messages": [{"role": "assistant", **message}, TURN]})
    (args,) = CHAT.make_requests(body, "r")
    assert (args["messages"] or [])[0] == {"role": "assistant", **(turn or message)}


@pytest.mark.parametrize("wrong", [{"min_tokens": 5}, {"logprobs": 20, "max_tokens": 2**20}, {"session": "a b"}])
def test_what_no_body_says_of_a_request_is_validated(wrong: dict[str, Any]) -> None:
    fields = cast("RequestFields", {"id": "r", "max_tokens": 3} | wrong)
    with pytest.raises(InvalidRequest) as refused:
        make_request("x", fields)
    with pytest.raises(InvalidRequest, match=re.escape(str(refused.value))):
        build_request(SubmitArgs(prompt="x", **fields))


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(ApiError, match=r"'priority': .*not support it\. Use 'service_tier'\."):
        CHAT.parse_body(prompted(CHAT, {"priority": 1}))
    with pytest.raises(ApiError, match=r"not support it\. Send true, or leave it out\."):
        CHAT.parse_body(prompted(CHAT, {"skip_special_tokens": False}))


def test_reasoning_need_not_be_included() -> None:
    body = RESPONSES.parse_body(prompted(RESPONSES, {"include": ["reasoning.encrypted_content"]}))
    (ask,) = RESPONSES.make_requests(body, "resp_1")
    assert "logprobs" not in ask
    with pytest.raises(ApiError, match="'top_logprobs' needs"):
        RESPONSES.parse_body(prompted(RESPONSES, {"include": ["reasoning.encrypted_content"], "top_logprobs": 2}))


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS: list[dict[str, Any]] = [{"name": "f", "parameters": SCHEMA, "strict": True}, {"name": "g", "parameters": {}}]
OF_MESSAGES: list[dict[str, Any]] = [
    {"name": "f", "input_schema": SCHEMA, "strict": True},
    {"name": "g", "input_schema": {}},
]
NAMED, FLAT = {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}
SOME = {"mode": "required", "tools": [NAMED]}
ONCE = {"parallel_tool_calls": False}
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "nothing": ({}, {}, {}),
    "auto": ({"tool_choice": "auto"}, {"tool_choice": "auto"}, {"tool_choice": {"type": "auto"}}),
    "none": ({"tool_choice": "none"}, {"tool_choice": "none"}, {"tool_choice": {"type": "none"}}),
    "any": ({"tool_choice": "required"}, {"tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
    "one": ({"tool_choice": NAMED}, {"tool_choice": FLAT}, {"tool_choice": {"type": "tool", "name": "f"}}),
    "once": (ONCE, ONCE, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    "some": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": SOME}},
        {"tool_choice": {"type": "allowed_tools", **SOME, "tools": [FLAT]}}, None,
    ),
}  # fmt: skip
"""By case what a chat, a response and a message send; None: there is no such message."""


@pytest.mark.parametrize("has_schema", [False, True])
@pytest.mark.parametrize(("chat", "response", "message"), CHOICES.values(), ids=CHOICES)
def test_calls_are_held_alike_in_all_forms(
    chat: dict[str, Any], response: dict[str, Any], message: dict[str, Any] | None, has_schema: bool
) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    named = form | {"name": "a"}
    asked: list[tuple[ApiEndpoint[Any], dict[str, Any] | None, list[dict[str, Any]], dict[str, Any]]] = [
        (CHAT, chat, [{"type": "function", "function": one} for one in FUNCTIONS],
         {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
        (RESPONSES, response, [{"type": "function", **one} for one in FUNCTIONS], {"text": {"format": named}}),
        (MESSAGES, message, OF_MESSAGES, {"output_config": {"format": form}}),
    ]  # fmt: skip
    told = []
    for endpoint, choice, offered, schema in asked:
        if choice is None:
            continue
        body = endpoint.parse_body(prompted(endpoint, {"tools": offered} | choice | (schema if has_schema else {})))
        (request,) = requests = endpoint.make_requests(body, "r")
        answers = use_response_template(endpoint, body, requests, TEMPLATE)
        told.append(
            (answers.calls, [request.get(name) for name in ("grammar", "special_text", "chat_template_kwargs")])
        )
        if endpoint is RESPONSES:
            unfinished = make_unfinished_response(make_stream_meta(RESPONSES, body, "r", form=answers), "queued")
            repeated = unfinished.model_dump(exclude_none=True)["tool_choice"]
            assert repeated == response.get("tool_choice", "auto")
    assert all(one == told[0] for one in told)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": [FLAT], "tool_choice": FLAT | {"name": "g"}}, "names 'g', which is not in 'tools'"),
        ({"tool_choice": "required"}, "asks for a call, and there are no functions in 'tools'"),
        ({"tools": [FLAT], "chat_template_kwargs": {"tools": []}}, "beside 'chat_template_kwargs'"),
    ],
)
def test_a_response_may_only_call_what_it_offers(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        RESPONSES.parse_body(prompted(RESPONSES, given))
    assert (refused.value.status, refused.value.code) == (400, "invalid_value")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/chat/completions", "messages"), ("/v1/completions", "prompt"), ("/v1/responses", "input"),
        ("/v1/responses/resp_1", "input"), ("/v1/files", None),
    ],
)  # fmt: skip
def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(path: str, param: str | None) -> None:
    error = to_api_error(PromptTooLong("too long"), find_prompt_field(path))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET"), ("GET", "/v1/responses/resp_1/cancel", "POST"),
    ],
)  # fmt: skip
async def test_another_method_is_told_which_there_are(
    bare: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await bare.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (405, "invalid_request_error", "method_not_allowed")
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/responses/threads"])
async def test_an_endpoint_that_does_not_exist_is_unknown_and_no_response(bare: httpx.AsyncClient, path: str) -> None:
    answer = await bare.post(path, json={"model": "demo"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert "allow" not in answer.headers


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/messages", "/v1/messages"), ("/nothing", ""), ("/v1/v1/nothing", ""), ("/completions/x", ""),
    ],
)  # fmt: skip
async def test_a_base_url_without_v1_or_with_two_of_them_gets_a_hint(
    bare: httpx.AsyncClient, path: str, meant: str
) -> None:
    answer = await bare.post(path, json={"model": "demo"})
    error = answer.json()["error"]
    said = f" {meant} is known: a base URL ends with /v1 once, or without it for programs that add it." if meant else ""
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert error["message"] == f"Unknown request URL: POST {path}.{said}"


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/v1/conversations", "send 'previous_response_id', or all turns as 'input'"),
        ("GET", "/v1/conversations/conv_1/items", "send 'previous_response_id', or all turns as 'input'"),
        ("POST", "/v1/messages/batches", "/v1/batches takes chats"),
        ("GET", "/v1/messages/batchesx", ""),
    ],
)
async def test_an_endpoint_of_others_says_what_to_use_instead(
    bare: httpx.AsyncClient, method: str, path: str, advice: str
) -> None:
    answer = await bare.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error.get("code", "unknown_url")) == (404, "unknown_url")
    assert advice in error["message"] if advice else error["message"].endswith(f"{path}.")


ILL: dict[str, tuple[dict[str, Any], str]] = {
    "an effort": ({"reasoning_effort": "most"}, f"Invalid value for 'reasoning_effort': {EFFORTS}"),
    "no list": ({"messages": "hi"}, "Invalid value for 'messages': must be a valid list"),
    "no object": ({"tools": [3]}, "Invalid value for 'tools.0': must be an object"),
    "a text for a number": ({"n": "3"}, "Invalid value for 'n': must be a valid integer"),
    "a truth for a number": ({"temperature": True}, "Invalid value for 'temperature': must be a valid number"),
    "a broken number": ({"n": 1.5}, "Invalid value for 'n': must be a valid integer"),
    "too many": ({"stop": ["a"] * 17}, "Invalid value for 'stop': must have at most 16 items"),
    "too little": ({"messages": []}, "Invalid value for 'messages': must have at least 1 item"),
    "a token by its name": ({"logit_bias": {"a": 1}}, "Invalid value for 'logit_bias.a"),
    "another kind": (
        {"service_tier": "slow"}, "Invalid value for 'service_tier': must be 'auto', 'default', 'flex' or 'priority'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), ILL.values(), ids=ILL)
def test_what_is_wrong_with_a_value_is_said_in_our_own_words(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        CHAT.parse_body(prompted(CHAT, fields))
    assert str(refused.value).startswith(message)
    assert not re.search("[Ii]nput|validation|Value error|instance", str(refused.value))


def test_a_token_id_is_the_name_of_a_bias() -> None:
    (asked,) = CHAT.make_requests(CHAT.parse_body(prompted(CHAT, {"logit_bias": {"7": 1, "0": -2.5}})), "r")
    assert asked["logit_bias"] == {7: 1.0, 0: -2.5}


@pytest.mark.parametrize(
    ("raw", "code", "message"),
    [
        (b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}", "nested_too_deeply", "nested too deeply"),
        (b'{"messages": [', "invalid_json", "not valid JSON"),
        (b'{"temperature": NaN}', "invalid_json", "not valid JSON"), (b"\xff", "invalid_json", "not valid JSON"),
        (b"[]", "invalid_value", "must be a JSON object"), (b"3", "invalid_value", "must be a JSON object"),
    ],
)  # fmt: skip
def test_a_body_that_is_no_object_says_why(raw: bytes, code: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        CHAT.parse_body(raw)
    assert (refused.value.status, refused.value.code) == (400, code)


@pytest.mark.proof
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_compressed_body_is_called_so(bare: httpx.AsyncClient, path: str) -> None:
    answer = await bare.post(path, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (415, "invalid_request_error")
    assert "'gzip'" in error["message"]
    twice = [("content-encoding", "gzip"), ("content-encoding", "identity")]
    assert (await bare.post(path, content=gzip.compress(b"{}"), headers=twice)).status_code == 415
    assert (await bare.post(path, content=b"{}", headers={"content-encoding": "identity"})).status_code == 400


async def test_probes_of_readiness_ask_one_bus(bare: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[StreamsBus] = []

    def check(bus: StreamsBus, timeout_s: float = 5.0) -> str:
        asked.append(bus)
        raise BusUnavailable("away")

    monkeypatch.setattr(StreamsBus, "check_connection", check)
    assert [(await bare.get("/readyz")).status_code for _ in range(3)] == [503] * 3
    assert len(asked) == 3
    assert len({id(bus) for bus in asked}) == 1


# Whom an open gateway answers.


async def ask_guard(host: str, *, only_local: bool, origin: str | None = None, allowed: str = "") -> httpx.Response:
    app = Starlette(routes=[Route("/x", lambda _: PlainTextResponse("fine"))])
    guard = GuardMiddleware(app, GuardSettings(origins=allowed), only_local=only_local)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard)) as client:
        return await client.get(
            "http://gateway/x", headers={"host": host} | ({} if origin is None else {"origin": origin})
        )


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8080", "127.0.0.1:8080", "127.0.0.1", "[::1]:8080", "[::1]", "host.docker.internal:8080",
     "Host.Docker.Internal", "host.containers.internal", "LOCALHOST:8080", *sorted(HOST_NAMES)],
)  # fmt: skip
async def test_an_open_gateway_answers_to_this_machines_names(host: str) -> None:
    assert (await ask_guard(host, only_local=True)).text == "fine"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "10.0.0.1:8080",
        "[::2]:8080",
        "localhost.evil:1",
        "host.docker.internal.evil",
        "gateway.orb.local",
    ],
)
async def test_and_to_no_others(host: str) -> None:
    refused = await ask_guard(host, only_local=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
    assert (await ask_guard(host, only_local=False)).text == "fine"


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        ("http://localhost:3000", "", 200), ("http://[::1]", "", 200), ("https://evil.example", "", 403),
        ("null", "", 403), ("", "", 403), ("https://app.example", "http://a, https://app.example/", 200),
        ("https://app.example.evil", "https://app.example", 403), ("https://evil.example", "*", 200),
    ],
)  # fmt: skip
async def test_pages_of_other_sites_are_refused(origin: str, allowed: str, status: int) -> None:
    answer = await ask_guard("localhost:8080", only_local=True, origin=origin, allowed=allowed)
    assert answer.status_code == status
    assert (await ask_guard("evil.example", only_local=True, origin=origin, allowed=allowed)).status_code == 403


def open_app(redis_url: str, **changes: dict[str, str]) -> httpx.AsyncClient:
    """Return a client of a gateway that has no pipeline, with other settings."""
    settings = load_group(GatewayProcessSettings)
    changed = {name: getattr(settings, name).model_copy(update=fields) for name, fields in changes.items()}
    app = create_app(
        settings._replace(**changed), Addresses(stream_url=redis_url, pipeline=f"t-{uuid.uuid4().hex[:12]}")
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tower.lan:8080")


def test_the_page_is_served_by_sources_without_the_documents(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("x")
    (tmp_path / "operations.md").symlink_to(tmp_path / "docs/operations.md")
    assert read_page_files(tmp_path).keys() == {"index.html"}


async def test_a_refused_name_gets_in_where_the_advice_is_followed(redis_url: str) -> None:
    async with open_app(redis_url) as client:
        refused = await client.get("/healthz")
        assert (refused.status_code, "or to 'open'" in refused.json()["error"]["message"]) == (403, True)
    async with open_app(redis_url, admission={"keys": "open"}) as client:
        assert (await client.get("/healthz")).status_code == 200


def fail(_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(("origins", "granted"), [("", ""), ("https://app.example", "https://app.example"), ("*", "*")])
async def test_a_browser_is_told_which_origins_may_call(redis_url: str, origins: str, granted: str) -> None:
    async with open_app(redis_url, admission={"keys": "open"}, guard={"origins": origins}) as client:
        asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
        asks |= {"access-control-request-headers": "authorization,x-stainless-lang"}
        allowed = await client.options("/v1/chat/completions", headers=asks)
        assert (allowed.status_code, allowed.headers.get("access-control-allow-origin", "")) == (
            200 if origins else 204, granted,
        )  # fmt: skip
        if origins:
            assert allowed.headers["access-control-allow-headers"] == asks["access-control-request-headers"]
            assert "DELETE" in allowed.headers["access-control-allow-methods"]
        refused = await client.post("/v1/chat/completions", content=b"{", headers=asks)  # its error can be read
        assert (refused.status_code, refused.headers.get("access-control-allow-origin", "")) == (400, granted)
        client._transport.app.router.add_route("/bug", fail, ["POST"])  # type: ignore[attr-defined]
        client._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
        large = {"content-length": "9" * 15}
        for path, status, more in (("/v1/a..b/%20", 404, {}), ("/v1/files", 413, large), ("/bug", 500, {})):
            refused = await client.post(path, headers=asks | more)
            assert (refused.status_code, refused.headers.get("access-control-allow-origin", "")) == (status, granted)
        other = await client.options("/v1/chat/completions", headers=asks | {"origin": "https://evil.example"})
        assert other.headers.get("access-control-allow-origin", "") == ("*" if origins == "*" else "")


@pytest.mark.parametrize("origin", ["app.example.com", "localhost:3000", "https://app.example.com/page", "https://"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(SettingsError, match="no origin: write scheme, host and port"):
        load_group(GatewayProcessSettings, guard={"origins": f"*, {origin}"})


@pytest.mark.parametrize(("path", "allowed"), [("/v1/models", "GET"), ("/v1/responses/resp_1", "DELETE, GET")])
async def test_options_names_the_methods_of_a_path(bare: httpx.AsyncClient, path: str, allowed: str) -> None:
    answer = await bare.options(path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
    assert (await bare.options("/v1/nothing")).status_code == 404


def test_clients_and_proxies_close_an_idle_connection_before_the_gateway_does() -> None:
    """Otherwise a request that is sent as the gateway closes is reset. OpenAI's client keeps them as httpx does."""
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    assert GuardSettings().idle_s > max(2 * kept_s, 600)
