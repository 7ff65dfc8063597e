"""An explicit-state model of one request's life: two prefill and two decode workers, a bus, and the record in Redis.

`explore` visits every state that a number of mishaps can lead to, and checks in each of them what is promised:

    1. at most one result; a second one only after Redis lost something
    2. at most one end, which counts the tokens before it; nothing is said after it, and nothing is taken back
    3. a token is written by the newest holder, and goes on from the tokens that are there
    4. a result says what the end says, and there is none without an end
    5. who is given up as poison has a dead letter
    6. from every state some continuation ends with a result, everything settled, and nobody holds the request
    7. where the bus never finds out who is dead, or which member does not read, the answer is still in the log with its
       end: others go on

`python -m sim.protocol.model` explores deeper than the tests do.
"""

import time
from typing import NamedTuple

from sim.protocol.canonical import canonical
from sim.protocol.promises import is_over, wrong
from sim.protocol.scenarios import DEEP, FLAWS, QUICK, Scenario
from sim.protocol.state import Rules, State, Step
from sim.protocol.steps import steps


class Found(NamedTuple):
    """What an exploration came to. A trace leads to the first state of its kind."""

    num_states: int
    faults: dict[str, list[Step]]
    kinds: frozenset[str]
    """All kinds of steps that were taken."""


def explore(first: State, rules: Rules, until: str = "") -> Found:
    """Visit every state, or all up to the first fault of a kind."""
    visited = _Visited(rules)
    visited.see(first, 0, Step("start"))
    for number, state in enumerate(visited.order):
        if until in visited.faults:
            break
        visited.go_on(number, state)
    else:
        visited.look_for_stuck()
    return visited.found()


class _Visited:
    """States in the order in which they were found, and how each was."""

    def __init__(self, rules: Rules) -> None:
        self._rules, self._is_fenced = rules, rules.flaw != "appends by anybody"
        self.order: list[State] = []
        self._numbers: dict[State, int] = {}
        self._came: list[tuple[int, Step]] = []
        self._back: list[list[int]] = []
        self._kinds: set[str] = set()
        self.faults: dict[str, list[Step]] = {}

    def see(self, state: State, before: int, step: Step) -> None:
        """Note a state, and where it was come to from."""
        state = canonical(state, self._is_fenced)
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.order)
            self.order.append(state)
            self._came.append((before, step))
            self._back.append([])
        self._back[number].append(before)

    def go_on(self, number: int, state: State) -> None:
        """Take every step from a state."""
        for step, after in steps(state, self._rules):
            self._kinds.add(told(step))
            if after is not state:
                fault = wrong(state, step, after)
                if fault and fault not in self.faults:
                    self.faults[fault] = [*self._trace(number), step]
                self.see(after, number, step)

    def look_for_stuck(self) -> None:
        """Note each state from which nothing leads to a good end."""
        todo = [number for number, state in enumerate(self.order) if is_over(state, self._rules)]
        can = set(todo)
        while todo:
            fresh = set(self._back[todo.pop()]) - can
            can |= fresh
            todo += fresh
        stuck = next((number for number in range(len(self.order)) if number not in can), None)
        if stuck is not None:
            self.faults["stuck"] = self._trace(stuck)

    def found(self) -> Found:
        """The sum of it."""
        return Found(len(self.order), self.faults, frozenset(self._kinds))

    def _trace(self, number: int) -> list[Step]:
        found: list[Step] = []
        while number:
            number, step = self._came[number]
            found.append(step)
        return found[::-1]


def told(step: Step) -> str:
    """A step in a few words."""
    if step.call and step.call[0] == "finish" and step.reply:
        return f"finish: {step.call[2].error or 'whole'}"
    match step.reply:
        case ("claim", _, _, True, *_):
            return f"{step.kind}: ended"
        case (str(kind), *_):
            return f"{step.kind}: {kind}"
        case None:
            return step.kind
    return f"{step.kind}: {step.reply}"


def main() -> None:
    """Explore everything, and say what is found."""
    flawed = {f"flaw: {flaw}": Scenario(left, rules._replace(flaw=flaw)) for (flaw, _), (left, rules) in FLAWS.items()}
    for name, scenario in (QUICK | flawed | DEEP).items():
        begun_s = time.process_time()
        found = explore(scenario.first(), scenario.rules)
        print(f"{name}: {found.num_states:,} states, {time.process_time() - begun_s:.1f} s")  # noqa: T201
        for fault, trace in found.faults.items():
            print(f"    {fault}: {', '.join(map(told, trace))}")  # noqa: T201


if __name__ == "__main__":
    main()
