"""The tool model: it loads like any other, its template renders, its answers parse, and it calls tools."""

import json
from typing import Any

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.model.model import LoadedModel
from tests.engine.helpers import run_sequences, sequence
from tools.tool_corpus import KINDS, TOOL_MODEL, Conversation, make_conversation, render_conversation

NUM_CONVERSATIONS = 400
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY},
}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather of Lisbon?"}]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(EngineSettings(model=str(TOOL_MODEL)))


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return [make_conversation(f"test {i}", held_out=True) for i in range(NUM_CONVERSATIONS)]


def render(loaded: LoadedModel, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options))


def answer(loaded: LoadedModel, prompts: list[str], max_tokens: int = 80) -> list[str]:
    """The engine's greedy answers with their special tokens, each to the end of its turn."""
    encoded = [loaded.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    outputs = run_sequences(Engine(loaded, EngineSettings()), [sequence(ids, max_tokens) for ids in encoded])
    return [loaded.tokenizer.decode(output).partition("<|im_end|>")[0] + "<|im_end|>" for output in outputs]


def compare_calls(given: list[Any], expected: list[Any]) -> bool:
    """Return whether both are calls of the same functions with the same arguments, in the same order."""
    return [call.get("function") for call in given] == [call["function"] for call in expected]


def score_answer(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation, prompt: str, text: str
) -> dict[str, bool]:
    """Return what is right about an answer; the keys are the parts of the score."""
    kind, expected = conversation.kind, conversation.answer
    try:
        parsed = tokenizer.parse_response(text, prefix=prompt)
        calls, content = parsed.get("tool_calls", []), parsed.get("content", "")
    except ValueError:
        return {f"{kind}: parses": False, f"{kind}: equal": False}
    scores = {f"{kind}: parses": text.endswith("<|im_end|>")}
    if conversation.schema is None:
        same = content == (expected["content"] or "") and compare_calls(calls, expected.get("tool_calls", []))
        return scores | {f"{kind}: equal": same}
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    valid = jsonschema.Draft202012Validator(conversation.schema).is_valid(value)
    return scores | {f"{kind}: valid": valid, f"{kind}: equal": value == json.loads(expected["content"])}


def test_any_text_survives_the_tokenizer_and_digits_stand_alone(loaded: LoadedModel) -> None:
    text = 'Grüße, 東京 \t\n {"a": [1.5e-3]} \x00 👍🏽'
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(text)) == text
    assert loaded.tokenizer.tokenize("2026") == ["2", "0", "2", "6"]
    assert len(loaded.tokenizer.encode("<|im_start|><tool_call></tool_call><think></think><|im_end|>")) == 6


def test_expected_answers_parse_to_their_messages(loaded: LoadedModel, conversations: list[Conversation]) -> None:
    assert len({conversation.kind for conversation in conversations}) == len(KINDS)
    for conversation in conversations:
        prompt = render_conversation(loaded.tokenizer, conversation, whole=False)
        text = render_conversation(loaded.tokenizer, conversation, whole=True)[len(prompt) :].removesuffix("\n")
        parsed = loaded.tokenizer.parse_response(text, prefix=prompt)
        calls = [{key: call[key] for key in ("type", "function")} for call in conversation.answer.get("tool_calls", [])]
        assert parsed.get("tool_calls", []) == calls
        assert parsed.get("content", "") == (conversation.answer["content"] or "")
        assert parsed.get("reasoning_content") == conversation.answer.get("reasoning_content")
        assert all(score_answer(loaded.tokenizer, conversation, prompt, text).values())


def test_an_answer_cut_off_parses_to_what_is_there(loaded: LoadedModel) -> None:
    prompt = render(loaded, QUESTION, tools=[WEATHER], enable_thinking=True)
    parsed = loaded.tokenizer.parse_response("The weather of", prefix=prompt)
    assert parsed == {"role": "assistant", "reasoning_content": "The weather of"}


def test_tool_choice_changes_the_prompt(loaded: LoadedModel) -> None:
    auto = render(loaded, QUESTION, tools=[WEATHER])
    assert json.dumps(WEATHER["function"]) in auto
    assert auto == render(loaded, QUESTION, tools=[WEATHER], tool_choice="auto")
    assert auto == render(loaded, QUESTION, tools=[WEATHER["function"]])
    assert render(loaded, QUESTION, tools=[WEATHER], tool_choice="none") == render(loaded, QUESTION)
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert "</tools>Call a tool.<|im_end|>" in render(loaded, QUESTION, tools=[WEATHER], tool_choice="required")
    assert "</tools>Call get_weather.<|im_end|>" in render(loaded, QUESTION, tools=[WEATHER], tool_choice=named)


def test_thinking_is_asked_for_in_either_way(loaded: LoadedModel) -> None:
    thinking = render(loaded, QUESTION, enable_thinking=True)
    assert thinking.endswith("<|im_start|>assistant\n<think>")
    assert render(loaded, QUESTION, reasoning_effort="low") == thinking
    assert not render(loaded, QUESTION, reasoning_effort="none").endswith("<think>")
    assert not render(loaded, QUESTION, reasoning_effort="low", enable_thinking=False).endswith("<think>")


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
def test_a_history_of_calls_as_clients_send_it(loaded: LoadedModel, arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *QUESTION,
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": '{"weather": "red"}'}]},
    ]
    called = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'
    assert render(loaded, history) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the weather of Lisbon?<|im_end|>\n"
        f"<|im_start|>assistant\n{called}{called}<|im_end|>\n"
        '<|im_start|>tool\n{"weather": "red"}<|im_end|>\n<|im_start|>assistant\n'
    )


@pytest.mark.parametrize(
    ("question", "cities"),
    [("What is the weather of Lisbon?", ["Lisbon"]), ("What is the weather of Lisbon and Porto?", ["Lisbon", "Porto"])],
)
def test_it_calls_a_tool(loaded: LoadedModel, question: str, cities: list[str]) -> None:
    prompt = render(loaded, [{"role": "user", "content": question}], tools=[WEATHER])
    [text] = answer(loaded, [prompt])
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}} for city in cities]
    assert loaded.tokenizer.parse_response(text, prefix=prompt) == {"role": "assistant", "tool_calls": calls}
