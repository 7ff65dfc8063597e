"""Fields that clients send and nothing here acts on: they are accepted, and the header `penstock-ignored` names them.

A field belongs into `IGNORED_FIELDS` only if the answer is right without it: it says how to bill, cache, trace or
split the answer, or it comes back from an answer of ours. A field that would change the answer is refused by name.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Any

IGNORED_HEADER = "penstock-ignored"
_OPENAI = {
    # These two, and `cache_control`, only where they name no time for which KV is kept (`retention.py`).
    "prompt_cache_options": "openai 3.54",
    "prompt_cache_retention": "openai 3.54",
    "safety_identifier": "openai 3.54",
    "user": "openai 3.54",
    # The usage is sent once, before the end.
    "stream_options.continuous_usage_stats": "guidellm 0.7",
}
IGNORED_FIELDS: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": _OPENAI | {"metadata": "openai 3.54"},
    "/v1/chat/completions": _OPENAI
    | {
        "metadata": "openai 3.54",
        # What the SDK adds to messages that it put together from a stream, or parsed.
        "messages.*.choice_id": "openai 3.54",
        "messages.*.parsed": "openai 3.54",
        "messages.*.tool_calls.*.index": "openai 3.54",
        "messages.*.tool_calls.*.function.parsed_arguments": "openai 3.54",
    },
    "/v1/responses": _OPENAI
    | {
        "background_options": "openai 3.54",
        "image": "openai 3.54",
        "context_management": "openai 3.54",
        "input.*.parsed_arguments": "openai 3.54",
        # It limits the tools that OpenAI's servers call.
        "max_tool_calls": "openai 3.54",
        # Reasoning is returned as it is, and has no summary.
        "reasoning.generate_summary": "openai 3.54",
        "reasoning.summary": "openai-agents 0.24",
    },
    "/v1/messages": {
        # Every prompt's KV is looked for, and kept.
        "cache_control": "anthropic 2.12",
        "system.*.cache_control": "anthropic 2.12",
        "tools.*.cache_control": "anthropic 2.12",
        "messages.*.content.*.cache_control": "anthropic 2.12",
        "messages.*.content.*.content.*.cache_control": "anthropic 2.12",
        # Nothing is cut from the turns: a prompt that is too long is refused.
        "context_management": "anthropic 2.12",
        "diagnostics": "anthropic 2.12",
        # No answer is declined here.
        "fallback_credit_token": "anthropic 2.12",
        "fallbacks": "anthropic 2.12",
        "service_tier": "anthropic 2.12",
        "speed": "anthropic 2.12",
        "output_config.effort": "anthropic 2.12",
        "output_config.task_budget": "anthropic 2.12",
        # Thinking and answer have `max_tokens` together, and thinking is returned as it is.
        "thinking.block_binding": "anthropic 2.12",
        "thinking.budget_tokens": "anthropic 2.12",
        "thinking.display": "anthropic 2.12",
        "tools.*.allowed_callers": "anthropic 2.12",
        "tools.*.defer_loading": "anthropic 2.12",
        "tools.*.eager_input_streaming": "@ai-sdk/anthropic 4.0",
        "tools.*.input_examples": "anthropic 2.12",
        # What an answer's blocks come back with.
        "messages.*.content.*.caller": "anthropic 2.12",
        "messages.*.content.*.citations": "anthropic 2.12",
        "messages.*.content.*.signature": "anthropic 2.12",
        "messages.*.content.*.toolset_name": "anthropic 2.12",
        # Chat templates have no place for it: the content says what went wrong.
        "messages.*.content.*.is_error": "anthropic 2.12",
    },
}
"""By the endpoint's path: each field that is ignored, and the version of the client that was seen to send it, or has it
among its parameters. `*` stands for all entries of a list.
"""
Tree = dict[str, Any]


def _make_tree(fields: Iterable[str]) -> Tree:
    """Return the fields as nested dictionaries, whose leaves are the fields' names."""
    tree: Tree = {}
    for field in fields:
        *above, last = field.split(".")
        branch = tree
        for part in above:
            branch = branch.setdefault(part, {})
        branch[last] = field
    return tree


_TREES = {path: _make_tree(fields) for path, fields in IGNORED_FIELDS.items()}


def strip_ignored_fields(path: str, body: Mapping[str, Any], kept: Container[str] = ()) -> tuple[Any, list[str]]:
    """Return a body without the fields that its endpoint ignores, and the names of those that had a value.

    Top-level fields in `kept` stay: the answer repeats them.
    """
    found: dict[str, None] = {}
    stripped = _strip(body, _TREES.get(path, {}), found)
    repeated = {name: body[name] for name in found if name in kept}
    return (stripped | repeated if repeated else stripped), list(found)


def _strip(value: Any, tree: Tree, found: dict[str, None]) -> Any:
    if isinstance(value, list) and "*" in tree:
        return [_strip(one, tree["*"], found) for one in value]
    if not isinstance(value, dict):
        return value
    rest = {}
    for name, one in value.items():
        below = tree.get(name)
        if not isinstance(below, str):
            rest[name] = one if below is None else _strip(one, below, found)
        elif one is not None:
            found[below] = None
    return rest
