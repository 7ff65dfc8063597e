"""Calls that follow a grammar: whatever is drawn, the answer's parser finds calls that are valid."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from transformers import AutoTokenizer

from penstock.errors import InvalidRequest, UnsupportedSchema
from penstock.grammar.checker import GrammarChecker
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.state import GrammarState
from penstock.grammar.tools import ConstrainedTool, begin_in_answer, constrain_calls
from penstock.ingest.openai.answer_parser import AnswerParser, AnswerPart, AnswerPiece, CallsForm
from penstock.messages import GrammarSpec
from sim.workload import TOOL_MODEL
from tests.draws import mark_some

TEMPLATE: dict[str, Any] = json.loads((TOOL_MODEL / "tokenizer_config.json").read_text())["response_template"]
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = {**CLOSED, "properties": {"city": {"type": "string", "maxLength": 8}, "days": DAYS}, "required": ["city"]}
SHAPE = {
    **CLOSED, "$defs": {"n": {"enum": ["a", "b"]}}, "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"],
}  # fmt: skip
MARKS = {
    **CLOSED, "properties": {"mark": {"enum": ["<tool_call>", "</think>", "<think>", "<|im_end|>", "no"]}},
    "required": ["mark"],
}  # fmt: skip
TOOLS = [ConstrainedTool("get-weather", WEATHER), ConstrainedTool("shape", SHAPE)]
OFFERED = [{"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS]
MAX_TOKENS = 160


@pytest.fixture(scope="module")
def text_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOOL_MODEL)


@pytest.fixture(scope="module")
def tokenizer(text_tokenizer: Any) -> GrammarTokenizer:
    text = (TOOL_MODEL / "tokenizer.json").read_text()
    return GrammarTokenizer.from_json(text, vocab_size=len(text_tokenizer), eos_token_ids=[text_tokenizer.eos_token_id])


def hold(
    *, required: bool = True, parallel: bool = True, template: Mapping[str, Any] = TEMPLATE,
    answer: dict[str, Any] | None = None,
) -> GrammarSpec:  # fmt: skip
    return constrain_calls(template, TOOLS, is_required=required, is_parallel=parallel, answer=answer).make_spec()


def draw_answer(spec: GrammarSpec, tokenizer: GrammarTokenizer, seed: int) -> tuple[list[int], bool]:
    """Return tokens that are drawn from those allowed, and whether the answer has ended by itself."""
    state, chance = GrammarState(CompiledGrammar(spec, tokenizer)), random.Random(seed)
    row = np.zeros(tokenizer.num_mask_words, np.int32)
    while len(state.token_ids) < MAX_TOKENS:
        state.fill_mask(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        marks = [token for token in allowed if tokenizer.engine.is_special_token(token)]
        # Else marks, and the ends of texts, would be drawn too seldom among so many words.
        token = chance.choice(marks if marks and chance.random() < 0.2 else allowed)
        if token in tokenizer.eos_token_ids:
            return state.token_ids, True
        state.advance([token])
    return state.token_ids, False


def parse(text: str, calls: CallsForm = "held") -> AnswerPart:
    whole = AnswerParser(TEMPLATE, OFFERED, calls).end(text)
    parser, told = AnswerParser(TEMPLATE, OFFERED, calls), AnswerPart()
    for character in text:
        told += parser.add_text(character)
    assert told + parser.end("") == whole
    return whole


Draw = Callable[..., list[AnswerPart]]


@pytest.fixture
def draw_ended(tokenizer: GrammarTokenizer, text_tokenizer: Any) -> Draw:
    """Draws answers of a grammar after a start; those that ended, all of whose calls are valid."""
    schemas = {tool.name: tool.parameters for tool in TOOLS}

    def draw(spec: GrammarSpec, count: int, start: str = "", calls: CallsForm = "held") -> list[AnswerPart]:
        found = []
        for seed in range(count):
            tokens, has_ended = draw_answer(begin_in_answer(spec, start), tokenizer, seed)
            part = parse(start + text_tokenizer.decode(tokens), calls)
            if has_ended:
                found.append(part)
                for name, arguments in part.calls:
                    schema = schemas[name]
                    assert schema is not None
                    jsonschema.validate(json.loads(arguments), schema)
        return found

    return draw


def check_numbers(found: list[AnswerPart], fewest: set[int], parallel: bool) -> None:
    """Answers have these numbers of calls at least, and several in one where they may."""
    numbers = {len(part.calls) for part in found}
    assert fewest <= numbers
    assert min(numbers) == min(fewest)
    assert (max(numbers) > 1) == parallel


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("start", ["", "<think>"])
def test_where_a_call_is_required_there_is_one_and_it_is_valid(draw_ended: Draw, parallel: bool, start: str) -> None:
    found = draw_ended(hold(parallel=parallel), 60, start)
    assert len(found) > 30
    check_numbers(found, {1}, parallel)
    assert not any(part.content.strip() for part in found)


@pytest.mark.parametrize("parallel", [True, False])
def test_where_the_model_may_call_its_calls_are_valid(draw_ended: Draw, parallel: bool) -> None:
    found = draw_ended(hold(required=False, parallel=parallel), 80)
    check_numbers(found, {0, 1}, parallel)
    assert any(part.content for part in found)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("start", ["", "<think>"])
@pytest.mark.parametrize("answer", [WEATHER, MARKS, {"type": "object"}, {"type": "array", "items": {"enum": [1, "a"]}}])
def test_an_answer_calls_or_else_follows_its_schema(
    draw_ended: Draw, parallel: bool, start: str, answer: dict[str, Any]
) -> None:
    found = draw_ended(hold(required=False, parallel=parallel, answer=answer), 60, start, "or_json")
    check_numbers(found, {0, 1}, parallel)
    for part in found:
        if part.calls:
            assert not part.content.strip()
        else:
            jsonschema.validate(json.loads(part.content), answer)
    assert any(part.reasoning for part in found)


@pytest.mark.proof
def test_who_takes_an_answer_over_has_the_same_masks(tokenizer: GrammarTokenizer) -> None:
    grammar = CompiledGrammar(hold(required=False, answer=WEATHER), tokenizer)
    rows = [np.zeros(tokenizer.num_mask_words, np.int32) for _ in range(2)]
    for seed in range(8):
        tokens, _ = draw_answer(grammar.spec, tokenizer, seed)
        state = GrammarState(grammar)
        for place, token in enumerate(tokens):
            state.fill_mask(rows[0])
            GrammarState(grammar, token_ids=tokens[:place]).fill_mask(rows[1])
            assert rows[0].tolist() == rows[1].tolist()
            state.advance([token])


def test_where_a_call_is_required_the_schema_of_the_answer_waits() -> None:
    assert hold(answer=WEATHER) == hold()


def test_marks_in_an_answer_of_json_are_text() -> None:
    text = '{"a": "<tool_call>", "b": ["</think>", "<think>"]}'
    assert parse(f"<think>so <tool_call></think>\n\n{text}", "or_json") == AnswerPart(
        [AnswerPiece("reasoning", "so <tool_call>"), AnswerPiece("content", f"\n\n{text}")]
    )


def test_a_mark_in_a_text_does_not_end_the_call(tokenizer: GrammarTokenizer, text_tokenizer: Any) -> None:
    state = GrammarState(CompiledGrammar(hold(), tokenizer))
    close = text_tokenizer.convert_tokens_to_ids("</tool_call>")
    pieces = ["<tool_call>", '{"name": "get-weather", "arguments": {"city": "', "<", "/t", '\\"', '"}}']
    for piece in pieces:
        state.advance(text_tokenizer.encode(piece, add_special_tokens=False))
    state.advance([close])
    text = '<tool_call>{"name": "get-weather", "arguments": {"city": "</tool_call>\\"<"}}</tool_call>'
    assert parse(text).calls == [("get-weather", '{"city": "</tool_call>\\"<"}')]
    cut = text.partition("\\")[0]
    assert (parse(cut).calls, parse(cut).content) == ([("get-weather", '{"city": "</tool_call>')], "")


def test_what_is_free_stays_free_but_for_the_mark_as_text(tokenizer: GrammarTokenizer, text_tokenizer: Any) -> None:
    def allows(text: str) -> bool:
        state = GrammarState(CompiledGrammar(hold(required=False), tokenizer))
        ids = [token for piece in text.split("|") for token in text_tokenizer.encode(piece, add_special_tokens=False)]
        return state.count_allowed(ids) == len(ids)

    assert allows("Hello <b> \n there")
    assert allows("<think>|so|</think>|Hello")
    assert allows('Now|<tool_call>|{"name": "shape", "arguments": {"n": "a"}}|</tool_call>| done')
    assert not allows('<tool_call>|{"name": "shape", "arguments": {"n": "c"}}')
    assert not allows('<tool_call>|{"name": "other"')
    assert not allows("<|t|o|o|l|_|c|a|l|l|>")


def test_a_gateway_without_the_models_words_can_check_it() -> None:
    with GrammarChecker() as checker:
        assert checker.check_grammar(hold()).kind == "tools"
        deep = {**CLOSED, "properties": {"a": {"not": {"type": "null"}}}}
        tools = [TOOLS[0], ConstrainedTool("f", deep)]
        wrong = constrain_calls(TEMPLATE, tools, is_required=False, is_parallel=True).make_spec()
        with pytest.raises(UnsupportedSchema, match="'not' at #/tools/1/function/parameters/properties/a/not"):
            checker.check_grammar(wrong)
        assert checker.check_grammar(hold(required=False, answer=WEATHER)).kind == "tools"
        with pytest.raises(UnsupportedSchema, match="'not' at #/properties/a/not"):
            checker.check_grammar(hold(required=False, answer=deep))
        with pytest.raises(InvalidRequest, match="cannot be read"):
            checker.check_grammar(GrammarSpec(kind="tools", source="{}"))


@pytest.mark.parametrize(
    "change",
    mark_some([
        {"content": "xml-inline"}, {"content_args": {"unquoted_keys": True}}, {"open_pattern": "<call (?P<name>.*)>"},
        {"transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}},
    ], pytest.mark.proof),
)  # fmt: skip
def test_calls_of_another_form_are_not_held(change: dict[str, Any]) -> None:
    calls = {**TEMPLATE["fields"]["tool_calls"], **change}
    if "open_pattern" in change:
        del calls["open"]
    with pytest.raises(InvalidRequest, match="cannot be held to a grammar"):
        hold(template={**TEMPLATE, "fields": {**TEMPLATE["fields"], "tool_calls": calls}})


def test_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the same name"):
        constrain_calls(TEMPLATE, [TOOLS[0], TOOLS[0]], is_required=True, is_parallel=True)


def test_blanks_before_a_mark_may_be_swallowed() -> None:
    calls = {**TEMPLATE["fields"]["tool_calls"], "open_pattern": r"\s*<tool_call>"}
    del calls["open"]
    assert hold(template={**TEMPLATE, "fields": {**TEMPLATE["fields"], "tool_calls": calls}}) == hold()
