"""OpenAI's tools that the client runs: a response's `tools` name their type, and their calls are items of their own.

To the model they are functions, whose arguments are the published fields of such an item.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter

LEFT_OUT: Any = Field(exclude_if=lambda value: value is None)
"""A field that an item does not have where it is None."""
_TEXT = {"type": "string"}
_DIFF = (
    "For 'create_file' the lines of the file, each behind '+'. For 'update_file' the changes: '@@' and a line of the "
    "file that stands before them, then lines behind ' ' (kept), '-' (removed) and '+' (added). Else empty."
)


def _describe_function(name: str, description: str, required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": name, "description": description, "parameters": schema}


CLIENT_TOOLS: Mapping[str, dict[str, Any]] = {
    "shell": _describe_function(
        "shell",
        "Run commands in a shell on the user's machine.",
        ["commands"],
        {
            "commands": {"type": "array", "items": _TEXT, "minItems": 1},
            "timeout_ms": {"type": "integer", "description": "The most milliseconds that they may take."},
            "max_output_length": {"type": "integer", "description": "The most characters of each one's output."},
        },
    ),
    "apply_patch": _describe_function(
        "apply_patch",
        "Create, change or delete a file.",
        ["type", "path", "diff"],
        {
            "type": {"enum": ["create_file", "update_file", "delete_file"]},
            "path": _TEXT | {"description": "The path of the file."},
            "diff": _TEXT | {"description": _DIFF},
        },
    ),
}
"""By type, which is the name as well: the function that such a tool is to the model."""


class ShellAction(BaseModel):
    """The commands of a call of `shell`."""

    commands: list[str]
    timeout_ms: Annotated[int | None, LEFT_OUT] = None
    max_output_length: Annotated[int | None, LEFT_OUT] = None


class FileChange(BaseModel):
    """A call of `apply_patch` that writes a file."""

    type: Literal["create_file", "update_file"]
    path: str
    diff: str


class FileDeletion(BaseModel):
    """A call of `apply_patch` that deletes a file."""

    type: Literal["delete_file"]
    path: str


FileOperation = Annotated[FileChange | FileDeletion, Field(discriminator="type")]
FILE_OPERATION = TypeAdapter[FileChange | FileDeletion](FileOperation)
