"""JSON schemas: what is enforced, what is refused and how it is named, and what hostile ones cost."""

import json
import re
from typing import Any

import jsonschema
import pytest

from penstock.errors import InvalidRequest, UnsupportedSchema
from penstock.grammar.pattern import PatternRefused, translate_pattern
from penstock.grammar.schema import prepare_schema
from penstock.grammar.spec import make_schema_spec
from sim.schemas import RefusedSchema, make_refused_schemas
from tests.grammar.sampling import accepts_text, compile_schema

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 5, 6, -1, -3, 7.5, 0.5, 0.25, 1e-7, 12, 100, "", "a", "ab", "abc", "abcd", "b", "ax",
    "é", "éé", "x y", "\n", "a\n", 'q"', "2024-02-29", "2023-02-29", "1.2.3.4", [], [1], [1, "a"], [1, 2, 3], ["a"],
    [None], [[]], [1, 1], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": None}, {"a": {"a": 1}},
    {"ab": 1}, {"": 0},
)  # fmt: skip
"""Values of every type, around the bounds of `SCHEMAS`."""
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "integer"}, {"type": ["number", "null"]}, {"const": {"a": 1}}, {"enum": ["a", 1, None, [1, 2, 3]]},
    {"minimum": 1}, {"maximum": 5}, {"exclusiveMinimum": 1, "type": "number"},
    {"exclusiveMaximum": 3, "type": "integer"}, {"multipleOf": 3}, {"multipleOf": 0.25}, {"minLength": 2},
    {"maxLength": 2}, {"pattern": "^a"}, {"pattern": "b"}, {"pattern": "^.{1,2}$"}, {"pattern": "^\\S*$"},
    {"type": "string", "format": "date"}, {"type": "string", "format": "ipv4"}, {"items": {"type": "integer"}},
    {"prefixItems": [{"type": "integer"}], "items": False}, {"minItems": 1, "maxItems": 2},
    {"properties": {"a": {"type": "integer"}}},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"additionalProperties": {"type": "integer"}, "type": "object"},
    {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}, {"required": ["a", "b"]},
    {"minProperties": 1}, {"maxProperties": 1}, {"anyOf": [{"type": "string"}, {"minimum": 3}]},
    {"allOf": [{"minimum": 1}, {"maximum": 3}]}, {"oneOf": [{"type": "string"}, {"type": "array"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": {"minimum": 2}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "integer"}]}}}, {"uniqueItems": False},
    {"propertyNames": {"type": "string"}}, {"format": "int32", "type": "integer"},
    {"description": "anything", "x-unknown": {"not": {}}},
)  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_what_a_grammar_allows_is_what_a_validator_calls_valid(schema: dict[str, Any]) -> None:
    grammar = compile_schema(schema)
    kind = jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    texts = {json.dumps(value, ensure_ascii=False): validator.is_valid(value) for value in VALUES}
    wrong = {text for text, valid in texts.items() if accepts_text(grammar, text) != valid}
    assert {text for text in wrong if not texts[text]} == set()
    # Numbers with bounds are not written with an exponent, and multiples of 0.25 with two digits. The validator's `$`
    # also matches before a line break at the end.
    assert wrong <= {"1e-07", "0.5", "7.5", '"\\n"', '"a\\n"'}


@pytest.mark.parametrize("refused", make_refused_schemas(160, seed=1), ids=lambda one: f"{one.keyword} {one.path}")
def test_what_cannot_be_enforced_is_refused_by_name(refused: RefusedSchema) -> None:
    with pytest.raises(UnsupportedSchema) as raised:
        compile_schema(refused.schema)
    assert (raised.value.keyword, raised.value.path) == (refused.keyword, refused.path)
    assert refused.keyword in str(raised.value)
    advice = raised.value.reason.partition(": ")[2]
    assert advice.startswith(("use ", "write ", "leave ", "list ", "say ")), "it does not say what to do"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"properties": {"a": {"type": "string"}}}, '{"\\u0061": 1}'),
        ({"patternProperties": {"^a$": {"type": "string"}}}, '{"\\u0061": 1}'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"2100-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2024-01-01T10:00:60Z"'),
        ({"type": "string", "format": "hostname"}, f'"{"a." * 130}a"'),
        ({"type": "string", "pattern": "^\\S$"}, '"\ufeff"'),
        ({"type": "string", "pattern": "^.$"}, '"\u2028"'),
        ({"type": "string", "pattern": "^x[\\x00-\\x1f]?y$"}, '"x\\u0001y"'),
    ],
)
def test_what_the_engine_alone_would_let_through_is_not_allowed(schema: dict[str, Any], text: str) -> None:
    assert not accepts_text(compile_schema(schema), text)


PETS = {
    name: {"type": "object", "properties": {"kind": {"const": name}, "n": {"type": "integer"}}, "required": ["kind"]}
    for name in ("cat", "dog")
}


@pytest.mark.proof
@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (
            {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": PETS},
            '{"kind": "dog", "n": 1}', '{"kind": "bird"}',
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "integer"}],
             "additionalItems": False},
            "[1]", "[1, 2]",
        ),
        ({"properties": {"b": {}, "a": {}}, "required": ["a", "b"], "type": "object"},
         '{"b": 1, "a": 1}', '{"a": 1, "b": 1}'),
    ],
    ids=["alternatives that exclude each other behind references", "an older draft's tuple", "the schema's order"],
)  # fmt: skip
def test_references_tuples_and_the_order_of_properties_are_enforced(
    schema: dict[str, Any], allowed: str, refused: str
) -> None:
    grammar = compile_schema(schema)
    assert accepts_text(grammar, allowed)
    assert not accepts_text(grammar, refused)


def test_whole_exclusive_bounds_near_an_opposite_bound_are_refused_where_they_meet() -> None:
    open_, closed = {"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0.75}
    grammar = compile_schema({"properties": {"price": open_, "share": closed}, "type": "object"})
    assert not accepts_text(grammar, '{"price": 0}')
    for schema in (
        {**open_, **closed},
        {"allOf": [open_, closed]},
        {"$ref": "#/$defs/open", "maximum": 0.75, "$defs": {"open": open_}},
        {"allOf": [{"properties": {"a": open_}}, {"properties": {"a": closed}}]},
    ):
        with pytest.raises(UnsupportedSchema, match="exclusiveMinimum"):
            compile_schema(schema)


def nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int, **more: Any) -> dict[str, Any]:
    defs = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, **more} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{length}": {"type": "null"}}}


HOSTILE: dict[str, Any] = {
    "a chain of references that ends the engine's stack": chain(1000),
    "deep": nest(500),
    "many properties": {"properties": {f"p{i}": {} for i in range(2000)}},
    "many optional properties": {"properties": {f"p{i}": {} for i in range(300)}},
    "many values": {"enum": list(range(6000))},
    "many patterns at once": {"type": "string", "allOf": [{"pattern": f"a.*b{i}.*c"} for i in range(40)]},
    "many patterns at once, inside": {"allOf": [{"properties": {"a": {"pattern": f"a.*b{i}.*c"}}} for i in range(40)]},
    "many patterns of names": {"patternProperties": {f"^{i}_.*$": {} for i in range(200)}},
    "patterns of names that are hard to compare": {
        "patternProperties": {"".join(f"(a|b{j}).*" for j in range(i, i + 12)): {} for i in range(16)}
    },
    "counts of counts": {"type": "string", "pattern": "^(((a{100}){100}){100})$"},
    "a recursion without an end": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
    "a reference to itself": {"$ref": "#"},
    "a product of alternatives": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(8)]} for i in range(6)]
    },
    "nothing is valid": {"allOf": [{"type": "string"}, {"type": "null"}]},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_hostile_schemas_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSchema):
        compile_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "maxItems": 10**9}, {"type": "array", "minItems": 10**6},
        {"type": "string", "minLength": 10**9}, {"type": "string", "pattern": "^.*a.{30}$"},
        {"type": "object", "maxProperties": 10**9}, nest(60), chain(40, type=["object", "null"]),
    ],
    ids=str,
)  # fmt: skip
def test_large_bounds_cost_nothing(schema: dict[str, Any]) -> None:
    compile_schema(schema)


def test_a_schema_may_not_be_larger_than_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="bytes"):
        make_schema_spec({"description": "x" * 300_000}, "schema")


def test_unknown_keywords_do_not_reach_the_engine() -> None:
    schema = {"type": "object", "x-note": 1, "title": "T", "properties": {"a": {"examples": [1], "type": "null"}}}
    prepared = prepare_schema(schema).schema
    assert prepared == {"$ref": "#/$defs/0", "$defs": {"0": {"type": "object", "properties": {"a": {"type": "null"}}}}}


# Regular expressions: what all dialects understand the same way is kept, the rest is refused


TEXTS = (
    "", "a", "b", "ab", "abc", "aab", "A", "1", "12", "_", " ", "a b", "é", "ä1", "-", ".", "a.b", "[", "]", "^", "/",
    "&", "aa",
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        "^a", "b$", "^a|b$", "(^a|b)", "^(a|b){1,2}$", "^[a-c]+$", "^[^a-c]*$", "^\\d+$", "^\\w+$", "^[\\w.-]+$",
        "^\\s$", "^a?b*c+?$", "^(?:a)(?<n>b)?$", "^\\.$", "^[.]$", "^[\\]\\[]$", "^\\x61\\u0062$", "^a{2}$",
        "^a{1,}$", "^[&/^-]$", "^[a[]$", "^\\/$", "^[^\\d\\s]$", "^\\-$", "a.b", "^$", "",
    ],
)  # fmt: skip
def test_an_expression_means_what_it_means_elsewhere(pattern: str) -> None:
    grammar = compile_schema({"type": "string", "pattern": pattern})
    python = pattern.replace("(?<n>", "(?P<n>").replace("[a[]", "[a\\[]")
    for text in TEXTS:
        assert accepts_text(grammar, f'"{text}"') == bool(re.search(python, text, re.ASCII)), text


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?!a)", "(?<=a)b", "(?i)a", "a++", "a*+", "(a)\\1", "\\bword", "\\Aa", "\\cA", "[]a]", "[^]", "a{,2}",
        "a{x", "a{2", "[z-a]", "a{3,1}", "[\\S]", "\\x0", "\\u12", "[a", "\\", "(?P=n)", "\x00", "\\x00",
        "[\\x00-\\x07]", "^(a{1000}){1000}$", "a" * 3000,
    ],
)  # fmt: skip
def test_what_dialects_understand_differently_is_refused(pattern: str) -> None:
    with pytest.raises(PatternRefused):
        translate_pattern(pattern)


def test_negated_classes_exclude_the_letters_and_blanks_of_every_dialect() -> None:
    for pattern, texts in (("^\\S$", "\ufeff\u00a0\u2028"), ("^\\W$", "éß日"), ("^\\D$", "٣"), ("^[^\\w]$", "é")):
        grammar = compile_schema({"type": "string", "pattern": pattern})
        assert not any(accepts_text(grammar, f'"{text}"') for text in texts)
        assert accepts_text(grammar, '"-"')
