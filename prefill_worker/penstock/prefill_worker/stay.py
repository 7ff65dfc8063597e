"""Which requests a worker that reads requests and jobs decodes itself, and which it hands off, and when.

A prompt that is computed beside others' answers delays their next tokens, and a long answer holds its message for as
long as it lasts. Where another worker decodes, a request therefore leaves for one of these causes:

    prompt   at its first token: more of its prompt had to be computed than may be, or that took longer than the tokens
             of the answers that are decoded here may wait for it
    length   later: its answer has become long, or has lasted for long
    itl      later: prompts that were computed here have kept its tokens for longer than they may, on the mean
    blocks   at any time: its blocks went to others, so that it would wait for blocks and be computed again

Where no other worker decodes, or the bus is slow to answer, all requests stay: a worker hands nothing to itself.
"""

import time
from collections.abc import Callable

from penstock.config.settings import StaySettings

MIN_JUDGED_TOKENS = 16
"""How many tokens of an answer a worker gives before it judges what prompts add to each."""


class StayPolicy:
    """Decides for one worker. `has_others` returns whether another worker may go on with an answer now."""

    def __init__(self, settings: StaySettings, has_others: Callable[[], bool]) -> None:
        self._settings, self._has_others = settings, has_others

    def judge_prompt(self, num_computed: int, delay_s: float) -> str:
        """Return why a request leaves with its first token, of whose prompt `num_computed` tokens are not found but
        computed; an empty string where it stays. `delay_s`: how long that keeps answers that are decoded here.
        """
        if not self._has_others():
            return ""
        is_long = num_computed > self._settings.max_prompt_tokens or delay_s * 1000 > self._settings.max_added_itl_ms
        return "prompt" if is_long else ""

    def judge_answer(self, num_tokens: int, begun_s: float, num_here: int, kept_s: float) -> str:
        """Return why a request leaves that has `num_tokens` tokens, and was begun at `begun_s` by the monotonic clock;
        an empty string where it stays. `kept_s`: how long prompts have kept the `num_here` tokens that it got here.
        """
        # Each answer is judged by its own delays. The policy need not choose one, the youngest or that with most left:
        # answers leave that gain from it, and an answer with few delays stays through a prompt or two.
        is_kept = num_here >= MIN_JUDGED_TOKENS and kept_s * 1000 > num_here * self._settings.max_added_itl_ms
        is_long = num_tokens >= self._settings.max_answer_tokens or time.monotonic() > begun_s + self._settings.max_s
        if not (is_long or is_kept) or not self._has_others():
            return ""
        return "length" if is_long else "itl"

    def judge_preempted(self) -> str:
        """Return why a request leaves whose blocks went to others; an empty string where it waits for blocks here."""
        return "blocks" if self._has_others() else ""
