"""Finds a model's response template, by which transformers tells calls and reasoning from the text of an answer."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.errors import ModelLoadError

log = logging.getLogger(__name__)

Template = dict[str, Any]
# What gpt-oss writes, by the "harmony response format" of its model card: messages in channels, of which one is a call
# where it names a recipient. What stands between messages is no part of the answer.
GPT_OSS: Template = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"<\|channel\|>analysis<\|message\|>",
            "close": ["<|end|>", "<|return|>", "<|call|>"],
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": r"(?:<\|channel\|>\w+)? to=functions\.(?P<name>[\w-]+)[^<]*(?:<\|channel\|>\w+[^<]*)?"
            r"(?:<\|constrain\|>\w+)?<\|message\|>",
            "close": ["<|call|>", "<|end|>", "<|return|>"],
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)(?! to=)[^<]*(?:<\|constrain\|>\w+)?<\|message\|>",
            "close": ["<|return|>", "<|end|>"],
            "content": "text",
        },
    },
}


def find_response_template(tokenizer: Any, model_type: str, file: str) -> Template | None:
    """Return the template in `file`, or else the tokenizer's own, or else the one of the model's family; None without.

    Raises `ModelLoadError` if there is no usable template in `file`. One of the tokenizer's that cannot be used is
    logged.
    """
    if file:
        return _read_template(file)
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        template = GPT_OSS if model_type == "gpt_oss" else _find_family_template(model_type)
    if template is None:
        return None
    try:
        _check_template(template)
    except Exception as error:  # whatever it is made of
        log.warning("the model's response template cannot be used: %s", error)
        return None
    return dict(template)


def find_call_mark(template: Template | None) -> Any:
    """Return the compiled pattern of what opens a call in an answer's text; None where calls cannot be told."""
    if template is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    field = load_response_template(template).fields.get("tool_calls")
    return None if field is None else field.open_re


def _read_template(file: str) -> Template:
    try:
        template = json.loads(Path(file).read_text("utf-8"))
        _check_template(template)
    except Exception as error:
        raise ModelLoadError(
            f"PENSTOCK_ENGINE_RESPONSE_TEMPLATE={file}: no usable response template: {error}"
        ) from None
    return dict(template)


def _check_template(template: Any) -> None:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    load_response_template(template)


def _find_family_template(model_type: str) -> Template | None:
    """Return what transformers' own server takes for models of a family that were published without a template."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # it is no documented part of transformers
        return None
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    template: Template | None = get_response_template(SimpleNamespace(tokenizer=None), model)
    return template
