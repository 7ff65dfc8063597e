"""Which requests a worker that reads requests and jobs decodes itself, and which it hands off, and when.

A prompt that is computed beside others' answers delays their next tokens, and a long answer holds its message for as
long as it lasts. So where another worker decodes, a request leaves for one of these causes:

    prompt   at its first token: more of its prompt had to be computed than may be, or that took longer than the tokens
             of the answers that are decoded here may wait for it
    length   later: its answer has become long, or has lasted for long

Where no other worker decodes, all requests stay: a worker hands nothing to itself.
"""

import time
from collections.abc import Callable

from penstock.config.settings import StaySettings


class StayPolicy:
    """Decides for one worker. `has_others` returns whether another worker decodes, as far as is known."""

    def __init__(self, settings: StaySettings, has_others: Callable[[], bool]) -> None:
        self._settings, self._has_others = settings, has_others

    def judge_prompt(self, num_computed: int, tokens_per_s: float | None, *, are_others_here: bool) -> str:
        """Return why a request leaves with its first token, of whose prompt `num_computed` tokens are not found but
        computed, at this rate; an empty string where it stays. `are_others_here`: other answers are decoded here.
        """
        if not self._has_others():
            return ""
        delay_ms = 0.0 if tokens_per_s is None or not are_others_here else 1000 * num_computed / tokens_per_s
        is_long = num_computed > self._settings.max_prompt_tokens or delay_ms > self._settings.max_added_itl_ms
        return "prompt" if is_long else ""

    def judge_answer(self, num_tokens: int, begun_s: float) -> str:
        """Return why a request leaves that has `num_tokens` tokens, and was begun at `begun_s` by the monotonic clock;
        an empty string where it stays.
        """
        is_long = num_tokens >= self._settings.max_answer_tokens or time.monotonic() > begun_s + self._settings.max_s
        return "length" if is_long and self._has_others() else ""
