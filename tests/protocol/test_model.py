"""Every state that a few mishaps can lead to keeps the promises; and each rule is there for a reason."""

import re
from functools import cache

import pytest

from tests.protocol.model import Found, explore, told
from tests.protocol.scenarios import FLAWS, QUICK, Scenario
from tests.protocol.state import Budget, Rules

REPLIES = {
    "claim": "claim ended busy bound conflict",
    "attach": "busy",
    "take over": "claim busy gone",
    "renew": "0 1 3",
    "append": "0 1 2",
    "finish": "0 whole cancelled late failed exhausted",
    "handed": "0 1",
    "release": "1",
    "fail": "0 1",
    "set aside": "0 1",
    "stop": "0 1",
    "cancel": "0 1",
}
SILENT = """
poll, computed, written, hand off, hand off alone, result, drop, retry, lost, doubt, preempt, give up, expire, late,
stop, leave, lease over, redeliver, move, crash, sync, lose
"""
KINDS = {f"{name}: {reply}" for name, replies in REPLIES.items() for reply in replies.split()}
KINDS |= set(re.split(r",\s+", SILENT.strip()))
"""Every kind of step, with what the scripts may reply. Explored, and replayed on a server."""
WAITING = ("an answer of three", "stopped", "failing")
"""Where a crash at a bad moment leaves a request to the bus alone, until that finds out."""


@cache
def explored(name: str) -> Found:
    return explore(QUICK[name].first(), QUICK[name].rules)


def traces(found: Found) -> list[str]:
    return [f"{fault}: {', '.join(map(told, trace))}" for fault, trace in found.faults.items()]


@cache
def sound(left: Budget) -> list[str]:
    """What is found where no rule is left out."""
    return traces(explore(Scenario(left).first(), Rules()))


@pytest.mark.parametrize("name", QUICK)
def test_every_state_keeps_the_promises_and_leads_to_one_result(name: str) -> None:
    found = explored(name)
    assert not traces(found)
    if name in WAITING:
        assert found.num_waiting < found.num_states / 50
        assert "crash" in [step.kind for step in found.waiting]
    else:
        assert not found.num_waiting, [told(step) for step in found.waiting]


@pytest.mark.parametrize(("flaw", "fault"), FLAWS)
def test_a_rule_left_out_is_noticed(flaw: str, fault: str) -> None:
    left = FLAWS[flaw, fault]
    assert fault in explore(Scenario(left).first(), Rules(flaw=flaw), until=fault).faults
    assert not sound(left)


def test_what_three_mishaps_at_once_can_cost() -> None:
    """Redis loses the binding, and a delivery that the bus has moved away is bound by who had it: the answer is in the
    log, and nobody brings its result.
    """
    found = explore(Scenario(Budget(losses=1, moves=1, pauses=1)).first(), Rules())
    assert list(found.faults) == ["stuck"], traces(found)
    assert not sound(Budget(losses=1, moves=1))


def test_every_kind_of_step_is_explored() -> None:
    seen = frozenset[str]().union(*(explored(name).kinds for name in QUICK))
    assert seen == KINDS | {"unlist"}
