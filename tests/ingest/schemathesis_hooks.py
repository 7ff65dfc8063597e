"""What schemathesis cannot guess: names of what is there. Half of what it makes up is left as it is."""

import itertools
import os
from collections import Counter
from contextlib import suppress
from typing import Any

import schemathesis

_SMALL = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2, "best_of": 2}
_LIMITS = {"messages": "max_tokens", "input": "max_output_tokens"}
_STREAM = os.environ["STREAM_ID"]
_KNOWN = {"model": "demo", "stream_id": _STREAM, "request_id": _STREAM, "input_file_id": os.environ["FILE_ID"]}
_number = itertools.count()
_LARGE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Their bodies have much in common, and make four cases of five."""
_ONE_IN = int(os.environ["ONE_IN"])
_enumerated: Counter[tuple[str, str]] = Counter()


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Of what is enumerated for large bodies, good and bad, one in so many: of each body others."""
    if case.path not in _LARGE or case.meta is None or case.meta.phase.name.value != "coverage":
        return True
    kind = (case.path, case.meta.generation.mode.value)
    _enumerated[kind] += 1
    return (_enumerated[kind] + _LARGE.index(case.path)) % _ONE_IN == 0


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Answers are short and deadlines far; every second time names are such as exist, and a chat says something."""
    body = case.body if isinstance(case.body, dict) else {}
    headers = case.headers or {}
    _make_short(body, headers)
    if case.path == "/v1/live":
        _make_end(case)
    if next(_number) % 2:
        for name in ("idempotency-key", "x-penstock-reject-if-busy"):
            headers.pop(name, None)
        for given in (body, case.path_parameters or {}):
            _make_known(given)


def _make_short(body: dict[str, Any], headers: Any) -> None:
    for name, most in _SMALL.items():
        if isinstance(body.get(name), int) and body[name] > most:
            body[name] = most
    for asked in body.keys() & _LIMITS:
        if body.get(_LIMITS[asked]) is None and body.get("max_completion_tokens") is None:
            body[_LIMITS[asked]] = 4
    with suppress(ValueError):
        if 0 < float(headers.get("x-penstock-deadline-s", 0)) < 100:
            headers["x-penstock-deadline-s"] = "100"


def _make_end(case: Any) -> None:
    """A stream without end is asked for one event."""
    query = dict(case.query or {})
    asked = str(query.get("looks", ""))
    if not asked or (asked.isdigit() and int(asked) > 1):
        case.query = query | {"looks": 1}


def _make_known(given: dict[str, Any]) -> None:
    for name in given.keys() & _KNOWN:
        if isinstance(given[name], str):
            given[name] = _KNOWN[name]
    for turn in given["messages"] if isinstance(given.get("messages"), list) else []:
        if isinstance(turn, dict) and turn.get("content") == "":
            turn["content"] = "Amen"
        if isinstance(turn, dict) and turn.get("role") == "tool" and not turn.get("tool_call_id"):
            turn["role"] = "user"  # all cases of one run may have the role that was drawn first
