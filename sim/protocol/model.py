"""An explicit-state model of one request's life: two prefill and two decode workers, a bus, and the record in Redis.

`explore_states` visits every state that a number of mishaps can lead to, and checks in each of them what is promised:

    1. at most one result; a second one only after Redis lost something. Also where brokers forget what was committed
    2. at most one end, with the number of tokens before it; no token follows it, and no token is removed
    3. a token is written by the newest holder, and continues the tokens in the log
    4. a result equals the end in the log, and there is none without an end
    5. a request that is given up as poison has a dead letter
    6. from every state some continuation ends with a result, or with an end in the log where the bus deleted the
       request, everything settled, and nobody holds the request
    7. where the bus never notices that a member is dead or does not read, other workers still bring the answer and its
       end into the log

`python -m sim.protocol.model` explores deeper than the tests do.
"""

import time

from sim.protocol.canonical import canonicalize_state
from sim.protocol.graph import Exploration, Model, explore_model
from sim.protocol.promises import find_violation, is_over
from sim.protocol.scenarios import DEEP, FLAWS, QUICK, Scenario
from sim.protocol.state import Rules, State, Step
from sim.protocol.steps import generate_steps


def explore_states(first: State, rules: Rules, until: str = "") -> Exploration[Step]:
    """Visit every state that can be reached; with `until`, stop at the first state with that fault."""
    is_fenced, are_alike = rules.flaw != "appends by anybody", len(set(rules.stays)) == 1
    model = Model(
        generate_steps=lambda state: generate_steps(state, rules),
        find_violation=find_violation,
        is_over=lambda state: is_over(state, rules),
        describe_step=describe_step,
        canonicalize=lambda state: canonicalize_state(state, is_fenced, are_alike),
    )
    return explore_model(model, first, until)


def describe_step(step: Step) -> str:
    """Return the kind of a step and the reply of its script."""
    if step.call and step.call[0] == "finish" and step.reply:
        return f"finish: {step.call[2].error or 'whole'}"
    match step.reply:
        case ("claim", _, _, int(ended), *_) if ended:
            return f"{step.kind}: {'unbound' if ended == 2 else 'ended'}"
        case (str(kind), *_):
            return f"{step.kind}: {kind}"
        case int(reply):
            return f"{step.kind}: {reply:d}"
    return step.kind


def main() -> None:
    """Explore all scenarios, and print the verdicts."""
    flawed = {f"flaw: {flaw}": Scenario(left, rules._replace(flaw=flaw)) for (flaw, _), (left, rules) in FLAWS.items()}
    for name, scenario in (QUICK | flawed | DEEP).items():
        begun_s = time.process_time()
        found = explore_states(scenario.make_start_state(), scenario.rules)
        print(f"{name}: {found.num_states:,} states, {time.process_time() - begun_s:.1f} s")  # noqa: T201
        for fault, trace in found.faults.items():
            print(f"    {fault}: {', '.join(map(describe_step, trace))}")  # noqa: T201


if __name__ == "__main__":
    main()
