"""How fast the engine computes prompts, for deciding whether fetching their KV is faster."""

from collections.abc import Callable

from penstock.running_mean import RunningMean

HALF_LIFE_TOKENS = 4096
"""After so many prompt tokens a step counts half."""
WARM_UP_TOKENS = 16
"""Length of the prompt that warms up; the next one is four times as long."""
MEASURE_S = 0.1
"""How long prompts are computed for the first rate; the last of them may take longer."""


class PrefillRate:
    """A running mean over the steps in which prompts were the bulk, weighted by their tokens."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """Prompt tokens a second; None until a step was measured. Any thread may read it."""
        self._mean_tokens_per_s = RunningMean()
        self._open_tokens, self._open_seconds = 0, 0.0

    def record_step(self, num_prompt_tokens: int, num_tokens: int, seconds: float, *, is_done: bool) -> None:
        """A step computed `num_tokens` tokens, `num_prompt_tokens` of them of prompts.

        `is_done`: the device has computed it by now. If not, its time shows in that of the steps after it.
        """
        if 2 * num_prompt_tokens <= num_tokens:
            self._open_tokens, self._open_seconds = 0, 0.0
            return
        self._open_tokens += num_prompt_tokens
        self._open_seconds += seconds
        if not is_done:
            return
        kept = 0.5 ** (self._open_tokens / HALF_LIFE_TOKENS)
        self._mean_tokens_per_s.add(self._open_tokens, max(self._open_seconds, 1e-9), kept=kept)
        self._open_tokens, self._open_seconds = 0, 0.0
        self.tokens_per_s = self._mean_tokens_per_s.value


def measure_prefill_rate(compute: Callable[[int], float], most: int) -> PrefillRate:
    """What computing some prompts takes, before there are any: `compute` does one of so many tokens, in seconds.

    The first one warms up. The others grow up to `most` tokens, until some time has passed: short ones keep a large
    device idle. The quickest counts; if that is too quick, more is computed than should be, and shows it.
    """
    num_tokens, spent_s = min(WARM_UP_TOKENS, most), 0.0
    compute(num_tokens)
    times = []
    while spent_s < MEASURE_S:
        num_tokens = min(4 * num_tokens, most)
        times.append((num_tokens, compute(num_tokens)))
        spent_s += times[-1][1]
    rate = PrefillRate()
    num_tokens, seconds = max(times, key=lambda one: one[0] / max(one[1], 1e-9))
    rate.record_step(num_tokens, num_tokens, seconds, is_done=True)
    return rate
