"""How grammars are read from the fields of HTTP APIs."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import InvalidRequest
from penstock.grammar.spec import (
    choose_grammar,
    from_guided_fields,
    from_response_format,
    from_structured_outputs,
    from_text_format,
)
from penstock.messages import MAX_SOURCE_BYTES, GrammarSpec, decode_message

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SPEC = GrammarSpec(kind="json_schema", source='{"type":"object","properties":{"b":{},"a":{}}}')


NAMED = {"name": "x", "strict": True, "schema": SCHEMA}
OBJECT = GrammarSpec(kind="json_object")
READ: list[tuple[Any, Any, GrammarSpec | None]] = [
    (from_response_format, {"type": "json_schema", "json_schema": NAMED}, SPEC),
    (from_text_format, {"type": "json_schema", **NAMED}, SPEC),
    (from_guided_fields, {"guided_json": SCHEMA, "model": "m"}, SPEC),
    (from_guided_fields, {"guided_json": json.dumps(SCHEMA)}, SPEC),
    (from_structured_outputs, {"json": SCHEMA, "regex": None, "disable_fallback": False}, SPEC),
    (from_response_format, {"type": "json_object"}, OBJECT),
    (from_text_format, {"type": "json_object"}, OBJECT),
    (from_structured_outputs, {"json_object": True}, OBJECT),
    (from_guided_fields, {"guided_regex": "a+"}, GrammarSpec(kind="regex", source="a+")),
    (from_guided_fields, {"guided_grammar": "start: A"}, GrammarSpec(kind="lark", source="start: A")),
    (from_structured_outputs, {"choice": ["é", "b"]}, GrammarSpec(kind="choice", source='["é", "b"]')),
    (from_response_format, None, None),
    (from_response_format, {"type": "text"}, None),
    (from_text_format, {"type": "text"}, None),
    (from_guided_fields, {"guided_json": None}, None),
    (from_structured_outputs, {}, None),
]


@pytest.mark.proof
@pytest.mark.parametrize(("read", "value", "spec"), READ)
def test_a_field_gives_its_grammar(read: Any, value: Any, spec: GrammarSpec | None) -> None:
    assert read(value) == spec


@pytest.mark.parametrize(
    ("read", "value", "named"),
    [
        (from_response_format, {"type": "xml"}, "response_format.type"),
        (from_response_format, {}, "response_format.type"),
        *(
            (from_response_format, {"type": "json_schema", "json_schema": given}, "response_format.json_schema.schema")
            for given in ({"name": "x"}, {"schema": [1]})
        ),
        (from_text_format, {"type": "json_schema", "name": "x"}, "text.format.schema"),
        (from_guided_fields, {"guided_json": "{"}, "guided_json"),
        (from_guided_fields, {"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        (from_guided_fields, {"guided_choice": []}, "guided_choice"),
        (from_guided_fields, {"guided_choice": ["a", 1]}, "guided_choice"),
        (from_guided_fields, {"guided_regex": "x" * (MAX_SOURCE_BYTES + 1)}, "guided_regex"),
        (from_structured_outputs, {"structural_tag": "{}"}, "structured_outputs.structural_tag"),
        (from_structured_outputs, {"json": SCHEMA, "disable_any_whitespace": True}, "disable_any_whitespace"),
        (from_guided_fields, {"guided_regex": "\ud800"}, "guided_regex"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_name_of_its_field(read: Any, value: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        read(value)


@pytest.mark.proof
def test_only_one_field_may_have_a_grammar() -> None:
    assert choose_grammar({"response_format": None, "guided_json": SPEC}) == SPEC
    with pytest.raises(InvalidRequest, match="response_format, guided_json"):
        choose_grammar({"response_format": SPEC, "guided_json": SPEC})


def test_a_grammar_on_the_wire_keeps_the_order_of_its_names_and_has_a_source_unless_it_is_json() -> None:
    assert decode_message(GrammarSpec, SPEC.encode()) == SPEC
    assert SPEC.digest == SPEC.model_copy(update={"engine": "llguidance 1.9.1"}).digest
    for wrong in ({"kind": "regex"}, {"kind": "json_object", "source": "{}"}):
        with pytest.raises(ValidationError):
            GrammarSpec.model_validate(wrong)
