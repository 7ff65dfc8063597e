"""Visits every state that a model can reach, and finds the first state that breaks a promise."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

StateT = TypeVar("StateT", bound=Hashable)
StepT = TypeVar("StepT")


class Exploration(NamedTuple, Generic[StepT]):
    """The outcome of an exploration. `faults` has, for each fault, the trace to its first state."""

    num_states: int
    faults: dict[str, list[StepT]]
    kinds: frozenset[str]
    """The kinds of all steps that were taken."""


class Model(NamedTuple, Generic[StateT, StepT]):
    """A model: its steps, its promises, and which states are good ends."""

    generate_steps: Callable[[StateT], Iterable[tuple[StepT, StateT]]]
    find_violation: Callable[[StateT, StepT, StateT], str]
    is_over: Callable[[StateT], bool]
    describe_step: Callable[[StepT], str]
    canonicalize: Callable[[StateT], StateT]
    """Maps states with the same future to one of them."""


def explore_model(model: Model[StateT, StepT], first: StateT, until: str = "") -> Exploration[StepT]:
    """Visit every state that can be reached; with `until`, stop at the first state with that fault.

    The fault `stuck` is a state from which no steps lead to a good end.
    """
    visited = _StateGraph(model)
    visited.add_state(first, 0, None)
    for number, state in enumerate(visited.order):
        if until in visited.faults:
            break
        visited.expand_state(number, state)
    else:
        visited.find_stuck_state()
    return Exploration(len(visited.order), visited.faults, frozenset(visited.kinds))


class _StateGraph(Generic[StateT, StepT]):
    """All states in the order in which they were found, and the steps between them."""

    def __init__(self, model: Model[StateT, StepT]) -> None:
        self._model = model
        self.order: list[StateT] = []
        self._numbers: dict[StateT, int] = {}
        self._came: list[tuple[int, StepT | None]] = []
        self._back: list[list[int]] = []
        self.kinds: set[str] = set()
        self.faults: dict[str, list[StepT]] = {}

    def add_state(self, state: StateT, before: int, step: StepT | None) -> None:
        """Add a state, and the step that led to it from the state with the number `before`."""
        state = self._model.canonicalize(state)
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.order)
            self.order.append(state)
            self._came.append((before, step))
            self._back.append([])
        self._back[number].append(before)

    def expand_state(self, number: int, state: StateT) -> None:
        """Take every step from a state, and note what each one violates."""
        model = self._model
        for step, after in model.generate_steps(state):
            self.kinds.add(model.describe_step(step))
            if after is not state:
                fault = model.find_violation(state, step, after)
                if fault and fault not in self.faults:
                    self.faults[fault] = [*self._build_trace(number), step]
                self.add_state(after, number, step)

    def find_stuck_state(self) -> None:
        """Note the fault `stuck` if from some state no step leads to a good end."""
        todo = [number for number, state in enumerate(self.order) if self._model.is_over(state)]
        can = set(todo)
        while todo:
            fresh = set(self._back[todo.pop()]) - can
            can |= fresh
            todo += fresh
        stuck = next((number for number in range(len(self.order)) if number not in can), None)
        if stuck is not None:
            self.faults["stuck"] = self._build_trace(stuck)

    def _build_trace(self, number: int) -> list[StepT]:
        found: list[StepT] = []
        while True:
            number, step = self._came[number]
            if step is None:
                return found[::-1]
            found.append(step)
