"""The common parts of chats and responses: roles and texts of turns, tools, reasoning, and the parser of answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, StringConstraints

from penstock.grammar.tools import ConstrainedCalls, ConstrainedTool, constrain_calls
from penstock.ingest.openai.answer_parser import AnswerParser
from penstock.ingest.openai.body import Body, StrictModel, invalid_value
from penstock.ingest.openai.client_tools import CLIENT_TOOLS
from penstock.ingest.openai.custom_tools import CUSTOM, make_function
from penstock.ingest.openai.endpoint import StreamMeta

ROLES: Mapping[str, str] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
MAX_TOOLS = 128
NAMESPACE = "namespace"
"""The type of a group of functions among the tools of a response."""
NAMESPACE_END = "."
"""Between a namespace and a name in the name that the model sees: no name of a function has it."""
ANY_OBJECT = '{"type":"object"}'
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ToolName = Annotated[str, StringConstraints(pattern="^[A-Za-z0-9_-]{1,64}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
TemplateVariables = Annotated[dict[ToolName, Any], Field(max_length=64)]


class ToolFunction(StrictModel):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments. The model sees it."""
    strict: bool | None = None
    """Whether the arguments follow the schema token by token, and one that cannot be enforced is refused. Else they
    follow what can be enforced where the model must call, and are any object where it may."""


class FunctionKind(StrictModel):
    """A tool of the type function."""

    type: Literal["function"]


class FunctionName(StrictModel):
    """The name of a function."""

    name: ToolName


class NamedTool(FunctionKind):
    """The tool that is to be called."""

    function: FunctionName


ChoiceMode = Literal["none", "auto", "required"]


def _find_choice_tag(choice: Any) -> str | None:
    """Return which kind of `tool_choice` one is; None where it is none."""
    if isinstance(choice, str):
        return "tagged-mode" if choice in ("none", "auto", "required") else None
    kind = choice.get("type") if isinstance(choice, Mapping) else getattr(choice, "type", None)
    return f"tagged-{kind}" if kind in ("function", CUSTOM, "allowed_tools") else None


TOOL_CHOICE = Discriminator(
    _find_choice_tag,
    custom_error_type="unknown_choice",
    custom_error_message=(
        "it is 'none', 'auto', 'required', a tool by its name (type 'function' or 'custom'), or tools of which the "
        "model may call some (type 'allowed_tools')"
    ),
)
"""Tells the kinds of `tool_choice`: their tags are `tagged-mode`, `tagged-function`, `tagged-custom` and
`tagged-allowed_tools`."""


@dataclass(frozen=True)
class CallChoice:
    """Which calls a body allows or demands."""

    is_required: bool = False
    """Whether the model has to call."""
    names: Sequence[str] | None = None
    """The functions that it may call; None: all."""
    is_single: bool = False
    """Whether it calls at most once."""


def check_tool_options(names: Sequence[str], choice: CallChoice, variables: Mapping[str, Any] | None) -> None:
    """Raise `ValueError` for `tool_choice` and `chat_template_kwargs` that do not go with tools of these names."""
    if missing := next((name for name in choice.names or () if name not in names), None):
        raise ValueError(f"'tool_choice' names {missing!r}, which is not in 'tools'")
    if choice.is_required and not names:
        raise ValueError("'tool_choice' asks for a call, and there are no functions in 'tools'")
    if "tools" in (variables or {}):
        raise ValueError("'tools' are given beside 'chat_template_kwargs'")


def constrain_functions(
    template: Mapping[str, Any], functions: Sequence[ToolFunction], choice: CallChoice, body: Body
) -> ConstrainedCalls | None:
    """Return what holds a body's answers, which may call these functions; None where nothing does.

    Raises `InvalidRequest` if the model's calls cannot be held, and `ApiError` 400.
    """
    allowed = [function for function in functions if choice.names is None or function.name in choice.names]
    found = body.find_grammar()
    is_free = choice == CallChoice() and found is None and not any(function.strict for function in allowed)
    if not allowed or is_free:
        return None
    tools = [_constrain_tool(function, is_required=choice.is_required) for function in allowed]
    return constrain_calls(
        template,
        tools,
        is_required=choice.is_required,
        is_parallel=not choice.is_single,
        answer=None if found is None else json.loads(found[1].source or ANY_OBJECT),
    )


def _constrain_tool(function: ToolFunction, *, is_required: bool) -> ConstrainedTool:
    """Return what holds the calls of a function: its schema if it is strict, and as far as can be if it must be called.

    Where the model need not call, its arguments are any object: it knows best in which order to write them.
    """
    schema = function.parameters or NO_PARAMETERS
    if function.strict:
        return ConstrainedTool(function.name, schema)
    return ConstrainedTool(function.name, {**schema, "type": "object"} if is_required else None, is_loose=is_required)


def refuse_other_grammar_with_tools(body: Body, tools: Sequence[BaseModel]) -> None:
    """Raise `ApiError` 400 if an answer might call tools, and has a grammar that is no schema."""
    if tools and (found := body.find_grammar()) is not None and found[1].kind not in ("json_schema", "json_object"):
        what = "with tools an answer can only follow a JSON schema: give one, or no tools"
        raise invalid_value(found[0], what)


def make_template_variables(
    variables: Mapping[str, Any] | None, effort: ReasoningEffort | None, tools: Sequence[BaseModel]
) -> dict[str, Any]:
    """Return what the chat template is given beside the messages."""
    made = dict(variables or {})
    if effort not in (None, "none"):
        made["reasoning_effort"] = effort
    if tools:
        made["tools"] = [_describe_tool(tool.model_dump(exclude_none=True)) for tool in tools]
    return made


def _describe_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates have it; those of responses have the function's fields beside the type."""
    kind = tool.pop("type")
    return {"type": kind, "function": tool.get("function", tool)}


def qualify_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}{NAMESPACE_END}{name}"


def make_parser(meta: StreamMeta) -> AnswerParser | None:
    """Return the parser of an answer; None where all of it is content."""
    if meta.response_template is None:
        return None
    return AnswerParser(meta.response_template, _list_offered(meta.options), meta.calls)


def _list_offered(options: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tools that were offered to the model, those of a namespace under the names that it sees."""
    offered = list[Any]()
    for tool in () if options.get("tool_choice") == "none" else options.get("tools") or ():
        if tool.get("type") == NAMESPACE:
            offered += [member | {"name": qualify_name(member["name"], tool["name"])} for member in tool["tools"]]
        elif tool.get("type") == CUSTOM:
            function = make_function(tool.get(CUSTOM, tool)["name"], None, None)
            offered.append({"type": "function", "function": function})
        elif tool.get("type") in CLIENT_TOOLS:
            offered.append({"type": "function", "function": CLIENT_TOOLS[tool["type"]]})
        else:
            offered.append(tool)
    return offered


def make_call_id(name: str, number: int) -> str:
    """Return the id of a call: it follows from the request's id without its prefix, and the call's number."""
    return f"call_{name}_{number}"
