"""A chat as its model's template writes it, for workers, and for gateways that count tokens. No model library."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidRequest
from penstock.messages import ChatMessage

RESERVED_VARIABLES = {"messages", "add_generation_prompt", "chat_template", "tokenize", "return_dict", "padding"}
"""Names that a request cannot give to its chat template."""


def render_chat(
    tokenizer: Any,
    model: str,
    turns: Sequence[ChatMessage],
    variables: Mapping[str, Any],
    *,
    generation_prompt: bool = True,
) -> str:
    """Return the text of a chat, which ends with the beginning of the model's turn if `generation_prompt`.

    `variables` are given to the template beside the turns. Raises `InvalidRequest` if there is no template, if it does
    not have one of the variables, or if it refuses what it is given.
    """
    if not tokenizer.chat_template:
        raise InvalidRequest(f"{model!r} has no chat template; send a prompt instead of messages")
    words = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    if unknown := [name for name in variables if name in RESERVED_VARIABLES or name not in words]:
        raise InvalidRequest(f"chat_template_kwargs: the chat template of {model!r} has no {unknown[0]!r}")
    described = [turn.describe() for turn in turns]
    try:
        text = tokenizer.apply_chat_template(
            described, tokenize=False, add_generation_prompt=generation_prompt, **variables
        )
    except Exception as error:  # a template may raise anything about what it is given
        raise InvalidRequest(f"the chat template refuses these messages: {error}") from None
    return str(text)
