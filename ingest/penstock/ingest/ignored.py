"""What clients send and nothing here acts on: it is accepted, and the header `penstock-ignored` names it.

A field belongs into `IGNORED_FIELDS` only if the answer is right without it: it says how to bill, cache, trace or
split the answer, or it comes back from an answer of ours. A field that would change the answer is refused by name.

A hosted tool, which a vendor's servers run, is an entry of `tools` that is left out by its type: the model may call it
and need not, so an answer without such a call is right. A body that demands the call is refused. The calls
that other servers made, and what they encrypted, are left out of a history in the same way: nobody here can
make or read them.
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
_ANTHROPIC_HOSTED_TOOLS = (
    "advisor_20260301",
    *(f"code_execution_{day}" for day in ("20250522", "20250825", "20260120", "20260521")),
    *(f"tool_search_tool_{kind}" for kind in ("bm25", "bm25_20251119", "regex", "regex_20251119")),
    *(f"web_fetch_{day}" for day in ("20250910", "20260209", "20260309", "20260318")),
    *(f"web_search_{day}" for day in ("20250305", "20260209", "20260318")),
)
"""The types of tools of `/v1/messages` that Anthropic's servers run. They are left out of the prompt."""
HOSTED_TOOLS: Mapping[str, str] = {
    "code_interpreter": "openai 3.54",
    "file_search": "openai 3.54",
    "image_generation": "openai 3.54",
    "local_shell": "openai 3.54",
    "mcp": "openai 3.54",
    "programmatic_tool_calling": "openai 3.54",
    "tool_search": "openai 3.54",
    "web_search": "Codex 0.171",
    "web_search_2025_08_26": "openai 3.54",
    "web_search_preview": "openai 3.54",
    "web_search_preview_2025_03_11": "openai 3.54",
}
"""The types of tools of `/v1/responses` that are left out, and the client that sends each."""
_OTHER_SERVERS_ITEMS: Mapping[str, str] = {
    "code_interpreter_call": "openai 3.54",
    "compaction": "openai 3.54",
    "compaction_summary": "Codex 0.171",
    "context_compaction": "Codex 0.171",
    "file_search_call": "openai 3.54",
    "image_generation_call": "openai 3.54",
    "mcp_approval_request": "openai 3.54",
    "mcp_approval_response": "openai 3.54",
    "mcp_call": "openai 3.54",
    "mcp_list_tools": "openai 3.54",
    "program": "openai 3.54",
    "program_output": "openai 3.54",
    "tool_search_call": "openai 3.54",
    "tool_search_output": "openai 3.54",
    "web_search_call": "openai 3.54",
}
"""The types of items of `/v1/responses` that are left out of a history."""
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
        # It says which text the answer may repeat, so that it comes sooner.
        "prediction": "openai 3.54",
        # No chat is kept: responses are.
        "store": "openai 3.54",
        # It says how long an answer OpenAI's models give.
        "verbosity": "openai 3.54",
    },
    "/v1/responses": _OPENAI
    | {
        **{f"tools[{kind}]": client for kind, client in HOSTED_TOOLS.items()},
        **{f"tool_choice.tools[{kind}]": client for kind, client in HOSTED_TOOLS.items()},
        **{f"input.*.tools[{kind}]": client for kind, client in HOSTED_TOOLS.items()},
        **{f"input[{kind}]": client for kind, client in _OTHER_SERVERS_ITEMS.items()},
        "background_options": "openai 3.54",
        "client_metadata": "Codex 0.171",
        "image": "openai 3.54",
        "context_management": "openai 3.54",
        "input.*.parsed_arguments": "openai 3.54",
        # It limits the tools that OpenAI's servers call.
        "max_tool_calls": "openai 3.54",
        # Reasoning is returned as it is, and has no summary.
        "reasoning.generate_summary": "openai 3.54",
        "reasoning.summary": "openai-agents 0.24",
        # It says how long an answer OpenAI's models give.
        "text.verbosity": "openai 3.54",
        # Where tools are searched for, which is nowhere here, these are left out until they are found.
        "tools.*.defer_loading": "openai 3.54",
        "tools.*.tools.*.defer_loading": "openai 3.54",
        # Only the model itself calls.
        "tools.*.allowed_callers": "openai 3.54",
        # The schema of a result, which no model here is told.
        "tools.*.output_schema": "openai 3.54",
        "tools.*.tools.*.output_schema": "openai 3.54",
        # Nothing is cut from the turns: a prompt that is too long is refused.
        "truncation": "openai 3.54",
    },
    "/v1/embeddings": {"user": "openai 3.54"},
    # It says which requests Cohere's servers answer first.
    "/v2/embed": {"priority": "cohere 7.3"},
    "/v2/rerank": {"priority": "cohere 7.3"},
    "/v1/messages": {
        # Every prompt's KV is looked for, and kept.
        "cache_control": "anthropic 2.12",
        "system.*.cache_control": "anthropic 2.12",
        "tools.*.cache_control": "anthropic 2.12",
        "messages.*.content.*.cache_control": "anthropic 2.12",
        "messages.*.content.*.content.*.cache_control": "anthropic 2.12",
        # Answers have no citations.
        "messages.*.content.*.content.*.citations": "anthropic 2.14",
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
        # What the client's editor shows of a file.
        "tools.*.max_characters": "anthropic 2.14",
        **{f"tools[{kind}]": "anthropic 2.14" for kind in _ANTHROPIC_HOSTED_TOOLS},
        "messages.*.output_config.effort": "anthropic 2.14",
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
among its parameters. `*` stands for all entries of a list, `[type]` for those of a type, which are left out.
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
        name, is_of_type, kind = last.partition("[")
        if is_of_type:
            branch = branch.setdefault(name, {})
        branch[is_of_type + kind or name] = field
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
    if isinstance(value, list):
        left_out = [tree.get(f"[{one.get('type')}]") if isinstance(one, dict) else None for one in value]
        found.update(dict.fromkeys(field for field in left_out if field is not None))
        below = tree.get("*", {})
        return [_strip(one, below, found) for one, field in zip(value, left_out, strict=True) if field is None]
    if not isinstance(value, dict):
        return value
    rest = {}
    for name, one in value.items():
        below = tree.get(name)
        if not isinstance(below, str):
            rest[name] = one if below is None else _strip(one, below, found)
        elif one not in (None, []):
            found[below] = None
    return rest
