"""Answers over many schemas: what ends is valid, what is cut can be gone on with, and replay gives the same masks."""

import json
from typing import Any

import pytest

from penstock.grammar.state import GrammarState
from penstock.messages import GrammarSpec
from sim.schemas import find_violation, make_schemas
from tests.draws import mark_some
from tests.grammar.sampling import RandomAnswer, compile_schema, compile_spec, draw_answer, read_mask

NUM_SCHEMAS = 1000
NUM_PARTS = 8
MAX_TOKENS = 250


def check_replay(answer: RandomAnswer, fresh: GrammarState) -> None:
    for position, mask in enumerate(answer.masks):
        assert read_mask(fresh).tobytes() == mask
        fresh.advance(answer.token_ids[position : position + 1])


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_answers_to_many_schemas_are_valid_and_can_be_replayed(part: int) -> None:
    ended = 0
    schemas = make_schemas(NUM_SCHEMAS, seed=20261122)[part::NUM_PARTS]
    for number, schema in enumerate(schemas):
        grammar = compile_schema(schema)
        answer = draw_answer(grammar, number, MAX_TOKENS)
        if answer.is_ended:
            ended += 1
            assert find_violation(schema, answer.text) is None, (schema, answer.text)
        check_replay(answer, GrammarState(grammar))
    assert ended >= 0.9 * len(schemas)


def test_the_validator_finds_what_is_not_valid() -> None:
    assert find_violation({"type": "integer", "minimum": 3}, "2") is not None
    assert find_violation({"type": "string", "format": "date"}, '"2023-02-29"') is not None


def test_who_takes_over_at_any_token_has_the_same_masks() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    for one in (schema, {**schema, "properties": {"a": {"enum": ['say "hi"\n', "\\"]}}}):
        grammar = compile_schema(one)
        answer = draw_answer(grammar, 3, 200)
        for position, mask in enumerate(answer.masks):
            resumed = GrammarState(compile_schema(one))  # another process has nothing compiled
            resumed.advance(answer.token_ids[:position])
            assert read_mask(resumed).tobytes() == mask


@pytest.mark.parametrize(
    ("spec", "valid"),
    mark_some(
        [
            (GrammarSpec(kind="regex", source="[a-c]{3}/[0-9]+x?"), lambda text: text[3] == "/"),
            (GrammarSpec(kind="choice", source='["yes", "may\\"be", "größer"]'), ["yes", 'may"be', "größer"].count),
            (GrammarSpec(kind="lark", source='start: "a" ("b" | "c")~2'), ["abb", "abc", "acb", "acc"].count),
            (GrammarSpec(kind="lark", source='root ::= "a" x\nx ::= "b" | "c"'), ["ab", "ac"].count),
            (GrammarSpec(kind="json_object"), lambda text: isinstance(json.loads(text), dict)),
        ],
        pytest.mark.proof,
        2,
    ),
)
def test_other_kinds_of_grammars_are_kept(spec: GrammarSpec, valid: Any) -> None:
    grammar = compile_spec(spec)
    ended = [answer for seed in range(30) if (answer := draw_answer(grammar, seed, 400)).is_ended]
    assert ended
    assert all(valid(answer.text) for answer in ended)


def test_blanks_have_an_end() -> None:
    grammar = compile_schema({"type": "array", "maxItems": 0})
    assert all(draw_answer(grammar, seed, 64).is_ended for seed in range(20))
