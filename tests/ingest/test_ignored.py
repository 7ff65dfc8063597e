"""Fields that nothing acts on: accepted from one list, and named in the answer's header."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embeddings
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from penstock.ingest.endpoints import ENDPOINTS
from penstock.ingest.ignored import IGNORED_FIELDS, IGNORED_HEADER, strip_ignored_fields
from penstock.ingest.openai import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, ApiEndpoint, make_stream_meta
from penstock.ingest.openai.responses import make_unfinished_response

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TURN = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OPTIONS: dict[str, Any] = {"model": "demo"}
STREAMED = {"stream": True, "stream_options": {}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", **STREAMED},
    "/v1/chat/completions": {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL]}], **STREAMED},
    "/v1/responses": {
        "input": [
            TURN, {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "g"}]},
        ],
        "reasoning": {}, **STREAMED, "text": {},
        "tools": [
            {"type": "function"} | FUNCTION,
            {"type": "namespace", "name": "n", "tools": [{"type": "function"} | FUNCTION]},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    },
    "/v1/messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I call."}, {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}]},
            ]},
            {"role": "system", "content": "Be kind.", "output_config": {}},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "thinking": {"type": "disabled"},
        "output_config": {},
    },
    "/v1/embeddings": {"input": "hi"}, "/v2/embed": {"texts": ["hi"]}, "/v2/rerank": {"query": "q", "documents": ["d"]},
}  # fmt: skip
"""Bodies that have all places of which the list speaks."""
VALUES = {"max_tool_calls": 3, "metadata": {"a": "b"}}
"""For fields that an answer repeats: such as they are. Of others any value is ignored."""
FIELDS = [(path, field) for path, fields in IGNORED_FIELDS.items() for field in fields]


def put_value(place: Any, parts: list[str], value: object) -> None:
    """Set a field at each place that `*` stands for; put an entry of a type before the others."""
    name, is_of_type, kind = parts[0].partition("[")
    if is_of_type and name in place:
        place[name] = [{"type": kind.removesuffix("]"), "any": value}, *place[name]]
    elif parts[0] == "*":
        for one in place:
            put_value(one, parts[1:], value)
    elif isinstance(place, dict) and len(parts) == 1 and not is_of_type:
        place[parts[0]] = value
    elif isinstance(place, dict) and isinstance(below := place.get(parts[0]), dict | list):
        put_value(below, parts[1:], value)


@pytest.mark.parametrize(("path", "field"), FIELDS, ids=map(" ".join, FIELDS))
def test_an_ignored_field_changes_nothing_and_is_named(path: str, field: str) -> None:
    endpoint, plain = ENDPOINTS[path], OPTIONS | BODIES[path]
    for value, names in ((VALUES.get(field, "any"), [field]), (None, [field] if "[" in field else [])):
        given = copy.deepcopy(plain)
        put_value(given, field.split("."), value)
        assert given != plain
        before = copy.deepcopy(given)
        stripped, named = strip_ignored_fields(path, given)
        assert (stripped, named, given) == (plain, names, before)
        requests = [endpoint.make_requests(endpoint.parse_body(one), "r") for one in (plain, given)]
        assert requests[0] == requests[1]


@pytest.mark.parametrize("body", [{}, {"messages": "hi", "tools": 3}, {"messages": [3, [], {"content": [None]}]}])
def test_what_is_no_chat_stays_as_it_is(body: dict[str, Any]) -> None:
    for path in IGNORED_FIELDS:
        assert strip_ignored_fields(path, body) == (body, [])


def test_a_response_repeats_what_is_repeated_there() -> None:
    given = {
        "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 3, "metadata": {"a": "b"},
    }  # fmt: skip
    body = RESPONSES.parse_body({"model": "demo", "input": "hi", "presence_penalty": 0.5, **given})
    response = make_unfinished_response(make_stream_meta(RESPONSES, body, "resp_1"), "in_progress").model_dump()
    assert {name: response[name] for name in given} == given
    assert (response["presence_penalty"], response["frequency_penalty"], response["completed_at"]) == (0.5, 0.0, None)


def list_fields(endpoint: ApiEndpoint[Any], place: str = "") -> Iterator[str]:
    """The fields that are ignored at a place of a body."""
    for field in IGNORED_FIELDS[endpoint.path]:
        above, _, last = field.rpartition(".")
        if above == place:
            yield last


@pytest.mark.parametrize(
    ("endpoint", "params"),
    [
        (CHAT, chats.CompletionCreateParamsBase), (COMPLETIONS, completions.CompletionCreateParamsBase),
        (RESPONSES, responses.ResponseCreateParamsBase), (EMBEDDINGS, embeddings.EmbeddingCreateParams),
    ],
)  # fmt: skip
def test_each_parameter_of_the_sdk_has_an_effect_or_is_ignored_or_refused(
    endpoint: ApiEndpoint[Any], params: Any
) -> None:
    """If this fails the SDK has new parameters: each belongs into the list, or into the body's model."""
    known = endpoint.body_model.model_fields.keys() | set(list_fields(endpoint))
    assert params.__annotations__.keys() - known == set()


@pytest.mark.proof
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_names_what_was_ignored(base_url: str, sdk: openai.OpenAI, stream: bool) -> None:
    asked = {"model": "demo", "messages": [TURN], "max_tokens": 2, "stream": stream}
    for path, given, names in (
        ("chat/completions", {"user": "u", "metadata": {"a": "b"}}, {"user", "metadata"}),
        ("messages", {"cache_control": {"type": "lasting"}}, {"cache_control"}),
        ("messages", {"cache_control": {"type": "ephemeral"}}, set()),
        ("chat/completions", {"prompt_cache_retention": "24h"}, set()),
        ("chat/completions", {"user": None}, set()),
    ):
        answer = httpx.post(f"{base_url}/v1/{path}", json=asked | given, timeout=None)
        assert answer.status_code == 200
        assert set(filter(None, answer.headers.get(IGNORED_HEADER, "").split(", "))) == names


def test_the_page_has_the_list() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "gateway.md").read_text()
    table = page.partition("## Fields that are ignored")[2].partition("\n## ")[0]
    words = set(re.findall(r"`([^`]+)`", table))
    for path, field in FIELDS:
        names = {field, *(field.removeprefix(f"{above}.") for above in words if field.startswith(f"{above}."))}
        # An entry of a list is named by its type alone.
        names |= set(re.findall(r"\[(.+)\]", field))
        assert names & words, (path, field)
