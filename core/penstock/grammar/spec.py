"""Builds a grammar from the fields of HTTP APIs."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.errors import InvalidRequest
from penstock.messages import MAX_SOURCE_BYTES, GrammarKind, GrammarSpec

ENGINE = "llguidance"


def make_schema_spec(schema: object, param: str) -> GrammarSpec:
    """Return the grammar of a JSON schema, given as an object or as JSON. Raises `InvalidRequest`."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{param} is not valid JSON") from None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{param} is not a JSON schema: it must be an object")
    try:
        source = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{param} is not valid JSON") from None
    return make_spec("json_schema", source, param)


def from_response_format(value: Mapping[str, Any] | None) -> GrammarSpec | None:
    """Return the grammar of a `response_format` of `/v1/chat/completions`; None where it asks for text."""
    inner = (value or {}).get("json_schema")
    fields = inner if isinstance(inner, Mapping) else {}
    return _from_format(value, "response_format", fields, "response_format.json_schema.schema")


def from_text_format(value: Mapping[str, Any] | None, param: str = "text.format") -> GrammarSpec | None:
    """Return the grammar of a format that has its schema beside its type; None where it asks for text."""
    return _from_format(value, param, value or {}, f"{param}.schema")


def from_structured_outputs(value: Mapping[str, Any] | None) -> GrammarSpec | None:
    """Return the grammar of vLLM's `structured_outputs`; None without one.

    Its options that are on are refused, because each would change what is allowed.
    """
    param = "structured_outputs"
    given = {name: one for name, one in (value or {}).items() if one is not None and one is not False}
    known = {"json", "regex", "choice", "grammar", "json_object"}
    if unknown := sorted(given.keys() - known):
        raise InvalidRequest(f"{param}.{unknown[0]} is not supported")
    return _from_one_field({f"{param}.{name}": (name, one) for name, one in given.items()})


def from_guided_fields(body: Mapping[str, Any]) -> GrammarSpec | None:
    """Return the grammar of vLLM's older fields `guided_json`, `_regex`, `_choice` and `_grammar`; None without."""
    names = ("json", "regex", "choice", "grammar")
    return _from_one_field(
        {f"guided_{name}": (name, body[f"guided_{name}"]) for name in names if body.get(f"guided_{name}") is not None}
    )


def choose_grammar(given: Mapping[str, GrammarSpec | None]) -> GrammarSpec | None:
    """Return the one grammar among those of several fields. Raises `InvalidRequest` if two fields have one."""
    found = {name: spec for name, spec in given.items() if spec is not None}
    if len(found) > 1:
        raise InvalidRequest(f"only one of {', '.join(found)} can be given")
    return next(iter(found.values()), None)


def _from_one_field(given: Mapping[str, tuple[str, Any]]) -> GrammarSpec | None:
    return choose_grammar({param: _from_field(name, value, param) for param, (name, value) in given.items()})


def _from_field(name: str, value: Any, param: str) -> GrammarSpec:
    match name:
        case "json":
            return make_schema_spec(value, param)
        case "json_object":
            return GrammarSpec(kind="json_object")
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
                raise InvalidRequest(f"{param} must be a list of texts")
            return make_spec("choice", json.dumps(value, ensure_ascii=False), param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a text")
    return make_spec("regex" if name == "regex" else "lark", value, param)


def make_spec(kind: GrammarKind, source: str, param: str) -> GrammarSpec:
    """Return a grammar. Raises `InvalidRequest` if it is too large."""
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} has a lone surrogate") from None
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{param} has {size:,} bytes; a grammar may have {MAX_SOURCE_BYTES:,}")
    return GrammarSpec(kind=kind, source=source)


def _from_format(
    value: Mapping[str, Any] | None, param: str, fields: Mapping[str, Any], schema_param: str
) -> GrammarSpec | None:
    """Return the grammar of a format whose schema, if its type is `json_schema`, is `fields["schema"]`."""
    match _get_type(value, param):
        case "text":
            return None
        case "json_object":
            return GrammarSpec(kind="json_object")
        case "json_schema":
            if "schema" not in fields:
                raise InvalidRequest(f"{schema_param} is missing")
            return make_schema_spec(fields["schema"], schema_param)
        case other:
            raise InvalidRequest(f"{param}.type {other!r} is not supported")


def _get_type(value: Mapping[str, Any] | None, param: str) -> str:
    if value is None:
        return "text"
    kind = value.get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{param}.type is missing")
    return kind
