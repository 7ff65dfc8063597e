"""The tools of `/v1/responses`, and the functions that they are to the model."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.ingest.openai.body import StrictModel, allow_only
from penstock.ingest.openai.client_tools import CLIENT_TOOLS, LEFT_OUT
from penstock.ingest.openai.custom_tools import CUSTOM, PlainFormat, TextGrammar, make_function
from penstock.ingest.openai.tools import MAX_TOOLS, NAMESPACE, FunctionKind, ToolFunction, ToolName

Local = allow_only({"type": "local"}, instead="This server has no containers.")


class ResponseTool(ToolFunction, FunctionKind):
    """A function that the model may call."""


class ToolNamespace(StrictModel):
    """A group of functions. The model sees each as `namespace.name`."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    """The model is not told of it."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)]


class GrammarFormat(TextGrammar):
    """A grammar for the text of calls."""

    type: Literal["grammar"]


class ResponseCustomTool(StrictModel):
    """A tool whose calls have a text in place of arguments."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: Annotated[PlainFormat | GrammarFormat, Field(discriminator="type")] | None = None
    """What the text of a call may be: any, or what a grammar allows."""

    def make_function(self) -> ResponseTool:
        """Return the function that it is to the model."""
        grammar = self.format if isinstance(self.format, GrammarFormat) else None
        return ResponseTool(type="function", **make_function(self.name, self.description, grammar))


class ClientTool(StrictModel):
    """A tool that the client runs, whose calls are items of their own."""

    type: Literal["shell", "apply_patch"]
    environment: Annotated[Local, LEFT_OUT] = None  # type: ignore[valid-type]
    """Where `shell` runs commands: at the client."""

    def make_function(self) -> ResponseTool:
        """Return the function that it is to the model."""
        return ResponseTool(type="function", **CLIENT_TOOLS[self.type])


def _find_tool_tag(tool: Any) -> str | None:
    """Return which model a tool is of; None where it is of none."""
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    return f"tagged-{kind}" if kind in ("function", CUSTOM, NAMESPACE, *CLIENT_TOOLS) else None


OfferedTool = Annotated[
    Annotated[ResponseTool, Tag("tagged-function")]
    | Annotated[ResponseCustomTool, Tag("tagged-custom")]
    | Annotated[ToolNamespace, Tag("tagged-namespace")]
    | Annotated[ClientTool, Tag("tagged-shell")]
    | Annotated[ClientTool, Tag("tagged-apply_patch")],
    Discriminator(
        _find_tool_tag,
        custom_error_type="unknown_tool",
        custom_error_message=(
            "this server has only tools of the types 'function', 'custom', 'namespace', 'shell' and 'apply_patch'"
        ),
    ),
]
