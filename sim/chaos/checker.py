"""Check a history against the promises. It knows nothing of how they are kept.

A history is a sequence of entries, each a flat JSON object with `what` and, nearly always, the request's `id`:

| `what`      | Other fields                         | Says                                                          |
|-------------|--------------------------------------|---------------------------------------------------------------|
| `submitted` | `tokens`, `text`, `calls`, `finish`, | a client is about to send it; what the undivided model        |
|             | `may`                                | answers, with the calls of tools that this text makes, and    |
|             |                                      | the codes of errors that may end it before                    |
| `accepted`  |                                      | it is durable, and has to be answered                         |
| `token`     | `reader`, `event`, `token`           | a reader saw a token, under that event id                     |
| `end`       | `reader`, `finish`, `count`,         | a reader saw the end, after `count` tokens (null: unknown),   |
|             | `error`, `text`, `calls`             | with the code of an error, or null; without an error, the     |
|             |                                      | text and the calls that all its pieces add up to              |
| `failed`    | `reader`, `error`, `story`           | a reader could not read on: the error's name                  |
| `result`    | `tokens`, `text`, `finish`, `error`, | it is in the results topic, read_committed; `count` tokens    |
|             | `count`                              | where it names none, as for pieces of an endpoint's text      |
| `dead`      | `reason`                             | it is among the dead letters                                  |

Other entries tell what was done to the system and are ignored. The order of one reader's entries is the order in
which it saw them, over all its connections. The history ends when every client has its answer or has timed out.
"""

import base64
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.messages import Vectors
from penstock.names import START_HASH, parse_event_id, roll_hash

KINDS = ("lost", "duplicated", "diverged", "wrong", "reordered", "stuck", "leaked")
"""A history shows all but the last: what a process or a server keeps though nobody needs it."""
ROUNDED = "vectors "
"""A text that stands for vectors whose bits are not promised begins with this."""
MAX_ROUNDING = 1e-5
Entry = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A promise that was broken."""

    kind: str
    """One of `KINDS`."""
    id: str
    """The id of the request."""
    description: str


@dataclass
class _Request:
    id: str
    submitted: Entry | None = None
    accepted: bool = False
    readers: dict[str, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    results: list[Entry] = field(default_factory=list)
    dead: list[Entry] = field(default_factory=list)


def check_history(history: Iterable[Entry]) -> list[Finding]:
    """Return all broken promises."""
    requests: dict[str, _Request] = {}
    for entry in history:
        if "id" in entry:
            _add_entry(requests.setdefault(entry["id"], _Request(entry["id"])), entry)
    return [
        Finding(kind, request.id, story) for request in requests.values() for kind, story in _check_request(request)
    ]


def name_vectors(found: Vectors | None, *, is_rounded: bool = False) -> str:
    """Return what stands for vectors where answers have a text; an empty one for none.

    Equal names mean the same bits. If vectors are rounded otherwise in another batch (`is_rounded`), the name has all
    numbers, and `is_same_text` compares them to `MAX_ROUNDING`.
    """
    if found is None:
        return ""
    return f"{ROUNDED}{found.data}" if is_rounded else hashlib.sha256(found.data.encode()).hexdigest()[:24]


def is_same_text(one: str, other: str) -> bool:
    """Return whether two texts are equal, or stand for vectors that are equal to `MAX_ROUNDING`."""
    if one == other or not (one.startswith(ROUNDED) and other.startswith(ROUNDED)):
        return one == other
    numbers = [np.frombuffer(base64.b64decode(text.removeprefix(ROUNDED)), "<f4") for text in (one, other)]
    return len(numbers[0]) == len(numbers[1]) and bool(np.abs(numbers[0] - numbers[1]).max() <= MAX_ROUNDING)


def count_by_kind(findings: Iterable[Finding]) -> dict[str, int]:
    """Count findings by kind. Kinds without findings count 0."""
    counts = dict.fromkeys(KINDS, 0)
    for finding in findings:
        counts[finding.kind] += 1
    return counts


def _add_entry(request: _Request, entry: Entry) -> None:
    match entry["what"]:
        case "submitted":
            request.submitted = entry
        case "accepted":
            request.accepted = True
        case "token" | "end" | "failed":
            request.readers[entry["reader"]].append(entry)
        case "result":
            request.results.append(entry)
        case "dead":
            request.dead.append(entry)


BrokenPromises = Iterator[tuple[str, str]]


def _check_request(request: _Request) -> BrokenPromises:
    if request.accepted and not request.results:
        yield "lost", "it was accepted, and has no result"
    if len(request.results) > 1:
        yield "duplicated", f"it has {len(request.results)} results"
    for reader, seen in request.readers.items():
        yield from _check_order(reader, seen)
        yield from _check_end_of_stream(reader, seen)
    yield from _check_agreement(request)
    yield from _check_equal_calls(request)
    if request.submitted is not None:
        yield from _check_answers(request, request.submitted)
        for letter in request.dead:
            if not letter["reason"].startswith(tuple(request.submitted["may"])):
                yield "wrong", f"it is among the dead letters: {letter['reason']}"


def _check_order(reader: str, seen: list[Entry]) -> BrokenPromises:
    """Check that a reader saw each position once, in order, and nothing after the end."""
    next_one, missing, over = 0, set[int](), False
    for entry in seen:
        if over:
            yield "duplicated", f"{reader} received more after the end: {entry['what']}"
        over = over or entry["what"] == "end"
        if entry["what"] != "token":
            continue
        position = parse_event_id(entry["event"])[0]
        if position in missing:
            yield "reordered", f"{reader} saw token {position} after token {next_one - 1}"
            missing.discard(position)
        elif position < next_one:
            yield "duplicated", f"{reader} saw token {position} again"
        else:
            missing |= set(range(next_one, position))
            next_one = position + 1
    for position in sorted(missing):
        yield "lost", f"{reader} never saw token {position}"


def _check_end_of_stream(reader: str, seen: list[Entry]) -> BrokenPromises:
    """Check that a stream ends with the number of tokens that it had."""
    last, num_tokens = seen[-1], sum(entry["what"] == "token" for entry in seen)
    if last["what"] == "token":
        yield "stuck", f"{reader} saw {num_tokens} tokens and no end"
    if last["what"] == "end" and last["count"] not in (None, num_tokens):
        yield "lost", f"{reader} saw {num_tokens} of {last['count']} tokens"
    if last["what"] == "failed":
        kind = {"StreamTimeout": "stuck", "StreamDiverged": "diverged"}.get(last["error"], "lost")
        yield kind, f"{reader} could not read on: {last['error']} {last['story']}"


def _check_agreement(request: _Request) -> BrokenPromises:
    """Check that all readers and results have equal tokens and ends, and that event ids match the tokens."""
    tokens: dict[int, int] = {}
    for reader, seen in request.readers.items():
        rolled, next_one = START_HASH, 0
        for entry in (entry for entry in seen if entry["what"] == "token"):
            position, named = parse_event_id(entry["event"])
            if tokens.setdefault(position, entry["token"]) != entry["token"]:
                yield "diverged", f"{reader} saw {entry['token']} at {position}, others {tokens[position]}"
            if position == next_one:
                rolled, next_one = roll_hash(rolled, entry["token"]), position + 1
                if rolled != named:
                    yield "diverged", f"{reader} saw {entry['event']}, which is no id of what it had seen"
    for result in request.results:
        for position, token in enumerate(result["tokens"]):
            if tokens.setdefault(position, token) != token:
                yield "diverged", f"a result has {token} at {position}, others {tokens[position]}"
    ends = [entry for seen in request.readers.values() for entry in seen if entry["what"] == "end"]
    told = {entry["error"] or entry["finish"] for entry in (*ends, *request.results)}
    if len(told) > 1:
        yield "diverged", f"it ends in different ways: {', '.join(sorted(told))}"


def _check_equal_calls(request: _Request) -> BrokenPromises:
    """Check that all readers were told of the same calls of tools."""
    ends = [(reader, entry) for reader, seen in request.readers.items() for entry in seen if _is_whole(entry)]
    for reader, end in ends[1:]:
        if end["calls"] != ends[0][1]["calls"]:
            yield "diverged", f"{reader} was told of the calls {end['calls']}, {ends[0][0]} of {ends[0][1]['calls']}"


def _is_whole(entry: Entry) -> bool:
    """Return whether a reader's entry is the end of a whole answer."""
    return entry["what"] == "end" and entry["error"] is None


def _check_answers(request: _Request, expected: Entry) -> BrokenPromises:
    """Check that the answer is the undivided model's, or a prefix of it with an allowed error."""
    tokens = list(expected["tokens"])
    for reader, seen in request.readers.items():
        for entry in seen:
            if entry["what"] == "end":
                yield from _check_end(reader, entry, expected)
                if _is_whole(entry):
                    yield from _check_parts(reader, entry, expected)
            elif entry["what"] == "token":
                position = parse_event_id(entry["event"])[0]
                if tokens[position : position + 1] != [entry["token"]]:
                    yield "wrong", f"{reader} saw {entry['token']} at {position}"
    for result in request.results:
        yield from _check_end("a result", {"count": len(result["tokens"])} | result, expected)
        if list(result["tokens"]) != tokens[: len(result["tokens"])]:
            yield "wrong", f"a result has other tokens: {result['tokens']}"
        if result["error"] is None and not is_same_text(result["text"], expected["text"]):
            yield "wrong", f"a result has another text: {result['text']!r}"


def _check_parts(reader: str, end: Entry, expected: Entry) -> BrokenPromises:
    if not is_same_text(end["text"], expected["text"]):
        yield "wrong", f"{reader} has another text: {end['text']!r}"
    elif end["calls"] != expected["calls"]:
        yield "wrong", f"{reader} was told of the calls {end['calls']}, not {expected['calls']}"


def _check_end(who: str, end: Entry, expected: Entry) -> BrokenPromises:
    if end["error"] is not None:
        if end["error"] not in expected["may"]:
            yield "wrong", f"{who} ends with the error {end['error']}"
    elif end["finish"] != expected["finish"]:
        yield "wrong", f"{who} ends with {end['finish']}, not {expected['finish']}"
    elif end["count"] not in (None, len(expected["tokens"])):
        yield "wrong", f"{who} ends after {end['count']} tokens, not {len(expected['tokens'])}"
