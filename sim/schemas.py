"""JSON schemas of many kinds, as those that people send, and an independent validator of their answers.

`make_schemas` makes schemas that must be enforced; `make_refused_schemas` those that must be refused, with the keyword
that has to be named. Both depend on their seed only. All texts, lists and objects are bounded and recursions have a way
out, so that answers of a model that chooses at random come to an end.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import jsonschema
import regex

Schema = dict[str, Any]
_TYPES = Path(__file__).parents[1] / "tests" / "grammar" / "types"
_WORDS = (
    "name", "id", "type", "status", "email", "address", "city", "items", "count", "price", "total", "active",
    "created", "tags", "kind", "value", "key", "path", "owner", "unit", "score", "level", "title", "text", "code",
    "date", "size", "color", "width", "height", "zip", "state", "lang", "role", "note", "rank",
)  # fmt: skip
_ODD_NAMES = ("naïve", "größe", "日本", "a/b", "a~b", "with space", 'with "quotes"', "$ref", "x\ny", "😀", "type", "")
_ODD_TEXTS = ("ok", "größer", "日本語", "😀", 'a "quote"', "back\\slash", "new\nline", "tab\t", "a/b", "", "null", "1")
_PATTERNS = (
    "^[a-z]{1,8}$",
    "^[A-Z]{2}-[0-9]{3}$",
    "^\\d{3}-\\d{4}$",
    "^(red|green|blue)$",
    "^#[0-9a-fA-F]{6}$",
    "^[^\\s@]{1,6}@[a-z]{1,6}\\.(com|org)$",
    "^\\+?[1-9]\\d{1,9}$",
    "^v?\\d{1,2}(\\.\\d{1,2}){0,2}$",
    "^[\\w.-]{1,10}$",
    '^"[a-z]{1,4}"$',
    "^\\u00e9[é-ü]{0,3}$",
    "^(?:a|b){2,6}c?$",
)
_FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "duration", "uri")
_ENDING_FORMATS = ("date", "ipv4", "ipv6", "uuid")
"""Those whose texts have a bounded length."""


@dataclass(frozen=True)
class RefusedSchema:
    """A schema that must be refused, and why."""

    schema: Schema
    keyword: str
    path: str
    """Where the keyword is, as a JSON pointer."""


def make_schemas(count: int, seed: int = 0) -> list[Schema]:
    """Return that many different schemas, of each kind about as many."""
    draw = random.Random(seed)
    kinds = itertools.cycle(_KINDS)
    found: dict[str, Schema] = {}
    while len(found) < count:
        schema = next(kinds)(draw)
        found.setdefault(json.dumps(schema), schema)
    return list(found.values())


def make_refused_schemas(count: int, seed: int = 0) -> list[RefusedSchema]:
    """Return that many schemas, each with one keyword that cannot be enforced somewhere inside."""
    draw = random.Random(seed)
    return [_hide_schema(draw, *_REFUSED[number % len(_REFUSED)]) for number in range(count)]


def load_type_schemas(library: str) -> dict[str, Schema]:
    """Return the schemas of all types of a library, `pydantic` or `zod`, by their names."""
    schemas = json.loads((_TYPES / f"{library}.json").read_text())["schemas"]
    return {name: schema for name, schema in schemas.items() if schema is not None}


def find_violation(schema: Schema, text: str) -> str | None:
    """Return what an independent validator says of an answer; None if it is valid. Numbers are exact decimals."""
    kind = jsonschema.Draft202012Validator
    if "draft-07" in schema.get("$schema", ""):
        kind = jsonschema.Draft7Validator
    # The package's own expressions know no properties of characters, `\\p{...}`.
    extended = jsonschema.validators.extend(kind, {"pattern": _check_pattern})
    validator = extended(json.loads(json.dumps(schema), parse_float=Decimal), format_checker=kind.FORMAT_CHECKER)
    try:
        answer = json.loads(text, parse_float=_read_number)
    except ValueError as error:
        return f"it is no JSON: {error}"
    return next((str(error) for error in validator.iter_errors(answer)), None)


def _read_number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of 20 digits
        return float(text)


def _check_pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and not regex.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _hide_schema(draw: random.Random, inner: Schema, keyword: str) -> RefusedSchema:
    """Put a schema that must be refused somewhere into others."""
    schema, path = inner, f"#/{keyword}"
    for _ in range(draw.randrange(4)):
        match draw.randrange(4):
            case 0:
                name = draw.choice(_WORDS)
                schema = {"type": "object", "properties": {"before": _draw_scalar(draw), name: schema}}
                path = f"#/properties/{name}{path[1:]}"
            case 1:
                schema, path = {"type": "array", "items": schema, "maxItems": 3}, f"#/items{path[1:]}"
            case 2:
                schema, path = {"anyOf": [{"type": "null"}, schema]}, f"#/anyOf/1{path[1:]}"
            case _:
                schema, path = {"allOf": [schema]}, f"#/allOf/0{path[1:]}"
    return RefusedSchema(schema, keyword, path)


def _draw_scalar(draw: random.Random) -> Schema:
    return draw.choice(
        [_make_text, _make_text, _make_integer, _make_number, _make_boolean, _make_enum, _make_const, _make_pattern]
    )(draw)


def _make_text(draw: random.Random) -> Schema:
    low = draw.randrange(4)
    schema: Schema = {"type": "string", "maxLength": low + draw.randrange(1, 12)}
    if low:
        schema["minLength"] = low
    return schema


def _make_integer(draw: random.Random) -> Schema:
    low = draw.choice([0, 1, -5, -1000, 10**6, draw.randrange(-50, 50)])
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + draw.choice([1, 9, 100, 12345])}
    if draw.random() < 0.2:
        schema["exclusiveMinimum"] = schema.pop("minimum") - 1
    if draw.random() < 0.2:
        schema["multipleOf"] = draw.choice([2, 3, 5])
        schema["maximum"] = low + 100
    return schema


def _make_number(draw: random.Random) -> Schema:
    low = draw.choice([0, -1, 0.5, -273.15, draw.randrange(-50, 50) / 4])
    schema: Schema = {"type": "number", "minimum": low, "maximum": low + draw.choice([0.5, 1, 99.75])}
    if draw.random() < 0.3:
        schema["multipleOf"] = draw.choice([0.25, 0.1, 0.01, 1])
        schema["minimum"], schema["maximum"] = -100, 100
    elif draw.random() < 0.3:
        schema["exclusiveMaximum"] = low + 2.0625
        del schema["maximum"]
    return schema


def _make_boolean(draw: random.Random) -> Schema:
    return {"type": "boolean"} if draw.random() < 0.7 else {"type": ["boolean", "null"]}


def _make_enum(draw: random.Random) -> Schema:
    values: list[Any] = draw.sample(_WORDS, draw.randrange(1, 8))
    if draw.random() < 0.4:
        values += draw.sample([*_ODD_TEXTS, 1, 2.5, -3, None, True, [1, "a"], {"a": 1}], 3)
    schema: Schema = {"enum": values}
    if all(isinstance(one, str) for one in values) and draw.random() < 0.5:
        schema["type"] = "string"
    return schema


def _make_const(draw: random.Random) -> Schema:
    return {"const": draw.choice([*_ODD_TEXTS, 0, -7, 1.5, 1e-7, None, False, [], [1, [2]], {"k": [None, "v"]}, 2**53])}


def _make_pattern(draw: random.Random) -> Schema:
    schema: Schema = {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if draw.random() < 0.2:
        schema = {"type": "string", "pattern": "^[a-zé]*$", "minLength": draw.randrange(3), "maxLength": 9}
    return schema


def _make_format(draw: random.Random) -> Schema:
    schema: Schema = {"type": "string", "format": draw.choice(_FORMATS if draw.random() < 0.3 else _ENDING_FORMATS)}
    if schema["format"] not in _ENDING_FORMATS:
        schema["maxLength"] = draw.randrange(40, 60)
    name = draw.choice(_WORDS)
    return {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}


def _make_flat_object(draw: random.Random) -> Schema:
    names = draw.sample(_WORDS, draw.randrange(1, 9))
    if draw.random() < 0.3:
        names += draw.sample(_ODD_NAMES, 2)
    properties: Schema = {name: _draw_scalar(draw) for name in names}
    if draw.random() < 0.3:
        for one in properties.values():
            one["description"] = "What this is about."
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if draw.random() < 0.8:
        schema["required"] = [name for name in names if draw.random() < 0.7]
    if draw.random() < 0.2:
        schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Thing"}
    return schema


def _make_nested_object(draw: random.Random) -> Schema:
    schema = _make_flat_object(draw)
    for depth in range(draw.randrange(1, 5)):
        inner: Schema = schema if depth % 2 else {"type": "array", "items": schema, "maxItems": draw.randrange(1, 3)}
        name = draw.choice(_WORDS)
        schema = {"type": "object", "properties": {name: inner, "n": _draw_scalar(draw)}, "additionalProperties": False}
        if draw.random() < 0.7:
            schema["required"] = [name]
    return schema


def _make_array(draw: random.Random) -> Schema:
    low = draw.randrange(3)
    items = draw.choice([_draw_scalar, _make_flat_object])(draw)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randrange(4)}


def _make_tuple(draw: random.Random) -> Schema:
    prefix = [_draw_scalar(draw) for _ in range(draw.randrange(1, 5))]
    old = draw.random() < 0.3
    schema: Schema = {"type": "array", "items" if old else "prefixItems": prefix}
    schema["additionalItems" if old else "items"] = draw.choice([False, _draw_scalar(draw)])
    schema["maxItems"] = len(prefix) + 2
    schema["minItems"] = draw.randrange(len(prefix) + 1)
    if old:
        schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    return schema


def _make_any_of(draw: random.Random) -> Schema:
    options = [draw.choice([_draw_scalar, _make_flat_object, _make_array])(draw) for _ in range(draw.randrange(2, 5))]
    return {"anyOf": options}


def _make_one_of(draw: random.Random) -> Schema:
    """Alternatives that exclude each other: by a constant behind a `$ref`, as pydantic writes them, or by type."""
    if draw.random() < 0.3:
        return {"oneOf": [_make_integer(draw), _make_text(draw), _make_boolean(draw) | {"type": "boolean"}]}
    kinds = draw.sample(_WORDS, draw.randrange(2, 5))
    defs: Schema = {}
    for kind in kinds:
        one = _make_flat_object(draw)
        mark = {"const": kind} if draw.random() < 0.5 else {"enum": [kind]}
        one["properties"] = {"kind": mark, **{k: v for k, v in one["properties"].items() if k != "kind"}}
        one["required"] = ["kind"]
        defs[kind.title()] = one
    refs = [{"$ref": f"#/$defs/{name}"} for name in defs]
    return {"oneOf": refs, "discriminator": {"propertyName": "kind"}, "$defs": defs}


def _make_all_of(draw: random.Random) -> Schema:
    parts = []
    for _ in range(draw.randrange(2, 4)):
        part = _make_flat_object(draw)
        del part["additionalProperties"]
        names = list(part["properties"])
        parts.append({**part, "required": draw.sample(names, draw.randrange(len(names) + 1))})
    # A name that two parts have with different types, and one of them requires, has no value: keep the first part's.
    seen: set[str] = set()
    for part in parts:
        part["properties"] = {name: one for name, one in part["properties"].items() if name not in seen}
        seen |= set(part["properties"])
    # Names that are not listed would have no end.
    allowed: Schema = dict.fromkeys(sorted(seen | {name for part in parts for name in part["required"]}), True)
    first = {name: {"type": ["integer", "string"], "maxLength": 9, "minimum": 0, "maximum": 99} for name in allowed}
    listed = {name: True if name in seen else first[name] for name in allowed}
    return {"allOf": parts, "properties": listed, "additionalProperties": False}


def _make_refs(draw: random.Random) -> Schema:
    names = draw.sample(_WORDS, 3)
    key = draw.choice(["$defs", "definitions"])
    defs: Schema = {name: _make_flat_object(draw) for name in names[:2]} | {names[2]: _draw_scalar(draw)}
    properties: Schema = {f"{name}_{i}": {"$ref": f"#/{key}/{name}"} for i, name in enumerate(names * 2)}
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False, key: defs}
    schema["required"] = draw.sample(list(properties), 3)
    return schema


def _make_recursion(draw: random.Random) -> Schema:
    if draw.random() < 0.5:
        value = _draw_scalar(draw)
        node: Schema = {
            "type": "object",
            "properties": {"value": value, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": "#/$defs/node", "$defs": {"node": node}}
    properties = {"name": _draw_scalar(draw), "children": {"type": "array", "maxItems": 1, "items": {"$ref": "#"}}}
    return {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}


def _make_map(draw: random.Random) -> Schema:
    """Objects whose names are not listed, bounded by their number; without `additionalProperties: false`."""
    schema: Schema = {"type": "object", "maxProperties": draw.randrange(1, 4)}
    match draw.randrange(3):
        case 0:
            schema["additionalProperties"] = _draw_scalar(draw)
        case 1:
            schema["patternProperties"] = {"^[a-z]{1,5}$": _draw_scalar(draw), "^[A-Z]{1,3}$": _draw_scalar(draw)}
            schema["additionalProperties"] = False
        case _:
            listed = {"a": _draw_scalar(draw), "id": _make_integer(draw)}
            schema |= {"properties": listed, "required": ["a", "id"], "maxProperties": 3}
            schema["additionalProperties"] = _draw_scalar(draw)
    if draw.random() < 0.3:
        schema["minProperties"] = 1
    return schema


_KINDS: tuple[Callable[[random.Random], Schema], ...] = (
    _make_flat_object,
    _make_nested_object,
    _make_array,
    _make_tuple,
    _make_any_of,
    _make_one_of,
    _make_all_of,
    _make_refs,
    _make_recursion,
    _make_map,
    _make_format,
    _make_flat_object,
    lambda draw: {"type": "object", "properties": {"x": _draw_scalar(draw)}, "additionalProperties": False},
)
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_REFUSED: tuple[tuple[Schema, str], ...] = (
    ({"not": {"type": "string"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"minimum": 1}}, "if"),
    ({"type": "array", "contains": {"type": "null"}}, "contains"),
    ({"type": "array", "uniqueItems": True, "items": _TEXT}, "uniqueItems"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 4, 5, 6]}}, "uniqueItems"),
    (_OBJECT | {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}}, "propertyNames"),
    (_OBJECT | {"propertyNames": {"pattern": "^a", "maxLength": 3}}, "propertyNames"),
    (_OBJECT | {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a$": {}}}, "propertyNames"),
    (_OBJECT | {"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    (_OBJECT | {"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    (_OBJECT | {"dependencies": {"a": ["b"]}}, "dependencies"),
    (_OBJECT | {"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
    ({"$ref": "https://example.com/schema.json"}, "$ref"),
    ({"$ref": "other.json#/a"}, "$ref"),
    ({"$ref": "#anchor"}, "$ref"),
    ({"$dynamicRef": "#node"}, "$dynamicRef"),
    (_TEXT | {"format": "iri"}, "format"),
    (_TEXT | {"format": "iri", "pattern": "^a"}, "format"),
    (_TEXT | {"format": "of-my-own"}, "format"),
    (_TEXT | {"pattern": "^(?!a)b"}, "pattern"),
    (_TEXT | {"pattern": "^(?=a)b|c"}, "pattern"),
    (_TEXT | {"pattern": "^(?=a){2}a"}, "pattern"),
    (_TEXT | {"pattern": "(a)\\1"}, "pattern"),
    (_TEXT | {"pattern": "a\\b"}, "pattern"),
    (_TEXT | {"pattern": "^(a{1000}){1000}$"}, "pattern"),
    (_TEXT | {"pattern": "(?i)a"}, "pattern"),
    ({"const": "nul\0"}, "const"),
    ({"enum": [1, 2**60 + 1]}, "enum"),
    ({"type": "integer", "maximum": 2**60 + 1}, "maximum"),
    ({"type": "integer", "multipleOf": 999_983}, "multipleOf"),
    ({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 1}]}, "oneOf"),
    ({"oneOf": [_OBJECT | {"required": ["a"]}, _OBJECT | {"required": ["b"]}]}, "oneOf"),
    (_OBJECT | {"minProperties": 3, "additionalProperties": {"type": "null"}}, "minProperties"),
    (_OBJECT | {"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "maxProperties"),
    (_OBJECT | {"patternProperties": {"a": {"type": "null"}, "b": {"type": "string"}}}, "patternProperties"),
    ({"type": "text"}, "type"),
    ({"type": "integer", "exclusiveMinimum": True, "minimum": 1}, "exclusiveMinimum"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.75}, "exclusiveMinimum"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
)
"""Schemas that must be refused, and the keyword to name."""
