"""How fast the engine computes prompts: a worker compares it with the time to fetch their KV."""

from collections.abc import Callable

from penstock.running_mean import RunningMean

HALF_LIFE_TOKENS = 4096
"""The weight of a step halves with so many further prompt tokens."""
WARM_UP_TOKENS = 16
"""Length of the prompt that warms up. The next one is four times as long."""
MEASURE_S = 0.1
"""How long prompts are computed for the first rate. The last of them may take longer."""


class PrefillRate:
    """A running mean over the steps in which most tokens were prompt tokens, weighted by these tokens."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """Prompt tokens per second; None until a step was measured. Any thread may read it."""
        self._mean_tokens_per_s = RunningMean()

    def record_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float) -> None:
        """Record a step of `num_tokens` tokens, `num_prompt_tokens` of them prompt tokens."""
        if 2 * num_prompt_tokens > num_tokens:
            kept = 0.5 ** (num_prompt_tokens / HALF_LIFE_TOKENS)
            self._mean_tokens_per_s.add(num_prompt_tokens, max(seconds, 1e-9), kept=kept)
            self.tokens_per_s = self._mean_tokens_per_s.value


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
    num_tokens, seconds = max(measurements, key=lambda pair: pair[0] / max(pair[1], 1e-9))
    rate.record_step(num_tokens, num_tokens, seconds)
    return rate
