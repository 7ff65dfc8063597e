"""The response templates of models that were published without one: of known families, or in the operator's file."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.text.response_template import find_response_template
from penstock.errors import ModelLoadError
from penstock.ingest.openai.answer_parser import AnswerParser, AnswerPart, AnswerPiece
from sim.workload import TOOL_MODEL

TOOL = {"type": "function", "function": {"name": "get_weather"}}
OWN: dict[str, Any] = json.loads((TOOL_MODEL / "tokenizer_config.json").read_text())["response_template"]
WITHOUT = SimpleNamespace()
CALL = AnswerPiece("call", '{"city": "Rome"}', "get_weather", is_last=True)
THOUGHT = AnswerPiece("reasoning", "Where?")
QWEN = '<think>\nWhere?\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Where?<|end|>"
HARMONY_CALLS = (
    '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}',
    '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
)


def parse(template: dict[str, Any] | None, text: str, step: int) -> AnswerPart:
    assert template is not None
    parser, told = AnswerParser(template, [TOOL]), AnswerPart()
    for begin in range(0, len(text), step):
        told += parser.add_text(text[begin : begin + step])
    return told + parser.end("")


@pytest.mark.proof
@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("qwen3", QWEN, [AnswerPiece("reasoning", "\nWhere?\n"), CALL]),
        ("qwen2", "Plain.", [AnswerPiece("content", "Plain.")]),
        ("gpt_oss", HARMONY_THOUGHT + HARMONY_CALLS[0], [THOUGHT, CALL]),
        ("gpt_oss", HARMONY_CALLS[1], [CALL]),
        (
            "gpt_oss",
            HARMONY_THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>One moment. <|end|>"
            "<|start|>assistant<|channel|>final<|message|>Rome it is.",
            [THOUGHT, AnswerPiece("content", "One moment. Rome it is.")],
        ),
    ],
)
def test_a_family_has_a_template(family: str, text: str, expected: list[AnswerPiece], step: int) -> None:
    assert parse(find_response_template(WITHOUT, family, ""), text, step).pieces == expected


def test_the_models_own_template_goes_before_its_familys_and_the_operators_before_both(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(response_template=OWN)
    assert find_response_template(tokenizer, "qwen3", "") == OWN
    file = tmp_path / "template.json"
    file.write_text(json.dumps({**OWN, "start_anchor": "<|assistant|>"}))
    assert find_response_template(tokenizer, "qwen3", str(file)) == {**OWN, "start_anchor": "<|assistant|>"}
    assert find_response_template(WITHOUT, "llama", "") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fields": {}}'])
def test_a_file_that_is_no_template_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "template.json"
    file.write_text(text)
    with pytest.raises(ModelLoadError, match=f"PENSTOCK_ENGINE_RESPONSE_TEMPLATE={file}: no usable"):
        find_response_template(WITHOUT, "qwen3", str(file))


def test_a_template_of_the_model_that_cannot_be_used_is_left(caplog: pytest.LogCaptureFixture) -> None:
    assert find_response_template(SimpleNamespace(response_template={"fields": 1}), "qwen3", "") is None
    assert "cannot be used" in caplog.text
