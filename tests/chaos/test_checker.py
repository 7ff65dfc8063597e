"""The checker finds what it is there to find, and nothing in a good history."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.messages import Vectors
from penstock.names import START_HASH, event_id, roll_hash
from sim.chaos.checker import check_history, count_by_kind, name_vectors

TOKENS = [7, 3, 3, 9, 4]
CALLS = [["get_weather", '{"city": "Lisbon"}']]
Entries = list[dict[str, Any]]


def token(reader: str, position: int, tokens: list[int]) -> dict[str, Any]:
    rolled = START_HASH
    for one in tokens[: position + 1]:
        rolled = roll_hash(rolled, one)
    event = event_id(position, rolled)
    return {"what": "token", "id": "a", "reader": reader, "event": event, "token": tokens[position]}


def end(reader: str, count: int, error: str | None = None) -> dict[str, Any]:
    finish = "error" if error else "length"
    made = {"what": "end", "id": "a", "reader": reader, "finish": finish, "count": count, "error": error}
    return made if error else made | {"text": "yes", "calls": CALLS}


def result(tokens: list[int], error: str | None = None) -> dict[str, Any]:
    finish = "error" if error else "length"
    return {"what": "result", "id": "a", "tokens": tokens, "text": "yes", "finish": finish, "error": error}


def failed(error: str) -> dict[str, Any]:
    return {"what": "failed", "id": "a", "reader": "x", "error": error, "story": "it says"}


def submitted(*may: str) -> Entries:
    expected = {"tokens": TOKENS, "text": "yes", "calls": CALLS, "finish": "length", "may": list(may)}
    return [{"what": "submitted", "id": "a"} | expected, {"what": "accepted", "id": "a"}]


def reading(reader: str, positions: list[int], tokens: list[int] = TOKENS) -> Entries:
    return [token(reader, position, tokens) for position in positions]


ALL = [0, 1, 2, 3, 4]


def good() -> Entries:
    """One reader, one that came back after its second token, and a kill, of which the checker knows nothing."""
    return [
        *submitted(),
        *reading("one", ALL[:2]),
        {"what": "kill", "worker": "decode-0"},
        *reading("two", ALL),
        *reading("one", ALL[2:]),
        end("one", 5),
        end("two", 5),
        result(TOKENS),
    ]


def kinds(history: Entries) -> set[str]:
    return {kind for kind, count in count_by_kind(check_history(history)).items() if count}


def test_a_good_history_passes() -> None:
    assert check_history(good()) == []


def test_what_was_not_accepted_may_be_answered_or_not() -> None:
    sent = submitted()[:1]
    assert check_history(sent) == []
    assert check_history([*sent, result(TOKENS)]) == []
    assert kinds([*sent, result(TOKENS), result(TOKENS)]) == {"duplicated"}


def test_a_typed_error_passes_where_it_may_be() -> None:
    cut = [*reading("one", [0, 1]), end("one", 2, "cancelled"), result(TOKENS[:2], "cancelled")]
    letter = {"what": "dead", "id": "a", "reason": "attempts_exhausted: tried 8 times"}
    assert check_history([*submitted("cancelled"), *cut]) == []
    assert kinds([*submitted(), *cut]) == {"wrong"}
    assert kinds([*submitted("cancelled"), *cut, letter]) == {"wrong"}
    assert check_history([*submitted("attempts_exhausted"), result([], "attempts_exhausted"), letter]) == []


OTHER = [7, 3, 5, 9, 4]
BROKEN: dict[str, tuple[Callable[[], Entries], set[str]]] = {
    "no result": (lambda: good()[:-1], {"lost"}),
    "two results": (lambda: [*good(), result(TOKENS)], {"duplicated"}),
    "a token is missing": (lambda: [*good(), *reading("x", [0, 1, 3, 4]), end("x", 5)], {"lost"}),
    "the last token is missing": (lambda: [*good(), *reading("x", [0, 1, 2, 3]), end("x", 5)], {"lost"}),
    "the end comes early": (lambda: [*good(), *reading("x", [0, 1, 2, 3]), end("x", 4)], {"wrong"}),
    "a token comes twice": (lambda: [*good(), *reading("x", [0, 1, 1, 2, 3, 4])], {"duplicated", "stuck"}),
    "a token again at the end": (lambda: [*good(), *reading("one", [4])], {"duplicated", "stuck"}),
    "two change places": (lambda: [*good(), *reading("x", [0, 2, 1, 3, 4]), end("x", 5)], {"reordered"}),
    "no end": (lambda: [*good(), *reading("x", ALL)], {"stuck"}),
    "silence": (lambda: [*good(), failed("StreamTimeout")], {"stuck"}),
    "expired": (lambda: [*good(), failed("StreamExpired")], {"lost"}),
    "a reader diverges": (lambda: [*good(), failed("StreamDiverged")], {"diverged"}),
    "a reader sees another token": (lambda: [*good(), *reading("x", ALL, OTHER), end("x", 5)], {"diverged", "wrong"}),
    "all see a wrong token": (
        lambda: [*submitted(), *reading("one", ALL, OTHER), end("one", 5), result(OTHER)],
        {"wrong"},
    ),
    "a wrong id": (lambda: [*good(), *_forged()], {"diverged"}),
    "the result says something else": (lambda: [*good()[:-1], result(OTHER)], {"diverged", "wrong"}),
    "the result is short": (lambda: [*good()[:-1], result(TOKENS[:3])], {"wrong"}),
    "the text is another": (lambda: [*good()[:-1], result(TOKENS) | {"text": "no"}], {"wrong"}),
    "a reader has another text": (lambda: [*good(), *reading("x", ALL), end("x", 5) | {"text": "ye"}], {"wrong"}),
    "a reader is told of another call": (
        lambda: [*good(), *reading("x", ALL), end("x", 5) | {"calls": []}],
        {"diverged", "wrong"},
    ),
    "all are told of a wrong call": (
        lambda: [*submitted(), *reading("one", ALL), end("one", 5) | {"calls": CALLS * 2}, result(TOKENS)],
        {"wrong"},
    ),
    "an error for nothing": (lambda: [*good()[:-1], result([], "internal_error")], {"diverged", "wrong"}),
    "the result ends in another way": (
        lambda: [*submitted("cancelled"), *good()[2:-1], result(TOKENS[:2], "cancelled")],
        {"diverged"},
    ),
    "a dead letter for nothing": (lambda: [*good(), {"what": "dead", "id": "a", "reason": "x"}], {"wrong"}),
}


def _forged() -> Entries:
    """The right tokens, the last under an event id that is not theirs."""
    entries = [*reading("x", ALL), end("x", 5)]
    entries[4]["event"] = event_id(4, START_HASH)
    return entries


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found(name: str) -> None:
    history, expected = BROKEN[name]
    assert kinds(history()) == expected


@pytest.mark.parametrize(("away", "found"), [(0.0, set()), (2e-6, set()), (1e-4, {"wrong"}), (float("nan"), {"wrong"})])
def test_vectors_of_other_batches_are_equal_but_for_rounding(away: float, found: set[str]) -> None:
    def name(number: float) -> str:
        numbers = np.array([0.5, number, -0.5], "<f4")
        return name_vectors(Vectors.pack_floats(numbers.tobytes(), 3), is_rounded=True)

    history = [one | {"text": name(0.25)} if "text" in one else one for one in good()]
    history[-1]["text"] = name(0.25 + away)
    assert kinds(history) == found
