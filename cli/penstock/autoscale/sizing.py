"""How many workers carry a load within the latency targets: formulas, without I/O or clock.

    prefill   W = (rate / n) * E[S^2] / (2 * (1 - rho)),  rho = rate * E[S] / n        (Pollaczek and Khinchine)
              the least n with W + E[S] <= 0.8 of the limit, a simulated p99 within it, and what waits done within it
    decode    d = rate * E[output tokens] * step / rows, at the most rows whose step keeps to the gap; and their memory
    auto      the least k with p + d <= k, where p is the real n at which W + E[S] is 0.8 of the limit

S is the time in which one worker without answers computes what a prompt does not find. Prompts are heavy-tailed, so
E[S^2] counts.
"""

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from penstock.config.settings import PACED_SHARE
from penstock.names import WorkerKind

MEAN_SHARE = 0.8
"""The share of the limit for a first token that the mean may take."""
MAX_BUSY = 0.9
"""The share of their time that workers are busy at most where no number of them meets the limit."""
P99_SIGMAS = 2.326
"""The 99th percentile of the normal distribution."""
NUM_PLAYED, SEED = 500, 7
"""Requests of the simulation of first tokens. Its draws are the same each time: a number follows from the load."""
MAX_WORKERS = 1000
"""The most workers that are asked for, unless there is a bound."""
BATCH_WINDOW_S = 86_400.0
"""The time within which batch work has to be done."""


@dataclass(frozen=True)
class Speed:
    """The speed of one worker, on the mean of those that serve."""

    rows: int
    """The answers that it decodes at once, at the longest step that keeps to the gap."""
    step_s: float
    """The seconds of that step."""
    row_s: float = 0.0
    """Seconds that one answer adds to a step that computes prompts, too."""
    pool_tokens: float = math.inf
    """Tokens whose KV its pool has room for."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of a worker that decodes so many answers."""
        return self.rows / self.step_s


@dataclass(frozen=True)
class Load:
    """The load of interactive requests, and the batch work that is left."""

    rate: float
    """Requests that arrive in a second."""
    prompt_s: float
    """E[S], the mean seconds of a prompt after cache hits."""
    prompt_s2: float
    """E[S^2]."""
    output_tokens: float
    context_tokens: float = 0.0
    """Mean tokens of prompt and answer together."""
    pool_hit_s: float = 0.0
    """Mean seconds that hits in the workers' own pools save of a prompt."""
    backlog_s: float = 0.0
    """Seconds in which one worker would compute the prompts that wait."""
    waiting_answers_s: float = 0.0
    """Seconds in which one worker would decode the answers of requests that have no first token."""
    steady_rate: float = math.inf
    """Requests a second over a longer time: what is arriving now counts for the p99 as far as it lasts."""
    start_s: float = 0.0
    """How long a new worker takes to start: what waits cannot be done earlier by more workers."""
    batch_s: float = 0.0
    """Seconds in which one worker would do the batch work that is left."""
    batch_left_s: float = BATCH_WINDOW_S
    """The time that is left for it."""
    is_open: bool = False
    """Whether any message is not settled."""

    def spread_over(self, num: int, num_now: int) -> "Load":
        """Return this load on `num` workers in place of `num_now`: those that go take their pools with them."""
        if num >= num_now or not self.pool_hit_s:
            return self
        longer = self.prompt_s + self.pool_hit_s * (1 - num / num_now)
        return replace(self, prompt_s=longer, prompt_s2=self.prompt_s2 * (longer / max(self.prompt_s, 1e-9)) ** 2)


@dataclass(frozen=True)
class Targets:
    """The latency targets of interactive requests."""

    ttft_s: float
    gap_s: float


class Need(NamedTuple):
    """A number of workers, and what decided."""

    number: int
    reason: str
    is_hopeless: bool = False
    """Whether no number of workers meets the limit for first tokens, as prompts alone take longer."""


def count_prefill(load: Load, targets: Targets) -> float:
    """Return the real number of workers at which W + E[S] is its share of the limit; infinite where none is."""
    left_s = MEAN_SHARE * targets.ttft_s - load.prompt_s
    return load.rate * (load.prompt_s + load.prompt_s2 / (2 * left_s)) if left_s > 0 else math.inf


def count_decode(load: Load, speed: Speed) -> float:
    """Return how many workers' time the answers take, as a real number."""
    return load.rate * load.output_tokens / speed.tokens_per_s


def count_by_memory(load: Load, speed: Speed) -> float:
    """Return how many pools the answers fill that are decoded at once, by Little's law."""
    return load.rate * load.output_tokens * speed.step_s * load.context_tokens / speed.pool_tokens


def predict_p99_s(load: Load, num: int, targets: Targets, speed: Speed | None = None) -> float:
    """Return the simulated 99th percentile of the time to first token with `num` workers.

    A request goes to the worker with the least work left. `speed` is that of workers that decode, too: beside answers
    their steps keep to the gap, unless a first token would be late by that.
    """
    if not load.rate:
        return compute_prompt_p99_s(load)
    least = most = 1.0
    if speed is not None:
        tokens_per_s = load.rate * load.output_tokens / num
        rows, most = min(speed.rows, tokens_per_s * targets.gap_s), 1 - tokens_per_s * speed.row_s
        beside_s = speed.step_s - (speed.rows - rows) * speed.row_s
        within = min(most, 1 - beside_s / targets.gap_s) if beside_s < targets.gap_s else most
        least = most - (most - within) * min(1.0, rows)
    if load.rate * load.prompt_s >= num * most:
        return math.inf
    workers, now_s = [_PromptQueue(least, most, PACED_SHARE * targets.ttft_s) for _ in range(num)], 0.0
    mean, sigma = _fit_lognormal(load)
    for gap, draw in _draw_pairs():
        now_s += gap / load.rate
        min(workers, key=lambda one: one.free_s).add(now_s, math.exp(mean + sigma * draw))
    times = [taken_s for one in workers for taken_s in one.run_until(math.inf)]
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


class _PromptQueue:
    """The prompts of one worker: the first shares the time with the shortest of those at most half as long.

    Prompts have the part `least` of the time, or as much more, up to `most`, as lets each take `patience_s` at most.
    """

    def __init__(self, least: float, most: float, patience_s: float) -> None:
        self._least, self._most, self._patience_s = least, most, patience_s
        self.free_s = 0.0
        """When it will have computed all that it has."""
        self._now_s = 0.0
        self._waiting: list[list[float]] = []
        """The seconds left of each prompt, and when it came."""
        self._taken_s: list[float] = []

    def add(self, now_s: float, seconds: float) -> None:
        """Add a prompt that comes now."""
        self.run_until(now_s)
        self._waiting.append([seconds, now_s])
        self.free_s = max(self.free_s, now_s) + seconds / self._most

    def run_until(self, until_s: float) -> list[float]:
        """Compute until a time, and return how long each prompt took that is done by then."""
        waiting = self._waiting
        while waiting and self._now_s < until_s:
            self._now_s = max(self._now_s, waiting[0][1])
            first, shortest = waiting[0], min(waiting)
            is_shared, part = shortest[0] <= first[0] / 2, self._find_part()
            done_s = min((until_s - self._now_s) * part, shortest[0] * 2 if is_shared else first[0])
            self._now_s += done_s / part
            for one in (first, shortest) if is_shared else (first,):
                one[0] -= done_s / 2 if is_shared else done_s
                if one[0] <= 1e-9:
                    waiting.remove(one)
                    self._taken_s.append(self._now_s - one[1])
        self._now_s = max(self._now_s, until_s) if math.isfinite(until_s) else self._now_s
        return self._taken_s

    def _find_part(self) -> float:
        """Return the part of the time that prompts have now."""
        part, left_s = self._least, 0.0
        for seconds, came_s in self._waiting:
            left_s += seconds
            part = max(part, left_s / max(came_s + self._patience_s - self._now_s, 1e-9))
        return min(part, self._most)


def compute_prompt_p99_s(load: Load) -> float:
    """Return the 99th percentile of the time that a prompt takes by itself."""
    mean, sigma = _fit_lognormal(load)
    return math.exp(mean + P99_SIGMAS * sigma)


def _fit_lognormal(load: Load) -> tuple[float, float]:
    """Return the parameters of the lognormal distribution with these two moments."""
    if not load.prompt_s:
        return -math.inf, 0.0
    variance = math.log(max(1.0, load.prompt_s2 / load.prompt_s**2))
    return math.log(load.prompt_s) - variance / 2, math.sqrt(variance)


@cache
def _draw_pairs() -> list[tuple[float, float]]:
    """Return the gaps between arrivals at a rate of 1, and normal draws for the lengths of prompts."""
    rng = random.Random(SEED)
    return [(rng.expovariate(1.0), rng.gauss(0.0, 1.0)) for _ in range(NUM_PLAYED)]


def size_kind(kind: WorkerKind, load: Load, speed: Speed, targets: Targets) -> Need:
    """Return how many workers of a kind the load needs."""
    if kind == "decode":
        by_rows, by_memory = count_decode(load, speed), count_by_memory(load, speed)
        needs = {"rows": by_rows, "memory": by_memory, "batch": by_rows + _count_batch(load)}
        return _make_need(load, needs | {"backlog": load.waiting_answers_s / max(targets.ttft_s, load.start_s)})
    decoding = count_decode(load, speed) if kind == "auto" else 0.0
    computing = load.rate * load.prompt_s
    prefill, waiting_s = count_prefill(load, targets), load.backlog_s
    if kind == "auto":
        waiting_s += load.waiting_answers_s
    is_hopeless = math.isinf(prefill) or compute_prompt_p99_s(load) > targets.ttft_s
    needs = {
        "first tokens": computing / MAX_BUSY + decoding if is_hopeless else prefill + decoding,
        "backlog": 0.0 if is_hopeless else decoding + waiting_s / max(targets.ttft_s, load.start_s),
        "batch": computing + decoding + _count_batch(load),
    }
    if kind == "auto":
        needs["memory"] = count_by_memory(load, speed)
    need = _make_need(load, needs)
    if is_hopeless:
        return need._replace(is_hopeless=True)
    number, beside = need.number, speed if kind == "auto" else None
    steady = replace(load, rate=min(load.rate, load.steady_rate))
    while number and number < MAX_WORKERS and predict_p99_s(steady, number, targets, beside) > targets.ttft_s:
        number += 1 + number // 16
    return need if number == need.number else Need(number, "simulated p99 of first tokens")


def _count_batch(load: Load) -> float:
    """Return how many workers' time batch work takes to be done by its deadline."""
    return load.batch_s / max(load.batch_left_s, 1.0)


def _make_need(load: Load, needs: dict[str, float]) -> Need:
    """Return the largest of several needs, and at least one worker for what is open."""
    cause = max(needs, key=lambda name: needs[name])
    number = min(MAX_WORKERS, math.ceil(needs[cause] - 1e-9))
    return Need(max(number, int(load.is_open)), f"{cause} {needs[cause]:.2f}" if number else "open requests")
