"""Two regions of real servers under faults; and what a round of them would find."""

import json
from pathlib import Path

from sim.chaos.checker import check_history
from sim.chaos.history import History, read_history
from sim.chaos.two_regions import (
    Reading,
    RegionsRound,
    find_accepted_twice,
    name_events,
    note_event,
    prepare_asked,
    run_regions,
)
from sim.events import ServerSentEvent
from sim.workload import ExpectedAnswer

ANSWER = ExpectedAnswer([7, 8, 9], "abc", "length")


def find_kinds(path: Path, *readers: list[str]) -> set[str]:
    """Return the kinds of findings where readers see events with these ids."""
    with History(path) as history:
        told = {"tokens": ANSWER.token_ids, "text": ANSWER.text, "finish": "length"}
        history.add_entry("submitted", id="1-eu", calls=[], may=[], **told)
        for number, ids in enumerate(readers):
            reading = Reading(str(number), ANSWER)
            for one, text in zip(ids, "abc", strict=True):
                data = {"choices": [{"text": text, "finish_reason": "length" if text == "c" else None}]}
                note_event(history, "1-eu", ServerSentEvent(one, data=json.dumps(data)), reading)
            history.add_entry(
                "end", id="1-eu", reader=reading.name, finish=reading.finish, count=None, error=None,
                text="".join(reading.texts), calls=[],
            )  # fmt: skip
    return {finding.kind for finding in check_history(read_history(path))}


def test_a_token_under_another_id_one_twice_and_one_that_is_missing_are_found(tmp_path: Path) -> None:
    right, other = name_events((7, 8, 9)), name_events((7, 1, 9))
    assert find_kinds(tmp_path / "right", right, right) == set()
    assert find_kinds(tmp_path / "other", right, other) == {"diverged", "wrong"}
    assert find_kinds(tmp_path / "twice", [right[0], right[0], right[2]]) >= {"duplicated", "lost"}


def test_a_post_that_two_regions_accepted_is_found() -> None:
    accepted = [("1", "cmpl-1-eu"), ("1", "cmpl-1-eu"), ("2", "cmpl-2-us"), ("3", "cmpl-3-eu"), ("3", "cmpl-4-us")]
    (found,) = find_accepted_twice(accepted)
    assert (found.kind, found.id) == ("duplicated", "cmpl-3-eu")


def test_two_regions_answer_everything_while_workers_and_gateways_die(tmp_path: Path) -> None:
    outcome = run_regions(RegionsRound(1, 0.0, workers=1, faults=("kill worker", "kill gateway")), tmp_path)
    assert outcome.findings == []
    assert outcome.counts["kill worker"] == outcome.counts["kill gateway"] == 1
    assert outcome.counts["sent on"] > 0
    assert outcome.requests >= len(prepare_asked()) // 2
