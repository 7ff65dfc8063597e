"""Custom tools, whose calls have a text in place of arguments: for chats and responses.

To the model such a tool is a function with the one argument `input`. A grammar for the text is a `pattern` of that.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import StringConstraints, model_validator

from penstock.errors import InvalidRequest
from penstock.grammar.lark import write_lark_as_pattern
from penstock.ingest.openai.body import StrictModel

CUSTOM = "custom"
"""The type of these tools, and of their calls and choices."""
MAX_GRAMMAR_CHARS = 32_768
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
)
"""What is whole at the begin of a text in JSON: it ends before an escape that is not, and before the text's end."""


class PlainFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class TextGrammar(StrictModel):
    """What the text of a call must match."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
    """A regular expression; or a grammar in Lark's form whose rules do not need themselves, without `%ignore`."""

    @model_validator(mode="after")
    def _check(self) -> "TextGrammar":
        try:
            self.write_pattern()
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    def write_pattern(self) -> str:
        """Return the regular expression that it is. Raises `InvalidRequest`."""
        if self.syntax == "lark":
            return f"^{write_lark_as_pattern(self.definition)}$"
        whole = re.fullmatch(r"\^((?:\\.|[^\\])*)\$", self.definition, re.DOTALL)
        return f"^(?:{self.definition if whole is None else whole[1]})$"


def make_function(name: str, description: str | None, grammar: TextGrammar | None) -> dict[str, Any]:
    """Return the function that a custom tool is to the model; with a grammar it is strict."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        text |= {"description": f"As this {grammar.syntax}: {grammar.definition}", "pattern": grammar.write_pattern()}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return {"name": name, "description": description, "parameters": schema, "strict": grammar is not None or None}


def write_arguments(text: str) -> str:
    """Return the arguments of a call with this text, as the model sees it."""
    return json.dumps({"input": text}, ensure_ascii=False)


def list_custom_names(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the custom tools among a body's `tools`."""
    tools = options.get("tools") or ()
    return frozenset(tool.get(CUSTOM, tool)["name"] for tool in tools if tool["type"] == CUSTOM)


class TextReader:
    """Reads the text of one call out of its arguments, in whatever pieces they come."""

    def __init__(self) -> None:
        self._rest, self._has_begun = "", False

    def add_text(self, arguments: str, *, is_last: bool) -> str:
        """Return the text that a piece of the arguments adds. Arguments of another form are the text themselves."""
        self._rest += arguments
        if not self._has_begun:
            if (begin := _BEGIN.match(self._rest)) is None:
                return self._rest if is_last else ""
            self._rest, self._has_begun = self._rest[begin.end() :], True
        whole = _WHOLE.match(self._rest)
        assert whole is not None, "it may be empty"
        self._rest = self._rest[whole.end() :]
        return str(json.loads(f'"{whole.group()}"', strict=False))
