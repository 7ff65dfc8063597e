"""A chat as its model's template writes it, for workers, and for gateways that count tokens. No model library."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine.template_process import COMPILE_S, render_within_limits, shared_process
from penstock.errors import InternalError, InvalidRequest, ModelLoadError
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
    is_in_child: bool = False,
    may_wait: bool = True,
) -> str:
    """Return the text of a chat, which ends with the beginning of the model's turn if `generation_prompt`.

    `variables` are given to the template beside the turns. Raises `InvalidRequest` if there is no template, if it does
    not have one of the variables, if it refuses what it is given, or if it takes too much time or memory for it.
    It is rendered in a child process, unless this is one. Without `may_wait` what takes time raises `TakesTime`.
    """
    if not tokenizer.chat_template:
        raise InvalidRequest(f"{model!r} has no chat template; send a prompt instead of messages")
    words = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    if unknown := [name for name in variables if name in RESERVED_VARIABLES or name not in words]:
        raise InvalidRequest(f"chat_template_kwargs: the chat template of {model!r} has no {unknown[0]!r}")
    described = [turn.describe() for turn in turns]
    how = {"generation_prompt": generation_prompt, "is_in_child": is_in_child, "may_wait": may_wait}
    found = _render(tokenizer, described, variables, **how)
    if "over" in found:
        raise InvalidRequest(f"the chat template of {model!r} takes too much for these messages: {found['over']}")
    if "refused" in found:
        raise InvalidRequest(f"the chat template refuses these messages: {found['refused']}")
    return found["text"]


def _render(
    tokenizer: Any,
    described: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    generation_prompt: bool = True,
    is_in_child: bool = False,
    may_wait: bool = True,
) -> dict[str, str]:
    """Return what came of a rendering, as `TemplateProcess.render` does."""
    try:
        template = tokenizer.get_chat_template(None, variables.get("tools"))
    except ValueError as error:
        return {"refused": str(error)}
    # As transformers gives it to a template.
    messages = [{key: value for key, value in one.items() if value is not None} for one in described]
    given = {
        "messages": messages,
        "add_generation_prompt": generation_prompt,
        **tokenizer.special_tokens_map,
        **variables,
    }
    if is_in_child:
        return render_within_limits(template, given, len(str(given)), COMPILE_S)
    return shared_process.render(template, given, may_wait=may_wait)


def check_template(tokenizer: Any, where: str) -> None:
    """Raise `ModelLoadError` for a chat template that exceeds its limits with one short message."""
    if not tokenizer.chat_template:
        return
    try:
        told = _render(tokenizer, [{"role": "user", "content": "Hello"}], {}).get("over")
    except InternalError as error:
        told = str(error)
    if told:
        raise ModelLoadError(f"the chat template in {where} takes too much for one short message: {told}")
