"""Every state that a few mishaps can lead to keeps the promises; and each rule is there for a reason."""

import re
from functools import cache

import pytest

from sim.protocol.graph import Exploration
from sim.protocol.model import describe_step, explore_states
from sim.protocol.scenarios import FLAWS, QUICK, Scenario
from sim.protocol.state import Budget, Rules, Step
from tests.draws import WHOLE, draw_cases

REPLIES = {
    "claim": "claim ended unbound busy bound conflict",
    "attach": "busy",
    "park": "parked busy bound conflict",
    "take": "claim gone",
    "renew": "lost",
    "append": "0 1 2",
    "finish": "0 whole cancelled late failed exhausted pictures",
    "handed": "0 1",
    "give back": "0 1",
    "pass on": "0 1",
    "release": "0 1",
    "fail": "0 1",
    "set aside": "0 1",
    "stop": "0 1",
    "cancel": "0 1",
    "unread": "0 1",
}
SILENT = """
poll, computed, written, publish, hand off, hand off alone, result, drop, retry, lost, doubt, preempt, give up, expire,
late, stop, leave, reap, due, let go, hear, forget, redeliver, move, blind, crash, sync, lose, note, forget commits,
delete
"""
KINDS = {f"{name}: {reply}" for name, replies in REPLIES.items() for reply in replies.split()}
KINDS |= set(re.split(r",\s+", SILENT.strip()))
"""Every kind of step, with what the scripts may reply."""
NOT_REPLAYED = {"unread: 0", "unread: 1", "note", "forget commits", "delete"}
"""What gateways and buses do. All others are replayed on a server, too."""


def describe_traces(found: Exploration[Step]) -> list[str]:
    return [f"{fault}: {', '.join(map(describe_step, trace))}" for fault, trace in found.faults.items()]


@cache
def explore_without_flaw(left: Budget, rules: Rules) -> list[str]:
    """Return the faults that are found when no rule is left out."""
    return describe_traces(explore_states(Scenario(left).make_start_state(), rules))


def test_every_state_keeps_the_promises_and_leads_to_one_result() -> None:
    """And of the kinds of steps all are explored."""
    kinds, faults = set[str](), dict[str, list[str]]()
    for name, scenario in draw_cases(QUICK.items(), 20):
        found = explore_states(scenario.make_start_state(), scenario.rules)
        kinds |= found.kinds
        faults |= {name: describe_traces(found)} if found.faults else {}
    assert faults == {}
    assert kinds == KINDS if WHOLE else kinds <= KINDS


LONG = ("claims what it does not hold", "stuck")
"""A rule whose scenario has ten times as many states as the others'."""


@pytest.mark.parametrize(("flaw", "fault"), [one for one in draw_cases(FLAWS, 8) if WHOLE or one != LONG])
def test_a_rule_left_out_is_noticed(flaw: str, fault: str) -> None:
    left, rules = FLAWS[flaw, fault]
    assert fault in explore_states(Scenario(left).make_start_state(), rules._replace(flaw=flaw), until=fault).faults
    assert not explore_without_flaw(left, rules)
