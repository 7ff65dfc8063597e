"""Tools and reasoning with a model that calls tools: whole, streamed, and resumed at any event on another gateway."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sim.forked import ForkedStack
from tests.gateways import EventSource, GatewayProcess, ScriptedPipeline
from tools.train_tools import TOOL_MODEL

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

MODEL = "tools"
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY},
}
TURNS: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather of Lisbon and Porto?"}]
ASKED: dict[str, Any] = {"messages": TURNS, "tools": [WEATHER], "temperature": 0, "max_tokens": 80}
CALLS = [("get_weather", {"city": "Lisbon"}), ("get_weather", {"city": "Porto"})]


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[tuple[GatewayProcess, ...]]:
    """Two gateways before a pipeline that serves the tool model."""
    folder = tmp_path_factory.mktemp("tools")
    environment = {
        "PENSTOCK_ENGINE_MODEL": str(TOOL_MODEL), "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_POOL_MB": "32",
        "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_KV_STORE_REDIS_MB": "0",
    }  # fmt: skip
    with ForkedStack(folder, pipeline="tools", redis=redis_url, environment=environment) as stack:
        stack.wait_until_ready(150)
        with GatewayProcess(stack.addresses, folder) as one, GatewayProcess(stack.addresses, folder) as other:
            yield one, other


@pytest.fixture(scope="module")
def sdk(gateways: tuple[GatewayProcess, ...]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateways[0].url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(sdk: openai.OpenAI) -> str:
    return sdk.models.list().data[0].id


def list_calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_are_told_from_text_and_their_results_go_back(sdk: openai.OpenAI, model: str) -> None:
    whole = sdk.chat.completions.create(model=model, **ASKED).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    assert list_calls(whole.message) == CALLS
    calls: Any = whole.message.tool_calls
    assert len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": call.id, "content": '{"weather": "red"}'} for call in calls]
    turns: Any = [*TURNS, whole.message.model_dump(exclude_none=True), *results]
    answer = sdk.chat.completions.create(model=model, **(ASKED | {"messages": turns})).choices[0]
    assert answer.message.content or answer.message.tool_calls


def test_a_stream_has_the_same_calls(sdk: openai.OpenAI, model: str) -> None:
    pieces: dict[int, list[str]] = {}
    reasons = set()
    for chunk in sdk.chat.completions.create(model=model, stream=True, **ASKED):
        choice = chunk.choices[0]
        reasons.add(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            assert call.id is not None
            pieces.setdefault(call.index, []).append((call.function.name or "") + (call.function.arguments or ""))
    assert ["".join(texts) for texts in pieces.values()] == [name + json.dumps(given) for name, given in CALLS]
    assert reasons == {None, "tool_calls"}


def test_a_stream_that_is_resumed_at_any_event_has_the_same_calls(
    gateways: tuple[GatewayProcess, ...], model: str
) -> None:
    body = ASKED | {"model": model, "stream": True}
    first = EventSource(f"{gateways[0].url}/v1/chat/completions")
    whole = [(event.id, event.data) for event in first.connect(body)]
    url = f"{gateways[1].url}{first.answer_headers['location']}"
    for place, (position, _) in enumerate(whole[:-1]):
        again = EventSource(url, last_event_id=position)
        assert [(event.id, event.data) for event in again.connect()] == whole[place + 1 :]


def test_reasoning_is_apart_from_the_answer(sdk: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = ASKED | {"messages": [{"role": "user", "content": "What is 7 plus 5?"}], "tools": []}
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    whole: Any = sdk.chat.completions.create(model=model, extra_body=extra, **asked).choices[0].message
    assert whole.reasoning_content
    assert "<think>" not in whole.reasoning_content + (whole.content or "")
    effort: Any = sdk.chat.completions.create(model=model, reasoning_effort="low", **asked).choices[0].message
    assert (effort.reasoning_content, effort.content) == (whole.reasoning_content, whole.content)
    thoughts = []
    for chunk in sdk.chat.completions.create(model=model, stream=True, extra_body=extra, **asked):
        delta: Any = chunk.choices[0].delta
        thoughts.append(getattr(delta, "reasoning_content", None) or "")
    assert "".join(thoughts) == whole.reasoning_content


def test_an_answer_with_a_grammar_is_content_though_the_model_would_think(sdk: openai.OpenAI, model: str) -> None:
    """Where the template begins the answer with reasoning, the grammar's text follows at once."""
    asked: dict[str, Any] = {"messages": TURNS, "temperature": 0, "max_tokens": 40}
    extra = {"guided_choice": ["Lisbon", "Porto"], "chat_template_kwargs": {"enable_thinking": True}}
    message: Any = sdk.chat.completions.create(model=model, extra_body=extra, **asked).choices[0].message
    assert message.content in {"Lisbon", "Porto"}
    assert not getattr(message, "reasoning_content", None)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]}, "tools.0.function.strict"),
        ({"chat_template_kwargs": {"no_such_variable": 1}}, None),
        ({"chat_template_kwargs": {"messages": []}}, None),
    ],
)
def test_what_cannot_be_held_is_refused(sdk: openai.OpenAI, model: str, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model=model, extra_body=given, **ASKED)
    assert param is None or refused.value.param == param


def test_a_model_without_a_response_template_is_offered_no_tools(scripted: ScriptedPipeline, tmp_path: Path) -> None:
    with GatewayProcess(scripted.addresses, tmp_path) as gateway:
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json={"model": scripted.model, **ASKED}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert scripted.read_requests() == []
