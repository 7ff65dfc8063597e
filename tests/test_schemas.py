"""The published schemas of all messages, and that this version and the last one read each other's messages."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from penstock.client import Client
from penstock.messages import EndEvent, TokenEvent, Wire, decode_message
from penstock.names import Pipeline
from penstock.testing.pipeline import TestPipeline
from sim.waiting import wait_for
from tools import asyncapi, schemas

ROOT = Path(__file__).parents[1]
Json = dict[str, Any]
LAST: Json = json.loads((ROOT / "tests" / "last_version.json").read_text("utf-8"))
"""What `python -m tools.schemas --version` wrote of the last version."""
OLD: dict[str, Json] = LAST["schemas"]
NEW = schemas.make_schemas()
NAMES = sorted(OLD)
MODELS: dict[str, type[Wire]] = {model.__name__: model for model in asyncapi.MODELS}
SAMPLES = [
    pytest.param(name, sample, id=f"{name}-{about}")
    for name, samples in LAST["samples"].items()
    for about, sample in samples.items()
]
LIMITS = {"maximum": -1, "exclusiveMaximum": -1, "maxLength": -1, "maxItems": -1, "minimum": 1, "exclusiveMinimum": 1}
LIMITS |= {"minLength": 1, "minItems": 1, "maxProperties": -1}
"""Keywords with a number, and whether a reader that asks for more (1) or for less (-1) of it refuses messages."""


def resolve(root: Json, schema: Json) -> Json:
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    return schema


def find_narrowed(here: Json, there: Json, place: str) -> Iterator[str]:
    """Yield in what a value that is read `here` may be less than one that is written `there`."""
    if here and here.get("type") != there.get("type"):
        yield f"{place}: type {there.get('type')}"
    values, known = [set(one.get("enum", [one["const"]] if "const" in one else [])) for one in (there, here)]
    if known and not (values and values <= known):
        yield f"{place}: values {sorted(map(str, values - known))}"
    if here.get("pattern") not in (None, there.get("pattern")):
        yield f"{place}: pattern"
    for name, sign in LIMITS.items():
        if name in here and (name not in there or sign * here[name] > sign * there[name]):
            yield f"{place}: {name}"


def find_breaks(reader: Json, writer: Json, *, is_reader_newer: bool) -> Iterator[str]:
    """Yield the places where a writer's messages may be refused by a reader. What only a newer writer has is not one if
    it may be left out: messages have it where somebody asked for it.
    """

    def compare(here: Json, there: Json, place: str, seen: frozenset[tuple[int, int]]) -> Iterator[str]:
        """Compare what is read `here` with what is written `there`, in each of the ways in which it may be."""
        here, there = resolve(reader, here), resolve(writer, there)
        if (pair := (id(here), id(there))) in seen:
            return
        ways = [resolve(reader, one) for one in here.get("anyOf", [here])]
        for one in there.get("anyOf", [there]):
            found = [list(compare_one(way, resolve(writer, one), place, seen | {pair})) for way in ways]
            yield from [min(found, key=len)[0]] if all(found) else []

    def compare_one(here: Json, there: Json, place: str, seen: frozenset[tuple[int, int]]) -> Iterator[str]:
        yield from find_narrowed(here, there, place)
        fields, others = here.get("properties", {}), there.get("properties", {})
        required = set(there.get("required", []))
        yield from [f"{place}.{name}: required" for name in {*here.get("required", [])} - required]
        for name in others:
            if name in fields:
                yield from compare(fields[name], others[name], f"{place}.{name}", seen)
            elif here.get("additionalProperties") is False and (is_reader_newer or name in required):
                yield f"{place}.{name}: unknown"
        parts = [name for name in ("items", "additionalProperties") if isinstance(here.get(name), dict)]
        for name in parts:
            yield from compare(here[name], there.get(name) or {}, f"{place}[]", seen)

    yield from compare(reader, writer, "", frozenset())


def validate_message(schema: Json, message: Json) -> None:
    jsonschema.Draft202012Validator(schema).validate(message)


@pytest.mark.parametrize("name", sorted(NEW))
def test_a_published_schema_is_that_of_the_code(name: str) -> None:
    path = ROOT / "docs" / "schemas" / schemas.make_file_name(name)
    assert json.loads(path.read_text("utf-8")) == NEW[name], "run: python -m tools.schemas docs/schemas"
    jsonschema.Draft202012Validator.check_schema(NEW[name])


@pytest.mark.parametrize("name", NAMES)
def test_each_version_reads_what_the_other_may_write(name: str) -> None:
    assert list(find_breaks(NEW[name], OLD[name], is_reader_newer=True)) == []
    assert list(find_breaks(OLD[name], NEW[name], is_reader_newer=False)) == []


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_a_message_of_the_last_version_is_read_and_written_as_that_reads_it(name: str, sample: Json) -> None:
    validate_message(OLD[name], sample)
    validate_message(NEW[name], sample)
    again = json.loads(decode_message(MODELS[name], json.dumps(sample).encode()).encode())
    validate_message(OLD[name], again)
    validate_message(NEW[name], again)


def test_what_workers_make_of_a_request_of_the_last_version_is_read_by_it() -> None:
    """Results, and the events of a stream."""
    with TestPipeline(lambda _: "And it was so.") as made, made.client() as client:
        events = answer(client, "r-1")
        wait_for(lambda: bool(made.bus.read_all(Pipeline("test").results_topic)), "the result is there")
        results = made.bus.read_all(Pipeline("test").results_topic)
    assert results
    for result in results:
        validate_message(OLD["Result"], json.loads(result.value))
    for event in events:
        validate_message(OLD[type(event).__name__], json.loads(event.encode()))
    assert [type(event) for event in events[-2:]] == [TokenEvent, EndEvent]


def answer(client: Client, request_id: str) -> list[TokenEvent | EndEvent]:
    sample = LAST["samples"]["Request"]["prompt"]
    client.submit(sample["prompt"], id=request_id)
    return list(client.stream(request_id))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("Request", {"required": ["v", "id", "tenant"]}, ".tenant: required"),
        ("Result", {"required": ["v", "id"]}, ".finish_reason: required"),
        ("TokenEvent", {"properties": {"id": {"type": "integer"}}}, ".id: type"),
        ("Request", {"properties": {"id": {"type": "string", "pattern": "^x"}}}, ".id: pattern"),
    ],
)
def test_a_planted_change_is_told(name: str, change: Json, told: str) -> None:
    """Of what is required, whether a version reads or writes it, and of what a field may be."""
    changed = copy.deepcopy(NEW[name])
    changed["properties"] |= change.get("properties", {})
    changed["required"] = change.get("required", changed["required"])
    found = [*find_breaks(changed, OLD[name], is_reader_newer=True)]
    found += find_breaks(OLD[name], changed, is_reader_newer=False)
    assert any(one.startswith(told) for one in found)


def test_a_planted_field_that_is_always_written_is_told() -> None:
    changed = copy.deepcopy(NEW["Job"])
    changed["properties"]["colour"] = {"type": "string"}
    assert not list(find_breaks(OLD["Job"], changed, is_reader_newer=False)), "it may be left out"
    changed["required"].append("colour")
    assert list(find_breaks(OLD["Job"], changed, is_reader_newer=False)) == [".colour: unknown"]
