"""How long the engine takes: for a step, and for prompts.

The scheduler knows by the time of a step how much longer one more row or chunk makes it:

    fixed + decoding rows * (row + outside + context * tokens before) + (chunk, if it has any)
          + prompt tokens * (token + prompt context * tokens before)

A prompt's tokens read those before them many at a time, so that costs less than in a decoding row.

All constants but one are measured at the start, on the device that will run, as medians of some trials. `outside` is
the time per sampled token between two steps, in the scheduler and in the loop that drives the engine. It is measured
while the engine works; the minimum counts.

A worker compares the rate of prompts with the time to fetch their KV.
"""

import math
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.sequence import Plan, Sequence
from penstock.names import Stage
from penstock.running_mean import RunningMean
from penstock.worker_speed import WorkerSpeed

TRIAL_DECODES, TRIAL_CONTEXT_TOKENS, TRIAL_CHUNK_TOKENS = 16, 304, (16, 64)
"""The trial steps: decoding rows, the most tokens of a sequence, and prompt tokens of a small and a large chunk. What
is left of a sequence is before each row, and before another large chunk."""
MIN_TRIAL_S, MAX_TRIALS = 0.2, 15
"""How long trials go on; there are at least two rounds after one that warms up."""
HALF_LIFE_TOKENS = 4096
"""The weight of a step halves with so many further prompt tokens."""
MIN_S = 1e-9
"""The least that something takes: two trials may have taken equally long."""
WARM_UP_TOKENS = 16
"""Length of the prompt that warms up. The next one is four times as long."""
PACE_HALF_LIFE_S, SPREADS, MAX_JUMP = 0.5, 3.0, 2.0
"""After how many seconds of others, by their cost, a step counts half for how much longer steps take; how many mean
distances lie between the mean and all but about one in a hundred; and how many times the mean a step counts for at
most, as a single long one has its cause elsewhere."""
MEASURE_S = 0.1
"""How long prompts are computed for the first rate. The last of them may take longer."""


class TrialStep(NamedTuple):
    """A step whose time is measured."""

    num_decodes: int
    """Sequences that decode."""
    context_tokens: int = 0
    """Tokens before each of the decoding tokens."""
    prompt_tokens: int = 0
    """Tokens of a prompt in the same step."""
    prompt_context_tokens: int = 0
    """Tokens of the prompt before these."""


@dataclass
class StepCost:
    """The constants of the formula."""

    fixed_s: float
    row_s: float
    context_s: float
    chunk_s: float
    token_s: float
    outside_s: float = math.inf
    """The minimum per sampled token; infinite before the first measurement."""
    prompt_context_s: float | None = None
    """None where it was not measured: as `context_s`."""

    @property
    def known_outside_s(self) -> float:
        """`outside_s`, or 0 before it was measured."""
        return 0.0 if math.isinf(self.outside_s) else self.outside_s

    def row_seconds(self, seq: Sequence) -> float:
        """Return how much one more decoding row adds to the step."""
        return self.row_s + self.known_outside_s + self.context_s * seq.num_computed_tokens

    @property
    def known_prompt_context_s(self) -> float:
        """`prompt_context_s`, or `context_s` where it was not measured."""
        return self.context_s if self.prompt_context_s is None else self.prompt_context_s

    def chunk_seconds(self, num_tokens: int, num_before: int) -> float:
        """Return how much `num_tokens` prompt tokens behind `num_before` others add, each of which reads all before it,
        without the constant for a step's first chunk.
        """
        num_contexts = num_tokens * num_before + num_tokens * (num_tokens - 1) / 2
        return num_tokens * self.token_s + num_contexts * self.known_prompt_context_s

    def count_chunk_tokens(self, seconds: float, num_before: int) -> int:
        """Return how many prompt tokens behind `num_before` others are computed in so many seconds, but for the
        constant of a step's first chunk.
        """
        each_s, more_s = self.token_s + self.known_prompt_context_s * num_before, self.known_prompt_context_s
        slope_s = max(each_s - more_s / 2, MIN_S)
        return math.floor(2 * max(0.0, seconds) / (slope_s + math.sqrt(slope_s**2 + 2 * more_s * max(0.0, seconds))))

    def estimate_seconds(self, seq: Sequence, num_tokens: int) -> float:
        """Return how much `num_tokens` of the sequence's tokens add, without the constant for a step's first chunk."""
        is_row = seq.num_pending_tokens == 1
        return self.row_seconds(seq) if is_row else self.chunk_seconds(num_tokens, seq.num_computed_tokens)

    def list_seconds(self, plan: Plan) -> list[float]:
        """Return how much each sequence adds to a step. The constant for a first chunk is divided among the chunks."""
        chunk_s = self.chunk_s / max(1, sum(seq.num_pending_tokens > 1 for seq, _ in plan))
        return [self.estimate_seconds(seq, num) + chunk_s * (seq.num_pending_tokens > 1) for seq, num in plan]

    def step_seconds(self, plan: Plan) -> float:
        """Return how long a step takes."""
        return self.fixed_s + sum(self.list_seconds(plan))

    def describe_speed(self, rows: Items[Sequence], max_step_tokens: int, slowdown: float = 1.0) -> WorkerSpeed:
        """Return the speed of a worker that decodes these sequences, whose steps have so many tokens as a rule and take
        `slowdown` times as long as measured.
        """
        rows_s, step_s = sum(map(self.row_seconds, rows)), self.fixed_s + self.chunk_s
        row_s = rows_s / len(rows) if rows else self.row_s + self.known_outside_s
        token_s = self.token_s + (step_s + rows_s) / max(1, max_step_tokens - len(rows))
        return WorkerSpeed(
            prompt_token_s=slowdown * max(token_s, MIN_S),
            idle_prompt_token_s=max(self.token_s + step_s / max_step_tokens, MIN_S),
            num_rows=len(rows),
            step_s=slowdown * max(self.fixed_s, MIN_S),
            row_s=slowdown * max(row_s, MIN_S),
            slowdown=slowdown,
        )

    def record_outside(self, seconds: float, num_tokens: int) -> None:
        """Record the seconds between two steps, the first of which sampled `num_tokens` tokens."""
        self.outside_s = min(self.outside_s, seconds / num_tokens)


def share_step(cost: StepCost | None, plan: Plan) -> tuple[list[tuple[Sequence, Stage, float]], float]:
    """Return each row of a step that is about to be computed, with its stage and its part of the step's seconds; and
    how long the step takes by its cost, which is 0 where that is not known, as with drafts.

    The constant for the step is divided as the rest is. Without the cost all tokens count alike.
    """
    seconds = [float(num) for _, num in plan] if cost is None else cost.list_seconds(plan)
    expected_s = 0.0 if cost is None or any(seq.draft for seq, _ in plan) else cost.fixed_s + sum(seconds)
    draft_s = 1.0 if cost is None else cost.token_s
    weights = [one + len(seq.draft) * draft_s for one, (seq, _) in zip(seconds, plan, strict=True)]
    total = sum(weights)
    shares: list[tuple[Sequence, Stage, float]] = [
        (
            seq,
            "prefill" if seq.num_computed_tokens < seq.num_prompt_tokens else "decode",
            weight / total if total else 1 / len(plan),
        )
        for weight, (seq, _) in zip(weights, plan, strict=True)
    ]
    return shares, expected_s


def measure_cost(time_step: Callable[[TrialStep], float], max_decodes: int, max_context_tokens: int) -> StepCost:
    """Measure the constants. `time_step` runs a step and returns its seconds. `max_decodes` must be 2 or more."""
    few, many = TRIAL_CHUNK_TOKENS
    trials = [
        TrialStep(1),
        TrialStep(max_decodes),
        TrialStep(max_decodes, max_context_tokens),
        TrialStep(1, prompt_tokens=few),
        TrialStep(1, prompt_tokens=many),
        TrialStep(1, prompt_tokens=many, prompt_context_tokens=max_context_tokens),
    ]
    for trial in trials:
        time_step(trial)
    rounds, started_s = list[list[float]](), time.perf_counter()
    while len(rounds) < MAX_TRIALS and (len(rounds) < 2 or time.perf_counter() - started_s < MIN_TRIAL_S):
        rounds.append([time_step(trial) for trial in trials])
    one_s, rows_s, context_s, few_s, many_s, behind_s = map(statistics.median, zip(*rounds, strict=True))
    row_s = max(0.0, rows_s - one_s) / (max_decodes - 1)
    token_s = max(0.0, many_s - few_s) / (many - few)
    return StepCost(
        fixed_s=max(0.0, one_s - row_s),
        row_s=row_s,
        context_s=max(0.0, context_s - rows_s) / (max_decodes * max_context_tokens),
        chunk_s=max(0.0, few_s - one_s - few * token_s),
        token_s=token_s,
        prompt_context_s=max(0.0, behind_s - many_s) / (many * max_context_tokens),
    )


class StepPace:
    """How many times as long as `StepCost` says steps take lately. It was measured in time that no other process had.

    One thread records, any thread may read.
    """

    def __init__(self) -> None:
        self.slowdown = 1.0
        """The mean."""
        self._spread = 0.0
        """The mean distance from it."""

    def record_step(self, seconds: float, expected_s: float) -> None:
        """Record a step: how long it took, and how long by its cost."""
        ratio = min(seconds / expected_s, MAX_JUMP * self.slowdown)
        weight = 1 - 0.5 ** (expected_s / PACE_HALF_LIFE_S)
        self._spread += weight * (abs(ratio - self.slowdown) - self._spread)
        self.slowdown += weight * (ratio - self.slowdown)

    @property
    def high_slowdown(self) -> float:
        """What all but about one in a hundred steps stay below."""
        return self.slowdown + SPREADS * self._spread


class PrefillRate:
    """A running mean over the steps in which most tokens were prompt tokens, weighted by these tokens."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """Prompt tokens per second; None until a step was measured. Any thread may read it."""
        self._best_tokens_per_s = 0.0
        self._mean_tokens_per_s = RunningMean()

    def describe_speed(self, num_rows: int) -> WorkerSpeed | None:
        """Return the speed of a worker whose steps have no measured cost; None until a step was measured. The best
        rate so far is that of the idle worker. Any thread may call it.
        """
        rate = self.tokens_per_s
        return None if rate is None else WorkerSpeed(1 / rate, 1 / max(rate, self._best_tokens_per_s), num_rows)

    def record_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Record a step of `num_tokens` tokens, `num_prompt_tokens` of them prompt tokens."""
        if 2 * num_prompt_tokens > num_tokens:
            kept = 0.5 ** (num_prompt_tokens / HALF_LIFE_TOKENS)
            self._mean_tokens_per_s.add(num_prompt_tokens, max(seconds, MIN_S), kept=kept)
            self.tokens_per_s = self._mean_tokens_per_s.value
            self._best_tokens_per_s = max(self._best_tokens_per_s, self.tokens_per_s or 0.0)


def measure_prefill_rate(compute: Callable[[int], float], max_tokens: int) -> PrefillRate:
    """Measure the rate before there are requests: `compute(num_tokens)` computes a prompt and returns its seconds.

    The first prompt warms up. The others grow up to `max_tokens` tokens until `MEASURE_S` have passed, because short
    ones keep a large device idle. The fastest counts. If that is too optimistic, more prompts are computed than should
    be, and their times correct it.
    """
    num_tokens, spent_s = min(WARM_UP_TOKENS, max_tokens), 0.0
    compute(num_tokens)
    measurements = []
    while spent_s < MEASURE_S:
        num_tokens = min(4 * num_tokens, max_tokens)
        measurements.append((num_tokens, compute(num_tokens)))
        spent_s += measurements[-1][1]
    rate = PrefillRate()
    num_tokens, seconds = max(measurements, key=lambda pair: pair[0] / max(pair[1], MIN_S))
    rate.record_step(num_tokens, num_tokens, seconds)
    return rate
