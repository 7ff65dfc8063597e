"""What a round in which a region dies and is adopted would find."""

from typing import Any

import pytest

from sim.chaos.adopted_region import Adoption, judge_history
from sim.chaos.checker import check_history
from sim.chaos.two_regions import name_events

Entries = list[dict[str, Any]]


def result(region: str, *tokens: int, **more: Any) -> dict[str, Any]:
    fields = {"tokens": list(tokens), "text": "", "finish": "length", "error": None, "count": len(tokens)}
    return {"what": "result", "id": "one", "region": region, **fields, **more}


def find_kinds(entries: Entries, adoption: Adoption) -> list[str]:
    """Return the kinds of findings in a history about the request `one`."""
    told = {"what": "submitted", "id": "one", "tokens": [7, 8], "text": "", "finish": "length", "may": [], "calls": []}
    kept, found, _ = judge_history([told, {"what": "accepted", "id": "one"}, *entries], [adoption])
    return [finding.kind for finding in (*found, *check_history(kept))]


def make_adoption(*home_results: str, was_killed: bool = True) -> Adoption:
    return Adoption(was_killed, {"one"}, 0.5, home_results={*home_results})


@pytest.mark.parametrize(
    ("entries", "adoption", "kinds"),
    [
        ([result("us", 7, 8)], make_adoption(), []),
        ([], make_adoption(), ["lost"]),
        # Written before it died, and not copied: the promise allows it.
        ([result("eu", 7, 8), result("us", 7, 8)], make_adoption("one"), []),
        ([result("eu", 7, 8), result("us", 7, 8)], make_adoption(was_killed=False), []),
        ([result("eu", 7, 8), result("us", 7, 8)], make_adoption(), ["duplicated"]),
        ([result("us", 7, 8), result("us", 7, 8)], make_adoption("one"), ["duplicated"]),
        ([result("eu", 7, 9, text="b"), result("us", 7, 8)], make_adoption("one"), ["diverged"]),
    ],
)
def test_two_results_are_allowed_where_the_promise_says_so(
    entries: Entries, adoption: Adoption, kinds: list[str]
) -> None:
    assert find_kinds(entries, adoption) == kinds


def test_a_reader_may_end_with_the_typed_error_but_sees_no_other_token() -> None:
    ended: Entries = [
        {"what": "token", "id": "one", "reader": "first", "event": name_events((7,))[0], "token": 7},
        {"what": "answer_interrupted", "id": "one", "reader": "first"},
        result("us", 7, 8),
    ]
    assert find_kinds(ended, make_adoption()) == []
    assert find_kinds(ended[::2], make_adoption()) == ["stuck"]
    assert find_kinds([{**ended[0], "token": 2**32 - 1}, *ended[1:]], make_adoption()) == ["diverged"]
