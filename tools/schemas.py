"""`python -m tools.schemas FOLDER`: the JSON Schema of each message, one file each, from the message models. They are
published in docs/schemas. With `--version FILE` instead one file with all of these schemas and sample messages, which
is kept of the last version (tests/last_version.json): a test reads its messages with the code of today, and the other
way round.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock import names
from penstock.messages import VERSION
from tools import asyncapi

Json = dict[str, Any]
DEAD_LETTER = "DeadLetterHeaders"
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def make_schemas() -> dict[str, Json]:
    """Return the schema of each message by its name, and that of the headers of dead letters, whose values are requests
    and jobs as they came.
    """
    parts = asyncapi.make_schemas("#/$defs/{model}")
    headers = parts.pop("Headers")["properties"]
    found = {}
    for model in asyncapi.MODELS:
        name = model.__name__
        used = sorted({*_list_parts(parts, name)} - {name})
        found[name] = {"$schema": _DRAFT, **parts[name]} | (
            {"$defs": {one: parts[one] for one in used}} if used else {}
        )
    found[DEAD_LETTER] = {
        "$schema": _DRAFT,
        "title": DEAD_LETTER,
        "type": "object",
        "properties": headers,
        "required": [names.ORIGIN_HEADER, names.REASON_HEADER, names.BURIED_HEADER],
    }
    return found


def _list_parts(parts: Mapping[str, Json], name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the names of the parts that a part is made of, and its own."""
    if name not in seen:
        yield name
        for ref in _list_refs(parts[name]):
            yield from _list_parts(parts, ref.removeprefix("#/$defs/"), seen | {name})


def _list_refs(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from ([schema["$ref"]] if "$ref" in schema else [])
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _list_refs(part)


def make_file_name(name: str) -> str:
    """Return the name of a message's file: `token_event.json` of `TokenEvent`."""
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_") + ".json"


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def main(arguments: list[str]) -> None:
    """Write the files."""
    if arguments[0] == "--version":
        version = {"v": VERSION, "schemas": make_schemas(), "samples": asyncapi.make_examples()}
        _write(Path(arguments[1]), version)
        return
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in make_schemas().items():
        _write(folder / make_file_name(name), schema)


if __name__ == "__main__":
    main(sys.argv[1:])
