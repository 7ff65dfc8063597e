"""What chats and responses have in common: roles and texts of turns, tools, reasoning, and the parser of answers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints

from penstock.grammar.tools import ConstrainedTool, constrain_calls
from penstock.ingest.openai.answer_parser import AnswerParser
from penstock.ingest.openai.body import Body, StrictModel, invalid_value, unsupported_value
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.messages import GrammarSpec

ROLES: Mapping[str, str] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip
MAX_TOOLS = 128
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
    """Whether the arguments follow the schema token by token; else they are any object."""


class FunctionKind(StrictModel):
    """That a tool is a function."""

    type: Literal["function"]


class FunctionName(StrictModel):
    """The name of a function."""

    name: ToolName


class NamedTool(FunctionKind):
    """The tool that is to be called."""

    function: FunctionName


def check_tool_options(
    names: Sequence[str], choice: object, named: str | None, variables: Mapping[str, Any] | None
) -> None:
    """Raise `ValueError` for `tool_choice` and `chat_template_kwargs` that do not go with tools of these names."""
    if choice == "required" and not names:
        raise ValueError("'tool_choice' asks for a call, and there are no 'tools'")
    if named is not None and named not in names:
        raise ValueError(f"'tool_choice' names {named!r}, which is not in 'tools'")
    if "tools" in (variables or {}):
        raise ValueError("'tools' are given beside 'chat_template_kwargs'")


def constrain_functions(
    template: Mapping[str, Any],
    functions: Sequence[ToolFunction],
    is_required: bool,
    named: str | None,
    is_parallel: bool | None,
) -> GrammarSpec | None:
    """Return the grammar of answers that may call these functions; None where nothing holds the model.

    With a name there is one call of that function. Raises `InvalidRequest` if the model's calls cannot be held.
    """
    if named is not None:
        functions = [function for function in functions if function.name == named]
    is_required = is_required or named is not None
    if not functions or not (is_required or is_parallel is False or any(function.strict for function in functions)):
        return None
    tools = [
        ConstrainedTool(function.name, (function.parameters or NO_PARAMETERS) if function.strict else None)
        for function in functions
    ]
    is_parallel = is_parallel is not False and named is None
    return constrain_calls(template, tools, is_required=is_required, is_parallel=is_parallel)


def are_calls_constrained(options: Mapping[str, Any]) -> bool:
    """Return whether a body's calls follow a grammar, as `constrain_functions` decides."""
    tools = [tool.get("function", tool) for tool in _list_offered(options)]
    is_free = options.get("tool_choice") in (None, "auto") and options.get("parallel_tool_calls") is not False
    return bool(tools) and not (is_free and not any(tool.get("strict") for tool in tools))


def refuse_grammar_with_tools(body: Body, tools: Sequence[BaseModel]) -> None:
    """Raise `ApiError` 400 if an answer in a grammar might call tools."""
    if tools and (found := body.find_grammar()) is not None:
        raise invalid_value(found[0], "it cannot be given with tools, as an answer in it calls none")


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


def join_text_parts(content: str | list[dict[str, Any]] | None, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a message's text. Raises `ApiError` 400 for other content."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content or ()):
        if part.get("type") not in kinds:
            raise unsupported_value(
                f"{param}.{index}", f"content of type {part.get('type')!r} is not supported, only text."
            )
        if not isinstance(part.get("text"), str):
            raise unsupported_value(f"{param}.{index}.text", "a part of a message has its text in 'text'.")
        texts.append(part["text"])
    return "".join(texts)


def make_parser(meta: StreamMeta) -> AnswerParser | None:
    """Return the parser of an answer; None where all of it is content."""
    if meta.response_template is None:
        return None
    held = are_calls_constrained(meta.options)
    return AnswerParser(meta.response_template, _list_offered(meta.options), are_calls_constrained=held)


def _list_offered(options: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tools that were offered to the model."""
    return () if options.get("tool_choice") == "none" else options.get("tools") or ()


def make_call_id(name: str, number: int) -> str:
    """Return the id of a call: it follows from the request's id without its prefix, and the call's number."""
    return f"call_{name}_{number}"
