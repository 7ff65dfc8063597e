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
from typing import NamedTuple

from sim.protocol.canonical import canonicalize_state
from sim.protocol.promises import find_violation, is_over
from sim.protocol.scenarios import DEEP, FLAWS, QUICK, Scenario
from sim.protocol.state import Rules, State, Step
from sim.protocol.steps import generate_steps


class Exploration(NamedTuple):
    """The outcome of an exploration. `faults` has, for each fault, the trace to its first state."""

    num_states: int
    faults: dict[str, list[Step]]
    kinds: frozenset[str]
    """The kinds of all steps that were taken."""


def explore_states(first: State, rules: Rules, until: str = "") -> Exploration:
    """Visit every state that can be reached; with `until`, stop at the first state with that fault."""
    visited = _StateGraph(rules)
    visited.add_state(first, 0, Step("start"))
    for number, state in enumerate(visited.order):
        if until in visited.faults:
            break
        visited.expand_state(number, state)
    else:
        visited.find_stuck_state()
    return visited.summarize_exploration()


class _StateGraph:
    """All states in the order in which they were found, and the steps between them."""

    def __init__(self, rules: Rules) -> None:
        self._is_fenced, self._are_alike = rules.flaw != "appends by anybody", len(set(rules.stays)) == 1
        self._rules = rules
        self.order: list[State] = []
        self._numbers: dict[State, int] = {}
        self._came: list[tuple[int, Step]] = []
        self._back: list[list[int]] = []
        self._kinds: set[str] = set()
        self.faults: dict[str, list[Step]] = {}

    def add_state(self, state: State, before: int, step: Step) -> None:
        """Add a state, and the step that led to it from the state with the number `before`."""
        state = canonicalize_state(state, self._is_fenced, self._are_alike)
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.order)
            self.order.append(state)
            self._came.append((before, step))
            self._back.append([])
        self._back[number].append(before)

    def expand_state(self, number: int, state: State) -> None:
        """Take every step from a state, and note what each one violates."""
        for step, after in generate_steps(state, self._rules):
            self._kinds.add(describe_step(step))
            if after is not state:
                fault = find_violation(state, step, after)
                if fault and fault not in self.faults:
                    self.faults[fault] = [*self._build_trace(number), step]
                self.add_state(after, number, step)

    def find_stuck_state(self) -> None:
        """Note the fault `stuck` if from some state no step leads to a good end."""
        todo = [number for number, state in enumerate(self.order) if is_over(state, self._rules)]
        can = set(todo)
        while todo:
            fresh = set(self._back[todo.pop()]) - can
            can |= fresh
            todo += fresh
        stuck = next((number for number in range(len(self.order)) if number not in can), None)
        if stuck is not None:
            self.faults["stuck"] = self._build_trace(stuck)

    def summarize_exploration(self) -> Exploration:
        """Return the verdict of the exploration."""
        return Exploration(len(self.order), self.faults, frozenset(self._kinds))

    def _build_trace(self, number: int) -> list[Step]:
        found: list[Step] = []
        while number:
            number, step = self._came[number]
            found.append(step)
        return found[::-1]


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
