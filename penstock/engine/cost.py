"""What a step takes, in seconds, as far as the scheduler has to know: how much longer it gets by a row or a chunk more.

    fixed + decoding rows * (row + outside + context * tokens before) + (chunk, if it has any) + prompt tokens * token

All is measured at the start, on the device that will run; medians of some tries count. `outside` is what becomes of a
token between two steps, in the scheduler and at whoever drives the engine: it is seen at work, and the least counts.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.sequence import Sequence

TRIAL_DECODES, TRIAL_CONTEXT_TOKENS, TRIAL_CHUNK_TOKENS = 16, 240, (16, 64)
"""What is tried: so many rows, tokens before each of them, and tokens of a prompt."""
MIN_TRIAL_S, MAX_TRIALS = 0.2, 15
"""Tries go on for so long, and are two at least after one that warms up."""


class TrialStep(NamedTuple):
    """A step to be timed."""

    num_decodes: int
    """That decode."""
    context_tokens: int = 0
    """Tokens before each of them."""
    prompt_tokens: int = 0
    """Tokens of a prompt beside them."""


@dataclass
class StepCost:
    """The formula's constants."""

    fixed_s: float
    row_s: float
    context_s: float
    chunk_s: float
    token_s: float
    outside_s: float = math.inf
    """The least seen, by token decided; infinite until some were."""

    @property
    def known_outside_s(self) -> float:
        """`outside_s`, or nothing before it was seen."""
        return 0.0 if math.isinf(self.outside_s) else self.outside_s

    def row_seconds(self, seq: Sequence) -> float:
        """One more decoding row."""
        return self.row_s + self.known_outside_s + self.context_s * seq.num_computed_tokens

    def token_seconds(self, seq: Sequence) -> float:
        """One more token of a prompt."""
        return self.token_s + self.context_s * seq.num_computed_tokens

    def estimate_seconds(self, seq: Sequence, num_tokens: int) -> float:
        """So many of the sequence's pending tokens, without what the first chunk of a step adds."""
        return self.row_seconds(seq) if seq.num_pending_tokens == 1 else num_tokens * self.token_seconds(seq)

    def record_outside(self, seconds: float, num_tokens: int) -> None:
        """So much time passed between two steps; the first had decided so many tokens."""
        self.outside_s = min(self.outside_s, seconds / num_tokens)


def measure_cost(seconds_of: Callable[[TrialStep], float], rows: int, context: int) -> StepCost:
    """`seconds_of` runs a step and tells its time. `rows`, two or more, and `context`: no more than fit."""
    few, many = TRIAL_CHUNK_TOKENS
    tries = [
        TrialStep(1),
        TrialStep(rows),
        TrialStep(rows, context),
        TrialStep(1, prompt_tokens=few),
        TrialStep(1, prompt_tokens=many),
    ]
    for one in tries:
        seconds_of(one)
    rounds, begun_s = list[list[float]](), time.perf_counter()
    while len(rounds) < MAX_TRIALS and (len(rounds) < 2 or time.perf_counter() - begun_s < MIN_TRIAL_S):
        rounds.append([seconds_of(one) for one in tries])
    one_s, rows_s, context_s, few_s, many_s = map(statistics.median, zip(*rounds, strict=True))
    row_s = max(0.0, rows_s - one_s) / (rows - 1)
    token_s = max(0.0, many_s - few_s) / (many - few)
    return StepCost(
        fixed_s=max(0.0, one_s - row_s),
        row_s=row_s,
        context_s=max(0.0, context_s - rows_s) / (rows * context),
        chunk_s=max(0.0, few_s - one_s - few * token_s),
        token_s=token_s,
    )
