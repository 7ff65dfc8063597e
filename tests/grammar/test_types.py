"""The types that people write in pydantic and Zod: which are refused, and that answers in the others are valid."""

import base64
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from penstock.errors import UnsupportedSchema
from penstock.grammar.engine import CompiledGrammar
from penstock.grammar.pattern import translate_pattern
from sim.schemas import find_violation, load_type_schemas
from tests.draws import draw_cases, mark_some
from tests.grammar.sampling import accepts_text, compile_schema, draw_answer

MAX_REFUSED_SHARE = 0.05
REFUSED = {
    # No grammar remembers the items so far, unless their values are listed.
    "pydantic": dict.fromkeys(
        (
            "set", "typing.Set[int]", "frozenset", "typing.FrozenSet[int]",
            "pydantic.conset(int, min_length=1, max_length=4)",
            "pydantic.confrozenset(int, min_length=1, max_length=4)",
        ),
        "uniqueItems",
    ),
    # Nothing matches the first. The second is anything that is no text. A token must be signed, and the last one's
    # function is not in its schema.
    "zod": {
        "z.never()": "not",
        "z.xor([z.string(), z.any()])": "oneOf",
        **dict.fromkeys(("z.jwt()", "z.jwt({ alg: 'HS256' })"), "format"),
        "z.stringFormat('cool-id', val => val.startsWith('cool-'))": "format",
    },
}  # fmt: skip


def compile_types(library: str) -> tuple[dict[str, CompiledGrammar], dict[str, UnsupportedSchema]]:
    compiled, refused = dict[str, CompiledGrammar](), dict[str, UnsupportedSchema]()
    for name, schema in load_type_schemas(library).items():
        try:
            compiled[name] = compile_schema(schema)
        except UnsupportedSchema as error:
            refused[name] = error
    return compiled, refused


@pytest.mark.parametrize("library", mark_some(REFUSED, pytest.mark.proof))
def test_the_types_that_are_refused_are_few_and_known(library: str) -> None:
    compiled, refused = compile_types(library)
    assert {name: error.keyword for name, error in refused.items()} == REFUSED[library]
    assert all(error.path.startswith("#/") and ": " in error.reason for error in refused.values())
    assert len(refused) <= MAX_REFUSED_SHARE * (len(compiled) + len(refused))


@pytest.mark.parametrize("library", REFUSED)
def test_answers_in_types_are_valid(library: str) -> None:
    ended = 0
    schemas = load_type_schemas(library)
    for name, grammar in compile_types(library)[0].items():
        for seed in range(4):
            answer = draw_answer(grammar, seed, 120)
            if answer.is_ended:
                ended += 1
                assert find_violation(schemas[name], answer.text) is None, (name, answer.text)
    assert ended > len(schemas)


def is_valid(check: Callable[[str], object], text: str) -> bool:
    try:
        return check(text) is not False
    except ValueError:
        return False


def is_uuid_of(version: int) -> Callable[[str], bool]:
    return lambda text: uuid.UUID(text).version == version


FORMATS: dict[str, tuple[Callable[[str], object], list[str], list[str]]] = {
    "uuid": (uuid.UUID, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uuid4": (is_uuid_of(4), ["123e4567-e89b-42d3-a456-426614174000"],
              ["123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-42d3-c456-426614174000"]),
    "uuid7": (is_uuid_of(7), ["123e4567-e89b-72d3-a456-426614174000"], ["123e4567-e89b-42d3-a456-426614174000"]),
    "base64": (lambda text: base64.b64decode(text, validate=True), ["", "YQ==", "YWI=", "YWJj", "+/+/"],
               ["YQ", "a b="]),
    "base64url": (lambda text: base64.b64decode(text, b"-_", validate=True), ["YQ==", "-_-_"], ["YQ", "+/+/"]),
    "fraction": (Fraction, ["1", "-3/4", "1/010"], ["1/0", "", "1/00", "a"]),
    "ipv4interface": (ipaddress.IPv4Interface, ["10.0.0.1/8", "1.2.3.4"], ["1.2.3.4/33", "1.2.3"]),
    "ipv4network": (
        ipaddress.IPv4Network,
        ["10.0.0.0/8", "192.168.4.0/22", "1.2.3.4", "0.0.0.0/0", "1.2.3.4/32", "128.0.0.0/1"],
        ["10.0.0.1/8", "192.168.1.0/22", "1.2.3.4/31x", "1.2.3.5/31"],
    ),
    "ipv6interface": (ipaddress.IPv6Interface, ["::1/64", "1:2:3:4:5:6:7:8", "1::8"], ["::1/129", "1:2", "1::2::3"]),
    "ipv6network": (
        ipaddress.IPv6Network, ["2001:db8::/32", "::/0", "1::/16", "1:2:3::/64", "::1", "::1/128"],
        ["2001:db8::/31", "::1/64", "1:2:3::/47"],
    ),
    "ipvanyaddress": (ipaddress.ip_address, ["1.2.3.4", "::", "1:2:3:4:5:6:7::"], ["1:2:3:4:5:6:7:8:9", "256.1.1.1"]),
    "ipvanyinterface": (ipaddress.ip_interface, ["1.2.3.4/8", "::/3"], ["::/129"]),
    "ipvanynetwork": (ipaddress.ip_network, ["1.0.0.0/8", "1::/16"], ["1.2.3.4/8"]),
    "regex": (
        re.compile,
        ["^a+b*?$", "[a-zA-Z0-9_]{2,5}", "(?:ab|cd?)*", "\\d+\\.\\d{2}", "a|b", "[^0-9]", "a{3,}", "a{2,12}", ""],
        ["a**", "(a", "a)", "[z-a]", "*a", "a{5,2}", "(?<=a)b", "\\", "(?i)a", "\\1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", mark_some(draw_cases(FORMATS, 5), pytest.mark.proof))
def test_a_format_allows_what_another_reader_takes(name: str) -> None:
    check, good, bad = FORMATS[name]
    grammar = compile_schema({"type": "string", "format": name})
    for text in good:
        assert accepts_text(grammar, json.dumps(text)), text
        assert is_valid(check, text)
    assert not any(accepts_text(grammar, json.dumps(text)) for text in bad)
    drawn = [json.loads(one.text) for seed in range(60) if (one := draw_answer(grammar, seed, 120)).is_ended]
    assert drawn
    assert [text for text in drawn if not is_valid(check, text)] == []


ENFORCED: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "string": [
        ({"format": "path"}, ['"a/b"', '""'], ["1"]),
        ({"format": "nanoid", "pattern": "^[a-z]{3}$"}, ['"abc"'], ['"ab"']),
        ({"format": "starts_with", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}]}, ['"az"'], ['"ab"', '"bz"']),
        ({"format": "base64url", "pattern": "^[A-Za-z0-9_-]{2}$"}, ['"YQ"'], ['"YQ=="']),
        ({"pattern": "^(?=.{2,3}$)(?=a)[a-c|)(]+$"}, ['"ab"', '"a|)"'], ['"a"', '"abca"', '"ba"', '"ad"']),
        ({"pattern": "^\\p{Lu}\\P{L}[\\p{Nd}][^\\p{L}]$"}, ['"A-1-"'], ['"Aa1-"', '"A-1a"', '"a-1-"']),
        ({"pattern": "^[\\s\\S]{2}$"}, ['"a\\n"', '"é日"'], ['"a"', '"abc"']),
    ],
    "object": [
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
         ["{}", '{"a": 1}', '{"a": 1, "b": 2}'], ['{"c": 1}', '{"a": "x"}']),
        ({"propertyNames": {"const": "a"}, "required": ["a"]}, ['{"a": []}'], ["{}", '{"b": 1}']),
        ({"propertyNames": {"$ref": "#/$defs/Key"}, "$defs": {"Key": {"enum": ["a", 2]}}},
         ['{"a": null}'], ['{"2": null}', '{"b": null}']),
        ({"propertyNames": {"anyOf": [{"enum": ["a"]}, {"const": "b"}, {"not": {}}]}}, ['{"b": 1}'], ['{"c": 1}']),
        ({"properties": {"a": {"type": "null"}, "c": {}}, "propertyNames": {"enum": ["a", "b"]}},
         ['{"a": null, "b": 1}'], ['{"a": 1}', '{"c": 1}']),
        ({"allOf": [{"properties": {"a": {"type": "null"}}}], "propertyNames": {"enum": ["a", "b"]}},
         ['{"a": null, "b": 1}'], ['{"a": 1}', '{"c": 1}']),
        ({"propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}},
         ['{"abc": 1}'], ['{"abd": 1}', '{"a": "x"}']),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab": 1}'], ['{"a": 1}', '{"abcd": 1}']),
        ({"propertyNames": {"format": "date"}}, ['{"2024-02-29": 1}'], ['{"2023-02-29": 1}', '{"a": 1}']),
        ({"propertyNames": False}, ["{}"], ['{"a": 1}']),
    ],
    "array": [
        ({"items": {"enum": ["a", "b", "c"]}}, ["[]", '["b"]', '["c", "a"]', '["b", "c", "a"]'],
         ['["a", "a"]', '["a", "b", "a"]', '["a", "b", "c", "a"]', '["d"]']),
        ({"items": {"enum": ["a", "b", "c"]}, "minItems": 2, "maxItems": 2}, ['["c", "a"]'], ['["a"]', '["a", "a"]']),
        ({"items": {"enum": list(range(11))}, "maxItems": 2}, ["[10, 3]"], ["[3, 3]", "[1, 2, 3]"]),
        ({"items": {"type": ["boolean", "null"]}}, ["[null, true, false]"], ["[true, true]"]),
        ({"items": {"enum": [1, 1.0, "1", [1], [1.0]]}}, ['[[1], "1", 1]'], ["[1, 1]", "[1, 1.0]", "[[1], [1.0]]"]),
        ({"items": {"enum": [0, -0.0]}}, ["[0]"], ["[0, -0]", "[0, 0.0]", "[-0, 0]"]),
        ({"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"enum": ["x", "y"]}}}, ['["y", "x"]'], ['["y", "y"]']),
        ({"items": {"type": "string"}, "maxItems": 1}, ['["any"]', "[]"], ['["a", "b"]']),
    ],
    "": [({"items": {"enum": ["a", "b"]}}, ["7", '["b", "a"]'], ['["b", "b"]'])],
}  # fmt: skip
"""By type, with what is allowed and refused: what stands beside a format, names of properties, and unique items."""


@pytest.mark.parametrize(
    ("type_", "schema", "allowed", "refused"),
    [(type_, *case) for type_, cases in ENFORCED.items() for case in cases],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_what_stands_beside_a_type_is_enforced(
    type_: str, schema: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    unique = {} if type_ in ("string", "object") else {"uniqueItems": True}
    grammar = compile_schema({**({"type": type_} if type_ else {}), **unique, **schema})
    assert [text for text in allowed if not accepts_text(grammar, text)] == []
    assert [text for text in refused if accepts_text(grammar, text)] == []


DURATION = "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$"
EMAIL = "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$"
DECIMAL = "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"


@pytest.mark.parametrize(
    ("pattern", "letters", "longest"), [(DURATION, "P1WYMDTHS.", 5), (EMAIL, "a.'@-", 7), (DECIMAL, "+-.01", 6)]
)
def test_known_expressions_mean_what_they_meant(pattern: str, letters: str, longest: int) -> None:
    known = translate_pattern(pattern)
    python = re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: re.escape(chr(int(found[1], 16))), known))
    for length in range(longest + 1):
        for one in product(letters, repeat=length):
            text = "".join(one)
            assert bool(python.search(text)) == bool(re.search(pattern, text)), text
