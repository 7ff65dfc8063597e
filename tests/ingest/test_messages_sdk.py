"""`/v1/messages` with a model that calls tools, by Anthropic's SDK: whole, streamed, and resumed on another gateway."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from penstock.ingest.anthropic.messages import (
    MESSAGES,
    CountTokensBody,
    MessagesBody,
    OutputConfig,
    TextParam,
    ThinkingConfig,
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
    ToolResultParam,
    ToolUseParam,
)
from penstock.ingest.ignored import IGNORED_HEADER
from penstock.local.stack import Stack
from penstock.messages import EndEvent, ErrorInfo
from sim.workload import TOOL_MODEL
from tests.gateways import GatewayProcess, ScriptedPipeline, write_keys
from tests.ingest.test_frameworks import PROMPT, Person
from tests.ingest.test_ignored import list_fields
from tests.ingest.test_tools import CALLS, CITY
from tests.record.play import decode

pytestmark = pytest.mark.clients
MODEL = str(TOOL_MODEL)
WEATHER: Any = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": CITY}
TURNS: Any = [{"role": "user", "content": "What is the weather of Lisbon and Porto?"}]
ASKED: dict[str, Any] = {"messages": TURNS, "tools": [WEATHER], "max_tokens": 80}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
"""The SDK has no parameters for sampling."""
BLOCK = "messages.*.content.*"
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters that the SDK sends as headers."""
SUM: Any = [{"role": "user", "content": "What is 7 plus 5?"}]


@pytest.fixture(scope="module")
def sdk(tool_stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_stack.gateway_url, api_key="none", max_retries=0, timeout=None) as client:
        yield client


def list_calls(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


def test_calls_are_blocks(sdk: anthropic.Anthropic) -> None:
    whole = sdk.messages.create(model=MODEL, **ASKED, **GREEDY)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", MODEL)
    assert (whole.stop_reason, list_calls(whole)) == ("tool_use", CALLS)
    assert whole._request_id == whole.id
    calls: Any = whole.content
    assert len({call.id for call in calls}) == 2


def test_the_stream_that_the_sdk_puts_together_is_the_same_message(sdk: anthropic.Anthropic) -> None:
    thinking: Any = ASKED | {"messages": SUM, "tools": [], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    for asked, kinds in ((ASKED, {"tool_use"}), (thinking, {"thinking", "text"})):
        whole = sdk.messages.create(model=MODEL, **asked, **GREEDY)
        with sdk.messages.stream(model=MODEL, **asked, **GREEDY) as stream:
            seen = [event.type for event in stream]
            told = stream.get_final_message()
        blocks = [[(one.type, getattr(one, one.type, None)) for one in message.content] for message in (told, whole)]
        assert blocks[0] == blocks[1]
        assert {kind for kind, _ in blocks[0]} == kinds
        assert list_calls(told) == list_calls(whole)
        assert (told.stop_reason, told.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        prompts = [one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (told, whole)]
        assert prompts[0] == prompts[1] > 0
        assert (seen[0], seen[-1]) == ("message_start", "message_stop")


def test_the_stop_sequence_that_ended_an_answer_is_told(sdk: anthropic.Anthropic) -> None:
    """At its first token, which ends in prefill, and later."""
    asked: Any = {"model": MODEL, "messages": SUM, "max_tokens": 40} | GREEDY
    text = sdk.messages.create(**asked).content[0].text
    for stop in (text[0], text[3:6]):
        whole = sdk.messages.create(**asked, stop_sequences=["never", stop])
        told = (whole.stop_reason, whole.stop_sequence, "".join(block.text for block in whole.content))
        assert told == ("stop_sequence", stop, text[: text.index(stop)])
        with sdk.messages.stream(**asked, stop_sequences=["never", stop]) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == told[:2]
    assert sdk.messages.create(**asked, stop_sequences=["never"]).stop_reason != "stop_sequence"


def test_tokens_are_counted_as_the_answer_does(sdk: anthropic.Anthropic) -> None:
    call: Any = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Porto"}}
    result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "red"}
    turns: Any = [*TURNS, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    asked: dict[str, Any]
    for asked in (
        {"messages": TURNS},
        {"messages": SUM, "system": "Be brief.", "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": turns, "tools": [WEATHER]},
    ):
        counted = sdk.messages.count_tokens(model=MODEL, **asked).input_tokens
        usage = sdk.messages.create(model=MODEL, max_tokens=1, **asked).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_request_with_the_same_key_is_the_same_message(sdk: anthropic.Anthropic) -> None:
    header = {"Idempotency-Key": "once"}
    asked: Any = {"messages": SUM, "max_tokens": 5}
    first, again = (sdk.messages.create(model=MODEL, extra_headers=header, **asked) for _ in range(2))
    assert (first.id, first.content) == (again.id, again.content)
    with pytest.raises(anthropic.ConflictError):
        sdk.messages.create(model=MODEL, extra_headers=header, **(asked | {"max_tokens": 6}))


def test_errors_are_those_that_the_sdk_raises(sdk: anthropic.Anthropic) -> None:
    asked: Any = {"messages": SUM, "max_tokens": 5}
    with pytest.raises(anthropic.NotFoundError) as unknown:
        sdk.messages.create(model="none", **asked)
    assert (unknown.value.type, unknown.value.error_code) == ("not_found_error", "model_not_found")
    given: Any
    for given, name in (
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"max_tokens": 5000}, "5000"),
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            sdk.messages.create(model=MODEL, **(asked | given))
        assert refused.value.type == "invalid_request_error"
        assert name in str(refused.value)


def test_a_chat_template_that_cannot_think_says_so(base_url: str) -> None:
    with (
        anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=None) as sdk,
        pytest.raises(anthropic.BadRequestError, match="enable_thinking"),
    ):
        sdk.messages.create(model="demo", messages=SUM, max_tokens=2000, thinking={"type": "disabled"})


def test_keys_come_in_either_header(scripted: ScriptedPipeline, tmp_path: Path) -> None:
    (key,) = write_keys(tmp_path / "keys.json", "acme")
    settings = {"GATEWAY_KEYS": str(tmp_path / "keys.json")}
    with GatewayProcess(scripted.addresses, tmp_path, settings) as gateway:

        def ask(*headers: tuple[str, str]) -> int:
            return httpx.get(f"{gateway.url}/v1/models", headers=list(headers), timeout=None).status_code

        bearer = ("authorization", f"Bearer {key}")
        assert ask(("x-api-key", key)) == ask(bearer) == ask(bearer, ("x-api-key", key)) == 200
        assert ask(bearer, ("x-api-key", "psk_other")) == ask(("x-api-key", key), ("x-api-key", key + "1")) == 401
        url = f"{gateway.url}/v1/messages"
        with (
            anthropic.Anthropic(base_url=gateway.url, api_key="psk_none", max_retries=0) as sdk,
            pytest.raises(anthropic.AuthenticationError) as refused,
        ):
            sdk.messages.create(model=scripted.model, messages=SUM, max_tokens=5)
        assert refused.value.type == "authentication_error"
        assert (
            httpx.post(url, json={}, headers={"x-api-key": key}, timeout=None).json()["error"]["type"]
            == "invalid_request_error"
        )


def test_an_error_within_a_stream_is_raised_by_the_sdk(scripted: ScriptedPipeline, tmp_path: Path) -> None:
    failed = EndEvent(finish_reason="error", error=ErrorInfo(code="out_of_memory", message="no room"))
    with (
        GatewayProcess(scripted.addresses, tmp_path) as gateway,
        anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=None) as sdk,
        sdk.messages.stream(model=scripted.model, messages=SUM, max_tokens=9) as stream,
    ):
        (request,) = scripted.read_requests()
        scripted.record.finish_request(decode(scripted.record, request.id), failed)
        with pytest.raises(anthropic.APIStatusError, match="no room") as raised:
            stream.get_final_message()
    assert (raised.value.type, raised.value.error_code) == ("api_error", "out_of_memory")


def test_a_typed_answer_is_of_its_type(sdk: anthropic.Anthropic) -> None:
    told: Any = [{"role": "user", "content": PROMPT}]
    parsed = sdk.messages.parse(model=MODEL, max_tokens=200, messages=told, output_format=Person, **GREEDY)
    assert isinstance(parsed.parsed_output, Person)
    with sdk.messages.stream(model=MODEL, max_tokens=200, messages=told, output_format=Person, **GREEDY) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output


def test_the_runner_of_tools_calls_them_and_answers(sdk: anthropic.Anthropic) -> None:
    """It asks for a thread, and goes on without."""
    cities: list[str] = []

    tool: Any = anthropic.beta_tool

    @tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: The city.
        """
        cities.append(city)
        return json.dumps({"weather": "red"})

    asked: Any = {"model": MODEL, "max_tokens": 80, "messages": TURNS, "tools": [get_weather]} | GREEDY
    final = sdk.beta.messages.tool_runner(**asked).until_done()
    assert len(cities) == 2
    assert [block.type for block in final.content] == ["text"]


def test_what_agents_send_is_named_where_it_does_nothing(sdk: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL, "messages": SUM, "max_tokens": 5, "tools": [WEATHER | {"eager_input_streaming": True}],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "context_management": {"edits": []},
    }  # fmt: skip
    answer = sdk.beta.messages.with_raw_response.create(**asked)
    assert answer.parse().content
    assert set(answer.headers[IGNORED_HEADER].split(", ")) == {
        "tools.*.eager_input_streaming", "output_config.effort", "context_management",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "params", "model", "place"),
    [
        ("message_create_params", "MessageCreateParamsBase", MessagesBody, ""),
        ("beta.message_create_params", "MessageCreateParamsBase", MessagesBody, ""),
        ("beta.message_count_tokens_params", "MessageCountTokensParams", CountTokensBody, ""),
        ("beta.beta_tool_param", "BetaToolParam", ToolParam, "tools.*"),
        ("beta.beta_output_config_param", "BetaOutputConfigParam", OutputConfig, "output_config"),
        ("beta.beta_thinking_config_enabled_param", "BetaThinkingConfigEnabledParam", ThinkingConfig, "thinking"),
        ("beta.beta_thinking_config_adaptive_param", "BetaThinkingConfigAdaptiveParam", ThinkingConfig, "thinking"),
        ("beta.beta_text_block_param", "BetaTextBlockParam", TextParam, BLOCK),
        ("beta.beta_thinking_block_param", "BetaThinkingBlockParam", ThinkingParam, BLOCK),
        ("beta.beta_tool_use_block_param", "BetaToolUseBlockParam", ToolUseParam, BLOCK),
        ("beta.beta_tool_result_block_param", "BetaToolResultBlockParam", ToolResultParam, BLOCK),
        ("beta.beta_tool_choice_any_param", "BetaToolChoiceAnyParam", ToolChoiceParam, "tool_choice"),
    ],
)
def test_each_parameter_of_the_sdk_has_an_effect_or_is_ignored_or_refused(
    module: str, params: str, model: type[BaseModel], place: str
) -> None:
    """If this fails the SDK has new parameters: each belongs into the list, or into the body's model."""
    sent = getattr(importlib.import_module(f"anthropic.types.{module}"), params).__annotations__
    assert sent.keys() - model.model_fields.keys() - set(list_fields(MESSAGES, place)) - HEADERS == set()
