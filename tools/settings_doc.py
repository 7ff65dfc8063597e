"""`python -m tools.settings_doc [FILE]`: the page of all settings, from `penstock.config.settings`."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from penstock.config.settings import SETTINGS_CLASSES
from penstock.config.sources import Settings, list_names, list_secret_variables, variable_name

_HEAD = """\
# Settings

All settings are environment variables. Each program reads them once, when it starts; a `Client` reads, when it is made,
those that its caller does not give. A `PENSTOCK_` variable that is not on this page is an error that names the nearest
known one; a bad value is an error that names its variable. `penstock config show` prints all values with their sources,
without secrets; `penstock config check` lists every error.

Secrets, and addresses that may contain a password, can be in files instead. These variables name the files: {secrets}.

`PENSTOCK_CONFIG` names a TOML file with values for settings that are not in the environment. A name in it is the
variable's in lower case without `PENSTOCK_`, at the top or in a table of its first part (`[engine]`, `max_batch = 8`).

Written by `python -m tools.settings_doc docs/settings.md`.
"""
_LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def read_field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring under each field of a class, as one line."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return docs


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join(f"| {line} |" for line in (head, " | ".join("---" for _ in rows[0]), *body)) + "\n"


def describe_values(schema: Mapping[str, Any]) -> str:
    """Describe the values that a field takes, from its JSON schema."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = {"integer": "whole number", "string": "text"}.get(schema["type"], schema["type"])
    limits = [f"{sign} {schema[name]:g}" for name, sign in _LIMITS.items() if name in schema]
    return " ".join([kind, ", ".join(limits)]).rstrip()


def make_section(part: type[Settings]) -> str:
    """Return the section of one settings class: its description and its table."""
    docs, properties = read_field_docs(part), part.model_json_schema()["properties"]
    rows = [("Variable", "Default", "Values", "Meaning")]
    for name in list_names(part):
        schema = properties[name]
        default = f"`{schema['default']}`" if schema["default"] != "" else "empty"
        rows.append((f"`{variable_name(part, name)}`", default, describe_values(schema), docs[name]))
    title, _, text = " ".join((part.__doc__ or "").split()).partition(".")
    return f"## {title}\n\n" + (f"{text.strip()}\n\n" if text else "") + format_table(rows)


def make_page() -> str:
    """Return the whole page."""
    secrets = ", ".join(f"`{variable}_FILE`" for variable in list_secret_variables(SETTINGS_CLASSES))
    return "\n".join([_HEAD.replace("{secrets}", secrets), *(make_section(part) for part in SETTINGS_CLASSES)])


def write_text(text: str, arguments: Sequence[str]) -> None:
    """Write text to the file that the first argument names, or to standard output."""
    if arguments:
        Path(arguments[0]).write_text(text, "utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    write_text(make_page(), sys.argv[1:])
