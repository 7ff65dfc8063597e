"""The decisions of the autoscaler: numbers of workers from what was seen, without I/O or clock.

    up        at once, less those that are starting. A start that takes three times as long as its kind's does not count
    down      one at a time, if the load fits one worker less in three windows of 30 s, and nothing is starting
    zero      all kinds together, when nothing is open and nothing has arrived for a set time

Each decision begins from the workers that there are, so numbers that an operator sets are believed. A worker that
vanished without a goodbye counts as starting again. Where a signal is missing nothing goes down.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from penstock.autoscale.sizing import BATCH_WINDOW_S, Load, Need, Speed, Targets, predict_p99_s, size_kind
from penstock.autoscale.windows import LoadWindows, Passed
from penstock.names import WorkerKind

WINDOW_S, NUM_WINDOWS = 30.0, 3
"""The load has to fit one worker less in so many windows of this length before one goes."""
DEAD_BAND = 1.12
"""A worker goes only if the load would fit without it were there so many times the arrivals: 5% of noise in both
directions, and a little more.
"""
PATIENCE = 3.0
"""A start that takes so many times as long as its kind's usual one does not count any more."""
FIRST_START_S = 30.0
"""Seconds that a start is taken to last until one was seen."""
MIN_PATIENCE_S = 15.0
"""The shortest time for which a start counts: looks are five seconds apart."""
LEAVING_S = 600.0
"""A worker that was told to go, and is still there after so long, is kept by an operator: it counts again."""


class Workers(NamedTuple):
    """The workers of one kind, as their heartbeats tell."""

    ready: tuple[str, ...] = ()
    """The names of those that serve."""
    loading_s: tuple[float, ...] = ()
    """For how long each of the others has been starting."""
    lost: int = 0
    """How many vanished without a goodbye since the last look."""


@dataclass(frozen=True)
class Seen:
    """The findings of one look."""

    at_s: float
    workers: Mapping[WorkerKind, Workers]
    passed: Passed | None
    """Arrivals and prompts since the last look; None where they are not known."""
    num_open: int
    """Messages that are not settled."""
    load: Load | None
    """The load, of which the windows' rates and means are filled in; None where a part of it is not known."""
    speed: Speed | None
    missing: tuple[str, ...] = ()
    """The signals that are missing, in words."""


@dataclass(frozen=True)
class Bounds:
    """Limits of the numbers."""

    least: int = 0
    """The fewest workers of all kinds together; with 0 they go to zero."""
    most: int | None = None
    """The most workers of all kinds together."""
    zero_after_s: float = 300.0


@dataclass
class KindState:
    """The controller's memory of one kind."""

    ready: list[str] = field(default_factory=list)
    """The names of those that served at the last look."""
    asked: list[float] = field(default_factory=list)
    """When each start was asked for that is not over."""
    leaving: list[float] = field(default_factory=list)
    """When each worker was told to go that is still there."""
    needs: list[int] = field(default_factory=list)
    """The needs of the last windows, with the dead band."""
    number: int = 0
    """The last decision."""
    start_s: float = FIRST_START_S
    """How long its last start took."""
    loading_s: float = 0.0
    """How long the oldest of those that started had been doing so at the last look."""
    is_stuck: bool = False
    """Whether the last start that ended did so without a worker."""


@dataclass(frozen=True)
class Decision:
    """Numbers of workers by kind, and why."""

    at_s: float
    numbers: dict[WorkerKind, int]
    reasons: dict[WorkerKind, str]
    alerts: tuple[str, ...] = ()
    predicted_p99_s: float | None = None
    """The 99th percentile of the time to first token, as simulated for the workers that serve now."""
    starting: dict[WorkerKind, int] = field(default_factory=dict)


class Controller:
    """Decides for one pipeline. Its state can be written down, and another process goes on with it."""

    def __init__(self, targets: Targets, bounds: Bounds, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self._targets, self._bounds = targets, bounds
        self._windows = LoadWindows(state.get("passed", ()))
        self._kinds: dict[WorkerKind, KindState] = {
            kind: KindState(**one) for kind, one in state.get("kinds", {}).items()
        }
        self._window_ends_s: float | None = state.get("window_ends_s")
        self._busy_s: float | None = state.get("busy_s")
        """When something was open or arrived the last time."""
        self._batch_since_s: float | None = state.get("batch_since_s")

    def export_state(self) -> dict[str, Any]:
        """Return the state, as JSON has it."""
        return {
            "passed": self._windows.export_passed(),
            "kinds": {kind: asdict(one) for kind, one in self._kinds.items()},
            "window_ends_s": self._window_ends_s,
            "busy_s": self._busy_s,
            "batch_since_s": self._batch_since_s,
        }

    def list_ready(self) -> dict[WorkerKind, list[str]]:
        """Return the names of the workers that served at the last look."""
        return {kind: state.ready for kind, state in self._kinds.items()}

    def decide_numbers(self, seen: Seen) -> Decision:
        """Return the numbers of workers, and remember what was asked for."""
        now_s = seen.at_s
        if seen.passed is not None:
            self._windows.add_passed(seen.passed)
        if self._busy_s is None or seen.num_open or seen.passed is None or seen.passed.arrived:
            self._busy_s = now_s
        for kind, workers in seen.workers.items():
            _note_workers(self._kinds.setdefault(kind, KindState()), workers, now_s)
        if not self._kinds:
            self._kinds["auto"] = KindState()
        alerts = [*seen.missing, *(f"a start of kind {kind} is not over" for kind in self._list_stuck())]
        if self._is_idle(seen):
            return self._go_to_zero(now_s, alerts)
        load, is_window_over = self._fill_in(seen), self._close_window(now_s)
        numbers, reasons = dict[WorkerKind, int](), dict[WorkerKind, str]()
        for kind in self._list_scaled():
            numbers[kind], reasons[kind], is_hopeless = self._size(kind, seen, load, is_window_over=is_window_over)
            if is_hopeless:
                alerts.append(f"prompts alone take longer than {self._targets.ttft_s:g} s: more workers do not help")
        self._keep_bounds(numbers, reasons)
        for kind, number in numbers.items():
            self._ask(self._kinds[kind], number, now_s)
        predicted_s = self._predict(load, seen.speed)
        return Decision(now_s, numbers, reasons, tuple(alerts), predicted_s, self._count_starting())

    def _size(self, kind: WorkerKind, seen: Seen, load: Load | None, *, is_window_over: bool) -> tuple[int, str, bool]:
        """Return how many workers of a kind there should be, why, and whether more of them could not help."""
        state = self._kinds[kind]
        number = self._count_present(state)
        if load is None or seen.speed is None:
            need = Need(int(seen.num_open > 0), "open requests")
            state.needs = []
        else:
            need = size_kind(kind, replace(load, start_s=state.start_s), seen.speed, self._targets)
            if is_window_over:
                state.needs = [*state.needs, self._size_for_less(kind, number, load, seen.speed)][-NUM_WINDOWS:]
        # Where starts do not end, asking for more of them does not help.
        wanted = min(need.number, max(len(state.ready) + 1, state.number)) if state.is_stuck else need.number
        if wanted > number:
            return wanted, f"{need.reason}: {number} to {wanted}", need.is_hopeless
        if is_window_over and self._may_go(state, number, seen):
            needed = f"at most {max(state.needs)} were needed in the last windows"
            return number - 1, f"{needed}: {number} to {number - 1}", need.is_hopeless
        return number, f"{need.reason}; {number} there", need.is_hopeless

    # What there is

    def _list_scaled(self) -> list[WorkerKind]:
        """Return the kinds whose numbers are decided: where there are `auto` workers, these alone."""
        return ["auto"] if "auto" in self._kinds else list(self._kinds)

    def _list_stuck(self) -> list[WorkerKind]:
        return [kind for kind, state in self._kinds.items() if state.is_stuck]

    def _count_starting(self) -> dict[WorkerKind, int]:
        return {kind: len(state.asked) for kind, state in self._kinds.items()}

    def _count_present(self, state: KindState) -> int:
        """Return how many workers of a kind serve or start, without those that were told to go."""
        return max(0, len(state.ready) + len(state.asked) - len(state.leaving))

    def _is_idle(self, seen: Seen) -> bool:
        """Return whether nothing was open and nothing arrived for so long that no worker is needed."""
        assert self._busy_s is not None, "the first look sets it"
        is_known = not seen.missing and seen.passed is not None and not seen.num_open
        return is_known and self._bounds.least == 0 and seen.at_s - self._busy_s >= self._bounds.zero_after_s

    def _fill_in(self, seen: Seen) -> Load | None:
        """Return the load by which numbers go up; None where a part of it is not known."""
        rate, shape = self._windows.rate_up, self._windows.shape
        if seen.load is None or rate is None or shape is None:
            return None
        if not seen.load.batch_s:
            self._batch_since_s = None
        elif self._batch_since_s is None:
            self._batch_since_s = seen.at_s
        waited_s = seen.at_s - (seen.at_s if self._batch_since_s is None else self._batch_since_s)
        return replace(
            seen.load,
            rate=rate,
            steady_rate=self._windows.rate_steady,
            prompt_s=shape.prompt_s,
            prompt_s2=shape.prompt_s2,
            pool_hit_s=shape.hit_s,
            batch_left_s=max(0.0, BATCH_WINDOW_S - waited_s),
            is_open=seen.num_open > 0,
        )

    # Down

    def _close_window(self, now_s: float) -> bool:
        """Return whether a window is over, and begin the next one."""
        if self._window_ends_s is not None and now_s < self._window_ends_s:
            return False
        is_over, self._window_ends_s = self._window_ends_s is not None, now_s + WINDOW_S
        return is_over

    def _size_for_less(self, kind: WorkerKind, number: int, load: Load, speed: Speed) -> int:
        """Return how many workers are needed by the rule for going down, on one worker less than there are."""
        rate = self._windows.rate_down
        assert rate is not None, "as the other rate is"
        load = replace(load, rate=rate * DEAD_BAND, steady_rate=math.inf).spread_over(number - 1, number)
        return size_kind(kind, load, speed, self._targets).number

    def _may_go(self, state: KindState, number: int, seen: Seen) -> bool:
        """Return whether a worker of a kind may go."""
        is_starting = bool(state.asked) and not state.is_stuck
        is_calm = len(state.needs) == NUM_WINDOWS and max(state.needs) <= number - 1
        return is_calm and not is_starting and not seen.missing and number > 1

    def _go_to_zero(self, now_s: float, alerts: list[str]) -> Decision:
        """Let all workers of all kinds go."""
        kinds = list(self._kinds)
        for state in self._kinds.values():
            state.asked, state.needs, state.number = [], [], 0
            state.leaving = [*state.leaving, *[now_s] * (len(state.ready) - len(state.leaving))]
        idle_s = now_s - (self._busy_s or now_s)
        reason = f"nothing is open, and nothing has arrived for {idle_s:.0f} s"
        return Decision(now_s, dict.fromkeys(kinds, 0), dict.fromkeys(kinds, reason), tuple(alerts))

    # Bounds, and what is asked for

    def _keep_bounds(self, numbers: dict[WorkerKind, int], reasons: dict[WorkerKind, str]) -> None:
        """Keep the sum within the bounds: what goes down makes room, and what goes up takes room that there is."""
        first, bounds = next(iter(numbers)), self._bounds
        if (total := sum(numbers.values())) < bounds.least:
            numbers[first] += bounds.least - total
            reasons[first] = f"at least {bounds.least}"
        if bounds.most is None:
            return
        room = bounds.most - sum(len(self._kinds[kind].ready) + len(self._kinds[kind].asked) for kind in numbers)
        for kind, number in numbers.items():
            state = self._kinds[kind]
            wanted = max(0, number - self._count_present(state) - len(state.leaving))  # who was to go may stay
            refused = max(0, wanted - max(0, room))
            room -= wanted - refused
            if refused:
                numbers[kind] -= refused
                reasons[kind] += f", but at most {bounds.most} of all"
        for kind, number in numbers.items():
            if (over := sum(numbers.values()) - bounds.most) > 0:  # the bound was lowered
                numbers[kind] = max(0, number - over)
                reasons[kind] = f"at most {bounds.most} of all"

    def _ask(self, state: KindState, number: int, now_s: float) -> None:
        """Remember the starts and ends that a number asks for."""
        state.number, change = number, number - self._count_present(state)
        if change > 0:
            kept = min(change, len(state.leaving))  # who was to go, and is still there, stays
            state.leaving = state.leaving[kept:]
            state.asked += [now_s] * (change - kept)
            state.needs = []
        else:
            cancelled = min(-change, len(state.asked))
            state.asked = state.asked[: len(state.asked) - cancelled]
            state.leaving += [now_s] * (-change - cancelled)

    def _predict(self, load: Load | None, speed: Speed | None) -> float | None:
        """Return the expected 99th percentile of first tokens with the workers that read requests now."""
        readers = [kind for kind in self._list_scaled() if kind != "decode"]
        num = sum(len(self._kinds[kind].ready) for kind in readers)
        if load is None or speed is None or not num:
            return None
        return predict_p99_s(load, num, self._targets, speed if "auto" in readers else None)


def _note_workers(state: KindState, workers: Workers, now_s: float) -> None:
    """Note which starts are over, and who has gone."""
    come = [name for name in workers.ready if name not in state.ready]
    gone = [name for name in state.ready if name not in workers.ready]
    for _ in come:
        if state.asked:
            state.start_s = now_s - state.asked.pop(0)
        else:  # an operator's, or one that took longer than was expected
            state.leaving, state.needs = [], []
            state.start_s = max(state.start_s, state.loading_s)
    if come:
        state.is_stuck = False
    num_left = max(0, len(gone) - workers.lost)
    if num_left > len(state.leaving):
        state.needs = []
    state.leaving = [at_s for at_s in state.leaving[num_left:] if now_s - at_s < LEAVING_S]
    patience_s = max(MIN_PATIENCE_S, PATIENCE * state.start_s)
    in_time = [at_s for at_s in state.asked if now_s - at_s < patience_s]
    state.is_stuck = state.is_stuck or len(in_time) < len(state.asked)
    num_loading = sum(age_s < patience_s for age_s in workers.loading_s)
    state.asked = [*in_time, *[now_s] * max(0, num_loading - len(in_time)), *[now_s] * workers.lost]
    state.ready, state.loading_s = list(workers.ready), max(workers.loading_s, default=0.0)
