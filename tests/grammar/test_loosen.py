"""Schemas of tools that are not strict: what cannot be enforced is left out of them and named, and the rest is held."""

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidRequest, UnsupportedSchema
from penstock.grammar import loosen
from penstock.grammar.checker import GrammarChecker
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.loosen import LoosenedGrammar, loosen_grammar
from penstock.grammar.tools import ConstrainedCalls, ConstrainedTool, constrain_calls
from penstock.messages import GrammarSpec
from tests.grammar.test_tools import TEMPLATE

BYTES = GrammarTokenizer.make_bytes()
A = {"type": "integer", "minimum": 1}
OBJECT = {"type": "object", "properties": {"a": A}, "required": ["a"]}
OVERLAP = {"oneOf": [{"type": "object", "required": ["x"]}, {"type": "object", "required": ["y"]}]}


def check(spec: GrammarSpec) -> None:
    CompiledGrammar(spec, BYTES)


def make_spec(*schemas: dict[str, Any] | None, strict: bool = False) -> GrammarSpec:
    tools = [ConstrainedTool(f"f{number}", schema, is_loose=not strict) for number, schema in enumerate(schemas)]
    return constrain_calls(TEMPLATE, tools, is_required=True, is_parallel=False).make_spec()


def loosen_schemas(*schemas: dict[str, Any] | None) -> tuple[list[dict[str, Any] | None], tuple[str, ...]]:
    """The schemas that are left of these, and the keywords that were left out."""
    found = loosen_grammar(make_spec(*schemas), {f"f{number}" for number in range(len(schemas))}, check)
    check(found.spec)
    return [tool.parameters for tool in ConstrainedCalls.decode(found.spec.source).tools], found.keywords


@pytest.mark.parametrize(
    ("schema", "left", "keywords"),
    [
        (OBJECT, OBJECT, ()),
        (OBJECT | {"not": {"required": ["b"]}}, OBJECT, ("not",)),
        (OBJECT | {"if": {}, "then": {}, "else": {}}, OBJECT, ("if", "then", "else")),
        (OBJECT | {"$id": "x", "properties": {"a": {"$id": "y"} | A}}, OBJECT | {"$id": "x"}, ("$id",)),
        (OBJECT | {"properties": {"a": {"$ref": "#/gone"}}}, OBJECT | {"properties": {"a": {}}}, ("$ref",)),
        ({"properties": {"a/b": {"items": [{"not": A}, A]}}}, {"properties": {"a/b": {"items": [{}, A]}}}, ("not",)),
        (OBJECT | {"minProperties": 5}, OBJECT, ("minProperties",)),
        (OBJECT | {"properties": {"\0": A, "a": A}, "additionalProperties": False},
         {"type": "object", "required": ["a"]}, ("properties",)),
        (OBJECT | {"patternProperties": {"(?<=x)y": A}, "additionalProperties": False}, OBJECT, ("patternProperties",)),
        (OBJECT | {"$defs": {"r": {"required": ["r"], "properties": {"r": {"$ref": "#/$defs/r"}}, "type": "object"}},
                   "properties": {"a": {"$ref": "#/$defs/r"}}},
         OBJECT | {"$defs": {"r": True}, "properties": {"a": {"$ref": "#/$defs/r"}}}, ("$ref",)),
        # These are the engine's refusals.
        (OBJECT | {"properties": {"a": OVERLAP}}, OBJECT | {"properties": {"a": {}}}, ("oneOf",)),
        (OBJECT | {"patternProperties": {"^b": A, "c$": A}}, OBJECT, ("patternProperties",)),
        ({"$ref": "#"}, None, ("",)),
        ({"type": "object", "properties": 3}, {"type": "object"}, ("properties",)),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_left_out_and_named(
    schema: dict[str, Any], left: dict[str, Any] | None, keywords: tuple[str, ...]
) -> None:
    assert loosen_schemas(schema) == ([left], keywords)


def test_each_tool_keeps_what_is_right_and_a_strict_one_is_refused() -> None:
    wrong = OBJECT | {"not": {}}
    assert loosen_schemas(wrong, None, OBJECT)[0] == [OBJECT, None, OBJECT]
    with pytest.raises(UnsupportedSchema, match="'not' at #/tools/1"):
        loosen_grammar(make_spec(wrong, wrong), {"f0"}, check)
    with pytest.raises(UnsupportedSchema):
        loosen_grammar(make_spec(wrong), (), check)


def test_a_schema_with_too_many_faults_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loosen, "MAX_LOOSENINGS", 2)
    schema = OBJECT | {"if": {}, "then": {}, "else": {}}
    assert loosen_schemas(schema, OBJECT) == ([None, OBJECT], ("if", "then", ""))


def test_schemas_that_are_too_much_together_are_left_out() -> None:
    def refuse(spec: GrammarSpec) -> None:
        if "minimum" in spec.source:
            raise InvalidRequest("too complex")

    names = {"f0", "f1"}
    assert loosen_grammar(make_spec(OBJECT, None), names, refuse) == LoosenedGrammar(make_spec(None, None), ("",))
    with pytest.raises(InvalidRequest):
        loosen_grammar(make_spec(OBJECT, strict=True), (), refuse)
    large = {"type": "object", "description": "x" * 200_000}
    spec = make_spec(large, large)
    assert spec == make_spec(None, None)
    assert loosen_grammar(spec, names, check).keywords == ("",)
    with pytest.raises(InvalidRequest):
        make_spec(large, large, strict=True)


def test_the_checker_loosens_and_remembers() -> None:
    with GrammarChecker() as checker:
        spec = make_spec(OBJECT | {"not": {}})
        found = checker.loosen_grammar(spec, frozenset({"f0"}))
        assert (found.spec, found.keywords) == (make_spec(OBJECT), ("not",))
        assert checker.loosen_grammar(spec, frozenset({"f0"})) is found
        with pytest.raises(UnsupportedSchema):
            checker.loosen_grammar(spec, frozenset())


FAULTS = st.sampled_from([
    {"not": {"const": 3}}, {"if": {"type": "integer"}, "then": {"minimum": 3}}, {"contains": {"const": 1}}, OVERLAP,
    {"patternProperties": {"(?<=x)y": False}, "additionalProperties": False}, {"uniqueItems": True}, {"$ref": "#/gone"},
    {"properties": {"\0": False}, "additionalProperties": False}, {"format": "unknown"}, {"const": 2**60},
    {"prefixItems": [{"not": {}}], "items": False}, {"type": "any"}, {"minimum": "x"}, {},
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 4) | st.sampled_from(["x", "xy", "\0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "x", "xy", "\0"]), inner),
    max_leaves=6,
)


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda a, b, more: {"properties": {"a": a, "x": b}, "items": b, **more}, inner, inner, FAULTS)


@settings(max_examples=60, deadline=None)
@given(st.recursive(FAULTS, nest, max_leaves=4), st.dictionaries(st.sampled_from(["a", "x", "xy", "\0"]), VALUES))
def test_whatever_a_schema_allows_its_rest_allows(schema: dict[str, Any], value: dict[str, Any]) -> None:
    (left,), _ = loosen_schemas({**schema, "type": "object"})
    try:
        allowed = jsonschema.Draft202012Validator({**schema, "type": "object"}).is_valid(value)
    except Exception:  # a schema that is none
        return
    if allowed and left is not None:
        assert jsonschema.Draft202012Validator(left).is_valid(value), (schema, left, value)
