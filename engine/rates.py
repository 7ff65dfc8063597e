"""How fast the engine computes prompts, for deciding whether fetching their KV is faster."""

HALF_LIFE_TOKENS = 4096
"""After so many prompt tokens a step counts half."""


class PrefillRate:
    """A running mean over the steps in which prompts were the bulk, weighted by their tokens."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """Prompt tokens a second; None until a step was measured. Any thread may read it."""
        self._tokens = self._seconds = 0.0
        self._open_tokens, self._open_seconds = 0, 0.0

    def note(self, num_prompt: int, num_tokens: int, seconds: float, *, is_done: bool) -> None:
        """A step computed `num_tokens` tokens, `num_prompt` of them of prompts.

        `is_done`: the device has computed it by now. If not, its time shows in that of the steps after it.
        """
        if 2 * num_prompt <= num_tokens:
            self._open_tokens, self._open_seconds = 0, 0.0
            return
        self._open_tokens += num_prompt
        self._open_seconds += seconds
        if not is_done:
            return
        kept = 0.5 ** (self._open_tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * kept + self._open_tokens
        self._seconds = self._seconds * kept + self._open_seconds
        self._open_tokens, self._open_seconds = 0, 0.0
        self.tokens_per_s = self._tokens / max(self._seconds, 1e-9)
