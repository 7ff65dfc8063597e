"""Anthropic's tools that the client runs: a body names their type, and their schemas are published."""

from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_LINE = {"type": "integer"}
_RANGE = {
    "type": "array",
    "items": _LINE,
    "minItems": 2,
    "maxItems": 2,
    "description": "For 'view' of a file: its first and last line, counted from 1; -1 is the end.",
}


def _make_schema(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _make_editor(inserted: str, *more: str) -> dict[str, Any]:
    """Return the editor whose command `insert` has its text in the field `inserted`, with more commands."""
    properties = {
        "command": {"enum": ["view", "create", "str_replace", "insert", *more]},
        "path": _TEXT | {"description": "The absolute path of a file or directory."},
        "file_text": _TEXT | {"description": "For 'create': the content of the file."},
        "old_str": _TEXT | {"description": "For 'str_replace': a text that stands in the file once."},
        "new_str": _TEXT | {"description": "For 'str_replace': what replaces it; without it the text is removed."},
        "insert_line": _LINE | {"description": f"For 'insert': '{inserted}' goes behind this line; 0 is the start."},
        "view_range": _RANGE,
    }
    properties.setdefault(inserted, _TEXT)
    schema = _make_schema(["command", "path"], properties)
    return {"description": "View, create and edit text files.", "input_schema": schema}


_BASH = {
    "description": "Run commands in a bash shell that keeps its state between calls.",
    "input_schema": _make_schema(
        ["command"],
        {
            "command": _TEXT | {"description": "The command to run."},
            "restart": {"type": "boolean", "description": "True restarts the shell; the command is not run then."},
        },
    ),
}
_MEMORY = {
    "description": "Keep notes in files below /memories, which last longer than a conversation.",
    "input_schema": _make_schema(
        ["command"],
        {
            "command": {"enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            "path": _TEXT | {"description": "The path of a file or directory; for 'rename' there are two others."},
            **dict.fromkeys(("file_text", "old_str", "new_str", "insert_text", "old_path", "new_path"), _TEXT),
            "insert_line": _LINE,
            "view_range": _RANGE,
        },
    ),
}
CLIENT_TOOLS: Mapping[str, Mapping[str, Any]] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _make_editor("new_str", "undo_edit"),
    "text_editor_20250124": _make_editor("new_str", "undo_edit"),
    "text_editor_20250429": _make_editor("insert_text"),
    "text_editor_20250728": _make_editor("insert_text"),
    "memory_20250818": _MEMORY,
}
"""By type: the description and the schema that the model is given."""
