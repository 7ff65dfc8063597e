"""For how long clients ask to keep the KV of a prompt: fields of OpenAI's and Anthropic's APIs.

A field whose value asks for nothing that is known here is ignored, as `ignored.py` has it in its list.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.names import MAX_RETENTION_S

_POLICIES_S = {"in_memory": 300, "24h": MAX_RETENTION_S}
"""By the value of OpenAI's `prompt_cache_retention`."""
_DEFAULT_TTL_S = 300
"""The lifetime behind Anthropic's `cache_control` that names none."""
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_CONTROLLED = ("system", "tools", "messages", "content")
"""Where in a body of messages blocks may have a `cache_control`."""


def find_retention(fields: Mapping[str, Any]) -> tuple[int | None, set[str]]:
    """Return how long a body asks to keep the KV of its prompt, an hour at most, and by which fields; None where it
    does not ask.
    """
    found: list[tuple[str, int]] = []
    if (policy_s := _POLICIES_S.get(str(fields.get("prompt_cache_retention")))) is not None:
        found.append(("prompt_cache_retention", policy_s))
    options = fields.get("prompt_cache_options")
    if isinstance(options, dict) and (ttl_s := _parse_ttl(options.get("ttl"))) is not None:
        found.append(("prompt_cache_options", ttl_s))
    found += _iter_controls(fields, "")
    seconds = max((ttl_s for _, ttl_s in found), default=None)
    return None if seconds is None else min(seconds, MAX_RETENTION_S), {name for name, _ in found}


def _iter_controls(block: Mapping[str, Any], place: str) -> Iterator[tuple[str, int]]:
    """Yield the name of each `cache_control` in a block and those below it, and its lifetime."""
    control = block.get("cache_control")
    if isinstance(control, dict) and control.get("type") == "ephemeral":
        ttl_s = _parse_ttl(control["ttl"]) if control.get("ttl") is not None else _DEFAULT_TTL_S
        if ttl_s is not None:
            yield f"{place}cache_control", ttl_s
    for name in _CONTROLLED:
        below = block.get(name)
        for one in below if isinstance(below, list) else ():
            if isinstance(one, dict):
                yield from _iter_controls(one, f"{place}{name}.*.")


def _parse_ttl(value: object) -> int | None:
    """Return a lifetime such as "5m" in seconds; None where it is none."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([smh])", value) if isinstance(value, str) else None
    return None if match is None else int(match[1]) * _UNITS_S[match[2]]
