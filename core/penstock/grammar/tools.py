"""Calls of tools that follow a grammar: which tool, its arguments, how many calls, and whether there must be one.

    reasoning? call (call …)             where there must be a call
    reasoning? (call (call …) | JSON)    where the model may call, and else its answer follows a schema
    reasoning? text? (call text? …)      where the model may call, or not

A call is written as the model's response template reads it: JSON with `name` and `arguments` between two marks. Marks
are tokens, so that text cannot end a call. Only such templates can be held to a grammar.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from penstock.errors import InvalidRequest
from penstock.grammar.spec import make_spec
from penstock.messages import GrammarSpec

_PLAIN_CALL = {"type": "function", "function": "{content}"}
"""The form in which a template writes a call of JSON with a name and arguments."""
_CANNOT_BE_HELD = (
    "the model writes calls in a form that cannot be held to a grammar: send its tools without 'strict', a grammar of "
    "a custom tool, 'parallel_tool_calls', a form of the answer, and a 'tool_choice' other than 'auto' and 'none'"
)
TOOLS_PATH = "#/tools/"
"""With which the path of a keyword in a tool's schema begins."""
MARK = "\ufdd0"
"""Begins each mark in the text of an endpoint's answer. Unicode has it for such use: it is no character of any text."""
THINK_OPEN, THINK_CLOSE = f"{MARK}<think>", f"{MARK}</think>"
CALL_OPEN, CALL_CLOSE = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
ENDPOINT_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": f"{MARK}<assistant>",
    "fields": {
        "reasoning_content": {
            "open": THINK_OPEN, "close": THINK_CLOSE, "content": "text", "repeats": True, "join": "",
        },
        "tool_calls": {
            "open": CALL_OPEN, "close": CALL_CLOSE, "content": "json", "repeats": True, "transform": _PLAIN_CALL,
        },
        "content": {"content": "text", "repeats": True, "join": ""},
    },
}  # fmt: skip
"""The response template of all models that endpoints serve: the form in which their workers write calls and reasoning.
Gateways know an endpoint's model by it."""
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class ConstrainedTool:
    """A tool; its arguments follow a JSON schema, or are any object."""

    name: str
    parameters: dict[str, Any] | None
    is_loose: bool = False
    """Whether the gateway may leave out keywords of the schema that no grammar can enforce, before it sends it."""


@dataclass(frozen=True)
class ConstrainedCalls:
    """The tool calls that an answer may have."""

    open: str
    close: str
    think_open: str
    """The marks of reasoning; empty where the model has none."""
    think_close: str
    tools: tuple[ConstrainedTool, ...]
    is_required: bool
    """Whether there is at least one call, and no text."""
    is_parallel: bool
    """Whether there may be several calls."""
    is_thinking: bool = False
    """Whether the prompt has opened the reasoning."""
    answer: dict[str, Any] | None = None
    """The JSON schema of an answer without calls; None: it is text."""

    @classmethod
    def decode(cls, source: str) -> Self:
        """Read the source of a grammar of kind `tools`. Raises `InvalidRequest`."""
        try:
            fields = json.loads(source)
            tools = tuple(ConstrainedTool(**tool) for tool in fields.pop("tools"))
            return cls(tools=tools, **fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise InvalidRequest("the grammar of tools cannot be read") from None

    @property
    def loose_names(self) -> frozenset[str]:
        """The names of the tools with schemas of which something may be left out."""
        return frozenset(tool.name for tool in self.tools if tool.is_loose)

    def free_tools(self, names: Collection[str]) -> Self:
        """Return the same calls with any object as the arguments of the tools with these names."""
        tools = [replace(tool, parameters=None) if tool.name in names else tool for tool in self.tools]
        return replace(self, tools=tuple(tools))

    def make_spec(self) -> GrammarSpec:
        """Return the grammar, without the schemas that may be loosened if it is too large. Raises `InvalidRequest`."""
        try:
            return self._make_whole_spec()
        except InvalidRequest:
            free = self.free_tools(self.loose_names)
            if free == self:
                raise
            return free.make_spec()

    def _make_whole_spec(self) -> GrammarSpec:
        fields = asdict(self)
        fields["tools"] = [{"name": tool.name, "parameters": tool.parameters} for tool in self.tools]
        if self.answer is None:
            del fields["answer"]  # a worker of an earlier version does not know it
        source = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
        return make_spec("tools", source, "tools")


def constrain_calls(
    template: Mapping[str, Any],
    tools: Sequence[ConstrainedTool],
    *,
    is_required: bool,
    is_parallel: bool,
    answer: dict[str, Any] | None = None,
) -> ConstrainedCalls:
    """Return what the calls of answers may be, by a response template. Where the model need not call, its answer
    follows the schema `answer`, if there is one.

    Raises `InvalidRequest` for a template whose calls have another form, and for two tools of one name.
    """
    fields = template.get("fields", {})
    calls = fields.get("tool_calls", {})
    marks = _read_marks(calls)
    if marks is None or calls.get("content") != "json" or calls.get("content_args"):
        raise InvalidRequest(_CANNOT_BE_HELD)
    if calls.get("transform") != _PLAIN_CALL or calls.get("transform_each"):
        raise InvalidRequest(_CANNOT_BE_HELD)
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidRequest("two tools have the same name")
    thoughts = [found for name in _REASONING_FIELDS if (found := _read_marks(fields.get(name, {}))) is not None]
    think_open, think_close = thoughts[0] if thoughts else ("", "")
    return ConstrainedCalls(
        *marks,
        think_open,
        think_close,
        tuple(tools),
        is_required=is_required,
        is_parallel=is_parallel,
        answer=None if is_required else answer,
    )


def leave_schemas(calls: ConstrainedCalls, num_offered: int) -> ConstrainedCalls | None:
    """Return what is left of a constraint for an endpoint, which has the schemas with the offered tools; None where
    nothing is.
    """
    is_free = not calls.is_required and calls.is_parallel and calls.answer is None and len(calls.tools) == num_offered
    return None if is_free else calls.free_tools({one.name for one in calls.tools})


def begin_in_answer(spec: GrammarSpec, start: str) -> GrammarSpec:
    """Return a grammar of tools for answers whose first part, `start`, the prompt has already. Others stay."""
    if spec.kind != "tools":
        return spec
    calls = ConstrainedCalls.decode(spec.source)
    is_thinking = bool(calls.think_open) and calls.think_open in start and calls.think_close not in start
    return replace(calls, is_thinking=is_thinking).make_spec()


def write_lark(calls: ConstrainedCalls, schemas: Sequence[Mapping[str, Any]], *, has_marks: bool) -> str:
    """Return the engine's form; `schemas` are those of the tools' arguments, and the answer's if there is one.

    They are prepared, and have the engine's options.

    Without `has_marks` the tokenizer is one of bytes, and marks are text: good enough to check a grammar.
    """

    def write_mark(mark: str) -> str:
        return mark if has_marks else json.dumps(mark)

    def write_text_without(mark: str) -> str:
        pattern = re.escape(mark).replace("/", r"\/")
        return f"/(?s:.+)/ & ~/(?s:.*){pattern}(?s:.*)/"

    thought = (
        f"{'' if calls.is_thinking else write_mark(calls.think_open)} THOUGHT? {write_mark(calls.think_close)} WS?"
    )
    if not calls.think_open:
        thought = ""
    optional_thought = thought and (thought if calls.is_thinking else f"({thought})?")
    many = "(WS? call)* WS?" if calls.is_parallel else "WS?"
    held = f"WS? call {many}"
    free = "TEXT? (call TEXT?)*" if calls.is_parallel else "TEXT? (call WS?)?"
    if calls.answer is not None:
        free = f"({held} | WS? answer)"
    lines = [
        f"start: {optional_thought} " + (held if calls.is_required else free),
        f"call: {write_mark(calls.open)} WS? body WS? {write_mark(calls.close)}",
        'body: "{" WS? "\\"name\\"" WS? ":" WS? chosen WS? "}"',
        "chosen: " + " | ".join(f"chosen{number}" for number in range(len(calls.tools))),
        "WS: /[ \\n]{1,2}/",
        f"TEXT: {write_text_without(calls.open)}",
    ]
    if thought:
        lines.append(f"THOUGHT: {write_text_without(calls.think_close)}")
    if calls.answer is not None:
        *schemas, answer = schemas
        lines.append(f"answer: %json {json.dumps(answer)}")
    for number, (tool, schema) in enumerate(zip(calls.tools, schemas, strict=True)):
        name = json.dumps(json.dumps(tool.name))
        lines.append(f'chosen{number}: {name} WS? "," WS? "\\"arguments\\"" WS? ":" WS? arguments{number}')
        lines.append(f"arguments{number}: %json {json.dumps(schema)}")
    return "\n".join(lines)


def _read_marks(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the texts that open and close a template's field; None where they are patterns.

    Blanks before the opening mark, which a pattern may swallow, are no part of it.
    """
    begin, close = field.get("open"), field.get("close")
    pattern = str(field.get("open_pattern", "")).removeprefix(r"\s*")
    if begin is None and pattern and re.escape(pattern) == pattern:
        begin = pattern
    return (begin, close) if isinstance(begin, str) and isinstance(close, str) else None
