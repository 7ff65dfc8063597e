"""Which requests a worker that reads requests and jobs decodes itself, and which it hands off, and when.

How long prompts keep the answers beside them is the scheduler's to bound. A request leaves for one of these causes:

    prompt   at its first token: more of its prompt had to be computed than may be, and workers of kind `decode`, which
             compute no prompts, take the answers of long ones
    blocks   at any time: its blocks went to others, so that it would wait for blocks and be computed again

Where no such worker decodes, or the bus is slow to answer, all requests stay: a worker hands nothing to itself.
"""

from collections.abc import Callable, Collection

from penstock.config.settings import StaySettings
from penstock.names import WorkerKind


class StayPolicy:
    """Decides for one worker. `find_kinds` returns the kinds of the other workers that may go on with an answer now."""

    def __init__(self, settings: StaySettings, find_kinds: Callable[[], Collection[WorkerKind]]) -> None:
        self._settings, self._find_kinds = settings, find_kinds

    def judge_prompt(self, num_computed: int) -> str:
        """Return why a request leaves with its first token, of whose prompt `num_computed` tokens are not found but
        computed; an empty string where it stays.
        """
        is_long = num_computed > self._settings.max_prompt_tokens
        return "prompt" if is_long and "decode" in self._find_kinds() else ""

    def judge_preempted(self) -> str:
        """Return why a request leaves whose blocks went to others; an empty string where it waits for blocks here."""
        return "blocks" if self._find_kinds() else ""
