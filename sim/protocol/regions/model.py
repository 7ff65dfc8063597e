"""An explicit-state model of one request among regions: its home, the hops to it, and adoption by a peer.

It is a model of its own, beside that of a request inside a region. That one shows that an accepted request gets one
result from its region's bus; here this is one step, and a region is what it accepted and answered. Both as one would
multiply millions of states inside each region by those between them.

`explore_scenario` visits every state that a number of mishaps can lead to, and checks what docs/regions.md promises:

    1. one POST, or all POSTs with one key, are accepted once
    2. nothing is sent on more than twice
    3. at most one result; a second one only where the page tells of it
    4. never other tokens under one id
    5. from every state some continuation ends each POST, and answers what was accepted. A home that never returns is
       excused if the region that adopted it has no copy of the request
    6. no gateway says of an accepted request that there is none

`python -m sim.protocol.regions.model` explores all scenarios.
"""

import time

from sim.protocol.graph import Exploration, Model, explore_model
from sim.protocol.regions.adopting import generate_region_steps
from sim.protocol.regions.mishaps import generate_mishaps
from sim.protocol.regions.posting import generate_posting_steps
from sim.protocol.regions.promises import find_violation, is_over
from sim.protocol.regions.reading import generate_reads
from sim.protocol.regions.scenarios import DEEP, FLAWS, QUICK, Scenario
from sim.protocol.regions.state import Step


def explore_scenario(scenario: Scenario, flaw: str = "", until: str = "") -> Exploration[Step]:
    """Visit every state of a scenario, with a flaw or none; with `until`, stop at the first state with that fault."""
    rules = scenario.rules._replace(flaw=flaw)
    model = Model(
        generate_steps=lambda state: [
            *generate_posting_steps(state, rules),
            *generate_region_steps(state, rules),
            *generate_reads(state, rules),
            *generate_mishaps(state, rules),
        ],
        find_violation=find_violation,
        is_over=is_over,
        describe_step=lambda step: step.kind,
        canonicalize=lambda state: state,
    )
    return explore_model(model, scenario.make_start_state(), until)


def describe_trace(trace: list[Step]) -> str:
    """Return the steps of a trace with their regions, as text."""
    return ", ".join(f"{step.kind} ({step.region})" for step in trace)


def main() -> None:
    """Explore all scenarios and flaws, and print the verdicts."""
    for name, scenario in (QUICK | DEEP).items():
        _print_verdict(name, scenario)
    for (flaw, fault), scenario in FLAWS.items():
        _print_verdict(f"flaw: {flaw}", scenario, flaw, fault)


def _print_verdict(name: str, scenario: Scenario, flaw: str = "", until: str = "") -> None:
    begun_s = time.process_time()
    found = explore_scenario(scenario, flaw, until)
    print(f"{name}: {found.num_states:,} states, {time.process_time() - begun_s:.1f} s", flush=True)  # noqa: T201
    for fault, trace in found.faults.items():
        print(f"    {fault}: {describe_trace(trace)}")  # noqa: T201


if __name__ == "__main__":
    main()
