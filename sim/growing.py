"""The simulator's pipeline of `auto` workers with a controller that starts and stops them, in virtual time.

A worker is paid from the moment that its start is asked for until it has gone. A new request goes to the worker with
the least work left of those that serve. One that is told to go hands off what it has not begun, and ends the rest.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from penstock.autoscale.controller import Bounds, Controller, Decision, Seen, Workers
from penstock.autoscale.sizing import Load, Speed, Targets, count_decode, count_prefill, size_kind
from penstock.autoscale.windows import Passed
from penstock.plan.placing import PlacedRequest, RoundRobin, WorkerSpec
from penstock.plan.simulator import Outcome, SimulatedWorker, Simulation
from penstock.plan.trace import compute_quantile

LOOK_S = 5.0
"""How often the controller decides."""
KEPT = 0.98
"""The weight of the past in the mean of an answer's tokens, for each answer that ends."""

Choose = Callable[[float], int]
"""Returns the number of workers that an oracle wants at a time."""


def find_speed(spec: WorkerSpec, targets: Targets, context_tokens: float) -> Speed:
    """Return what a worker decodes within the gap, by its `StepCost`."""
    cost = spec.cost
    row_s = cost.row_s + cost.known_outside_s + cost.context_s * context_tokens
    rows = max(1, min(spec.max_batch, int((targets.gap_s - cost.fixed_s) / row_s)))
    return Speed(rows, cost.fixed_s + rows * row_s, row_s, spec.num_blocks * spec.block_size)


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths of prompts and answers: median and sigma of each."""

    prompt: tuple[float, float]
    answer: tuple[float, float]
    longest: int = 1_000_000
    """The most tokens of a prompt."""

    @property
    def mean_tokens(self) -> float:
        """The mean of prompt and answer together."""
        return sum(median * math.exp(sigma**2 / 2) for median, sigma in (self.prompt, self.answer))

    def make_trace(self, rate: Callable[[float], float], most: float, seconds: float, seed: int) -> list[PlacedRequest]:
        """Return requests of a Poisson process whose rate changes, and is at most `most`."""
        rng, at_s, found = random.Random(seed), 0.0, list[PlacedRequest]()
        while (at_s := at_s + rng.expovariate(most)) < seconds:
            if rng.random() < rate(at_s) / most:
                prompt, answer = (
                    max(2, int(rng.lognormvariate(0, sigma) * median)) for median, sigma in (self.prompt, self.answer)
                )
                found.append(PlacedRequest(f"r{len(found)}", at_s, min(prompt, self.longest), answer))
        return found

    def describe_load(self, spec: WorkerSpec, rate: float) -> Load:
        """Return the load of so many requests a second, as an oracle knows it."""
        token_s = spec.prompt_seconds(spec.max_step_tokens) / spec.max_step_tokens
        (prompt, prompt_sigma), (answer, answer_sigma) = self.prompt, self.answer
        mean, mean_answer = prompt * math.exp(prompt_sigma**2 / 2), answer * math.exp(answer_sigma**2 / 2)
        squares = mean**2 * math.exp(prompt_sigma**2)
        return Load(rate, mean * token_s, squares * token_s**2, mean_answer, mean + mean_answer)


@dataclass(frozen=True)
class PhasedLoad:
    """A load that changes from phase to phase, each of equal length, and that its oracle knows."""

    spec: WorkerSpec
    targets: Targets
    lengths: Lengths
    unit_rate: float
    """Requests a second of a part."""
    parts: Sequence[float]
    """The parts of the phases."""
    phase_s: float

    @property
    def seconds(self) -> float:
        """The length of all phases together."""
        return self.phase_s * len(self.parts)

    def make_trace(self, seed: int) -> list[PlacedRequest]:
        """Return its requests."""
        most = self.unit_rate * max(self.parts)
        return self.lengths.make_trace(
            lambda at_s: self.unit_rate * self._find_part(self.parts, at_s), most, self.seconds, seed
        )

    def count_needed(self) -> list[int]:
        """Return the number of workers that each phase needs, by the controller's formulas."""
        loads = [self.lengths.describe_load(self.spec, self.unit_rate * part) for part in self.parts]
        speed = find_speed(self.spec, self.targets, loads[0].context_tokens)
        return [size_kind("auto", load, speed, self.targets).number for load in loads]

    def make_oracle(self, start_s: float) -> "Choose":
        """Return the choice of who knows the load, where a start takes so long."""
        needed = self.count_needed()
        return lambda now_s: max(self._find_part(needed, at_s) for at_s in (now_s, now_s + start_s + LOOK_S))

    def _find_part(self, values: Sequence[float], at_s: float) -> Any:
        return values[min(len(values) - 1, int(at_s / self.phase_s))]


def find_unit_rate(spec: WorkerSpec, targets: Targets, lengths: Lengths, busy: float) -> float:
    """Return the rate at which one worker is so busy, by the formula of `auto` workers."""
    load = lengths.describe_load(spec, 1.0)
    return busy / (count_prefill(load, targets) + count_decode(load, find_speed(spec, targets, load.context_tokens)))


def count_turns(numbers: Sequence[tuple[float, int]], window_s: float) -> int:
    """Return how often a number turned from up to down or back within so many seconds, at most."""
    steps = [(at_s, after > before) for (_, before), (at_s, after) in pairwise(numbers)]
    turns = [at_s for (_, before), (at_s, after) in pairwise(steps) if before != after]
    return max((sum(at_s <= other_s < at_s + window_s for other_s in turns) for at_s in turns), default=0)


def compare_predictions(
    seen: Sequence[tuple[float, float]], told: Sequence[tuple[float, float | None]], window_s: float
) -> list[float]:
    """Return by what share the predicted p99 of first tokens was off the observed one, in each window but the first.

    `seen` has requests' times and their seconds to the first token, `told` the times of predictions and these.
    """
    found = list[float]()
    for number in range(1, int(told[-1][0] / window_s)):
        low_s, high_s = number * window_s, (number + 1) * window_s
        observed = [taken_s for at_s, taken_s in seen if low_s <= at_s < high_s]
        predicted = [one for at_s, one in told if low_s <= at_s < high_s and one is not None and math.isfinite(one)]
        if observed and predicted:
            found.append(abs(statistics.fmean(predicted) / compute_quantile(observed, 0.99) - 1))
    return found


@dataclass
class Growing:
    """A worker, and its life."""

    worker: SimulatedWorker
    asked_s: float
    ready_s: float
    is_leaving: bool = False
    gone_s: float | None = None


@dataclass
class Grown:
    """What became of the requests, and what was paid for them."""

    outcomes: list[Outcome]
    worker_seconds: float
    numbers: list[tuple[float, int]]
    """The numbers that were asked for, by time."""
    decisions: list[Decision] = field(default_factory=list)


class GrowingSimulation(Simulation):
    """Plays requests against workers whose number a controller decides, or an oracle."""

    def __init__(
        self,
        spec: WorkerSpec,
        targets: Targets,
        bounds: Bounds,
        *,
        start_s: float,
        oracle: Choose | None = None,
        num_first: int = 1,
    ) -> None:
        """`oracle` decides in place of a controller."""
        super().__init__({"auto": (1, spec)}, [RoundRobin()])
        self._spec, self._targets, self._start_s, self._oracle = spec, targets, start_s, oracle
        self._controller = Controller(targets, bounds)
        first = [self.readers[0], *(SimulatedWorker("auto", spec, number) for number in range(1, num_first))]
        self.lives = [Growing(worker, 0.0, 0.0) for worker in first]
        self.readers = first
        self._unplaced: list[Outcome] = []
        self._grown = Grown([], 0.0, [(0.0, num_first)])
        self._arrived, self._num_open = 0, 0
        self._prompts, self._prompt_s, self._prompt_s2 = 0, 0.0, 0.0
        self._mean_output, self._mean_context, self._looked_s = 0.0, 0.0, 0.0
        self._token_s = spec.prompt_seconds(spec.max_step_tokens) / spec.max_step_tokens

    def play_requests(self, requests: Sequence[PlacedRequest], until_s: float) -> Grown:
        """Return what becomes of the requests, and the seconds that workers were paid for until a time."""
        self._at(LOOK_S, self._look)
        self._grown.outcomes = self.run(requests)
        end_s = max(until_s, self._now_s)
        for life in self.lives:
            self._grown.worker_seconds += min(end_s, end_s if life.gone_s is None else life.gone_s) - life.asked_s
        return self._grown

    # Placing

    def _beat(self, number: int) -> None:
        """Tell placers nothing: they see the work that is left."""

    def _place(self, outcome: Outcome) -> None:
        self._arrived += 1
        self._num_open += 1
        self._send(outcome)

    def _send(self, outcome: Outcome) -> None:
        serving = self._list_serving()
        if not serving:
            self._unplaced.append(outcome)
            return
        life = min(serving, key=lambda one: _measure_left(one.worker))
        outcome.worker = life.worker.number
        seq = self._make_sequence(outcome, life.worker, self._views[0])
        self._deliver(life.worker, seq, partial(self._load_prompt, life.worker, seq))

    def _list_serving(self) -> list[Growing]:
        return [one for one in self.lives if one.ready_s <= self._now_s and not one.is_leaving]

    def _note_first_token(self, worker: SimulatedWorker, outcome: Outcome, view: object, seq: object) -> None:
        outcome.first_s = self._now_s
        seconds = outcome.request.prompt_tokens * self._token_s
        self._prompts += 1
        self._prompt_s += seconds
        self._prompt_s2 += seconds**2

    def _end_sequence(self, worker: SimulatedWorker, seq: object, outcome: Outcome, view: object) -> None:
        worker.scheduler.remove_sequence(seq)  # type: ignore[arg-type]
        del worker.sequences[seq]  # type: ignore[arg-type]
        outcome.end_s = self._now_s
        self._num_left -= 1
        self._num_open -= 1
        request, is_first = outcome.request, not self._mean_output
        kept = 0.0 if is_first else KEPT
        self._mean_output += (1 - kept) * (request.output_tokens - self._mean_output)
        self._mean_context += (1 - kept) * (request.prompt_tokens + request.output_tokens - self._mean_context)
        self._end_leaving()

    # Numbers

    def _look(self) -> None:
        """Decide, as every five seconds."""
        present = [one for one in self.lives if not one.is_leaving]
        if self._oracle is not None:
            number = self._oracle(self._now_s)
        else:
            decision = self._controller.decide_numbers(self._see(present))
            self._grown.decisions.append(decision)
            number = decision.numbers["auto"]
        if number != len(present):
            self._grown.numbers.append((self._now_s, number))
        for _ in range(number - len(present)):
            self._start_worker()
        for _ in range(len(present) - number):
            self._stop_worker()
        self._looked_s = self._now_s
        self._at(self._now_s + LOOK_S, self._look)

    def _see(self, present: Sequence[Growing]) -> Seen:
        seconds = self._now_s - self._looked_s
        passed = Passed(self._now_s, seconds, self._arrived, self._prompts, self._prompt_s, self._prompt_s2, 0.0)
        self._arrived, self._prompts, self._prompt_s, self._prompt_s2 = 0, 0, 0.0, 0.0
        left = sum(_measure_left(one.worker) for one in self.lives)
        left += sum(one.request.prompt_tokens for one in self._unplaced)
        ready = tuple(str(one.worker.number) for one in present if one.ready_s <= self._now_s)
        ages = tuple(self._now_s - one.asked_s for one in present if one.ready_s > self._now_s)
        load = Load(0.0, 0.0, 0.0, self._mean_output, self._mean_context, backlog_s=left * self._token_s)
        speed = find_speed(self._spec, self._targets, self._mean_context) if self._mean_output else None
        return Seen(self._now_s, {"auto": Workers(ready, ages)}, passed, self._num_open, load, speed)

    def _start_worker(self) -> None:
        worker = SimulatedWorker("auto", self._spec, len(self.lives))
        self.lives.append(Growing(worker, self._now_s, self._now_s + self._start_s))
        self.readers.append(worker)
        self._at(self._now_s + self._start_s, self._send_unplaced)

    def _send_unplaced(self) -> None:
        waiting, self._unplaced = self._unplaced, []
        for outcome in waiting:
            self._send(outcome)

    def _stop_worker(self) -> None:
        """Stop the worker with the least to lose: one that starts, else the one with the least work left."""
        present = [one for one in self.lives if not one.is_leaving]
        life = min(present, key=lambda one: (one.ready_s <= self._now_s, _measure_left(one.worker)))
        life.is_leaving = True
        worker = life.worker
        for seq in [seq for seq in worker.sequences if not seq.num_computed_tokens and seq not in dict(worker.plan)]:
            worker.scheduler.remove_sequence(seq)
            del worker.sequences[seq]
            self._send(seq.context[0])
        messages, worker.messages = worker.messages, []
        for seq, _ in messages:
            self._send(seq.context[0])
        self._end_leaving()

    def _end_leaving(self) -> None:
        for life in self.lives:
            if life.is_leaving and life.gone_s is None and not life.worker.sequences:
                life.gone_s = self._now_s


def _measure_left(worker: SimulatedWorker) -> int:
    """Return how many prompt tokens a worker has left, and a little for each answer that it decodes."""
    beat = worker.make_beat(0.0)
    return beat.waiting_tokens + beat.num_decodes
