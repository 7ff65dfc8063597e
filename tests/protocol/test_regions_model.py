"""Every state that a few mishaps between regions can lead to keeps the promises of docs/regions.md."""

import re

import pytest

from sim.protocol.regions.model import describe_trace, explore_scenario
from sim.protocol.regions.scenarios import FLAWS, QUICK
from tests.draws import WHOLE, draw_cases

KINDS = set(
    re.split(
        r",\s+",
        """
post, send on, no connection, accept, join, join adopted, refuse: region_away, refuse: no room, answer: accepted,
answer: refused, answer: unsure, wait no longer, told: accepted, told: refused, told: unsure,
token, result, abort, copy request, copy result, adopt, probe, withdraw, publish, finish list,
give back, kill, return, listen, hear: no, hear: wait, hear: taken, hear: left, settle again, force, pause, go on,
cut, heal, late, read: home, read: adopted, read: away
""".strip(),
    )
)
"""Every kind of step."""


def test_every_state_keeps_the_promises_and_leads_to_one_result() -> None:
    """And of the kinds of steps all are explored."""
    kinds, faults = set[str](), dict[str, list[str]]()
    for name, scenario in draw_cases(QUICK.items(), 20):
        found = explore_scenario(scenario)
        kinds |= found.kinds
        if found.faults:
            faults[name] = [f"{fault}: {describe_trace(trace)}" for fault, trace in found.faults.items()]
    assert faults == {}
    assert kinds == KINDS if WHOLE else kinds <= KINDS


@pytest.mark.parametrize(("flaw", "fault"), draw_cases(FLAWS, 8))
def test_a_rule_left_out_is_noticed(flaw: str, fault: str) -> None:
    scenario = FLAWS[flaw, fault]
    assert fault in explore_scenario(scenario, flaw, until=fault).faults
    assert not explore_scenario(scenario).faults
