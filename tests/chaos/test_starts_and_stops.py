"""Workers that are started and stopped all the time, and controllers that are killed and cut off, in rounds."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from sim.chaos.checker import Entry
from sim.chaos.controllers import CONTROLLERS, find_swings
from sim.chaos.faults import CONTROLLER_FAULTS, Fault, generate_controller_faults, generate_starts_and_stops
from sim.chaos.runner import ChaosRound, run_round
from sim.waiting import PATIENCE_S

WORKERS = [f"auto-{number}" for number in range(4)]


def test_everything_is_answered_while_workers_come_and_go(tmp_path: Path) -> None:
    plan = ChaosRound(
        seed=5, bus="embedded", seconds=PATIENCE_S, prefill=0, decode=0, auto=2, num_in_flight=4, starts_and_stops=6
    )
    outcome = run_round(plan, tmp_path / "round")
    assert outcome.findings == []
    assert outcome.counts.starts_and_stops >= 6
    assert outcome.requests > 0


def count_running(faults: Sequence[Fault]) -> list[int]:
    """Return how many workers run after each time at which some start or stop."""
    running, counts = set(WORKERS), dict[float, int]()
    for fault in faults:
        assert (fault.target in running) == (fault.what in ("stop", "kill"))
        running ^= {fault.target}
        counts[fault.at_s] = len(running)
    return list(counts.values())


def test_workers_go_to_none_and_come_again() -> None:
    faults = list(islice(generate_starts_and_stops(3, WORKERS), 300))
    counts = count_running(faults)
    assert {0, 1, 2, 3, 4} == set(counts)
    assert {fault.what for fault in faults} == {"start", "stop", "kill"}
    assert faults == list(islice(generate_starts_and_stops(3, WORKERS), 300))


def test_one_controller_and_all_are_killed_and_cut_off() -> None:
    faults = list(islice(generate_controller_faults(2, CONTROLLERS, 12.0), CONTROLLER_FAULTS))
    assert {"crash"} < {fault.what for fault in faults} <= {"crash", "hang", "refuse"}
    assert {(one.what == "crash", one.target) for one in faults} == {
        (is_crash, name) for is_crash in (True, False) for name in CONTROLLERS
    }
    at_once = [{two.target for two in faults if two.at_s == one.at_s} for one in faults]
    assert set(CONTROLLERS) in at_once
    assert {CONTROLLERS[0]} in at_once
    assert {CONTROLLERS[1]} in at_once


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([3], ""),
        ([4, 3], ""),
        ([4, 3, 4], "swings"),
        ([3, 2], ""),
        ([1], "several"),
    ],
)
def test_a_swing_is_told(numbers: list[int], told: str) -> None:
    history: list[Entry] = [
        *({"what": "number", "number": one} for one in (1, 5, 3)),
        {"what": "fault"},
        *({"what": "number", "number": one} for one in numbers),
        {"what": "calm"},
        {"what": "number", "number": 1},
    ]
    found = list(find_swings(history))
    assert (told in found[0]) if told else found == []


def test_a_load_that_one_worker_holds_says_nothing() -> None:
    assert list(find_swings([{"what": "number", "number": 1}, {"what": "fault"}, {"what": "calm"}]))
