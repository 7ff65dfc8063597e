"""What a worker holds and how fast it is, counted in tokens: for its heartbeat (`penstock.ops.lag` reads it), and for
deciding what to take in.
"""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.messages import DEFAULT_MAX_TOKENS
from penstock.names import CLASSES, PriorityClass

RECENT = 64
"""About so many messages make up a mean."""
HALF_LIFE_S = 5.0
"""Of busy time: what was done before counts half."""


class TaskLoad(NamedTuple):
    """A request as a worker holds it."""

    klass: PriorityClass
    is_running: bool
    """Whether the engine works on it; otherwise it waits for something."""
    prompt_tokens: int
    """Left to compute."""
    output_tokens: int
    """Still to come, at most."""
    num_generated: int | None = None
    """Output tokens so far of an answer that may fill the context: it is expected to become as long as others are."""


class Mean:
    """A mean in which what came lately counts most; None until something came."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def note(self, number: float) -> None:
        """One more."""
        self._count = min(self._count + 1, RECENT)
        value = number if self.value is None else self.value
        self.value = value + (number - value) / self._count


class Pace:
    """Tokens a second of the time in which there was something to do; None until there were some."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._since: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Any thread may ask."""
        return self._tokens / self._seconds if self._tokens and self._seconds else None

    def note(self, num_tokens: int, *, is_busy: bool) -> None:
        """A turn brought so many tokens. `is_busy`: what passes until the next one is working time."""
        now = time.monotonic()
        if self._since is not None:
            passed_s = now - self._since
            kept = 0.5 ** (passed_s / HALF_LIFE_S)
            self._tokens, self._seconds = self._tokens * kept + num_tokens, self._seconds * kept + passed_s
        self._since = now if is_busy else None


class WorkerLoad:
    """One worker's means and paces. The loop notes, any thread may report."""

    def __init__(self) -> None:
        self.mean_prompt_tokens = {klass: Mean() for klass in CLASSES}
        """Prompt tokens of a message."""
        self.mean_output_tokens = {klass: Mean() for klass in CLASSES}
        """Output tokens of a message: at most so many in prefill, so many as there were in decode."""
        self.throughput = Pace()
        """Of this stage's work: the tokens of prompts that are done, or those of answers."""
        self.capacities: Mapping[PriorityClass, int] = dict.fromkeys(CLASSES, 0)
        """How many more requests of a class would run, at the last look."""

    def estimate_admission(self, klass: PriorityClass, most: int) -> tuple[int, int]:
        """Prompt tokens that each of the next requests of a class may bring, and how many to take.

        That is `most`; before the first one came, one: it will tell.
        """
        mean = self.mean_prompt_tokens[klass].value
        return (1, min(1, most)) if mean is None else (max(1, round(mean)), most)

    def summarize_load(self, held: Iterable[TaskLoad], waiting: Mapping[PriorityClass, int]) -> dict[str, object]:
        """For the heartbeat. `waiting`: messages of which nothing is known but that they are held."""
        held = list(held)
        return {
            klass: self._summarize_class(klass, [one for one in held if one.klass == klass], waiting[klass])
            for klass in CLASSES
        }

    def _summarize_class(self, klass: PriorityClass, held: list[TaskLoad], num_waiting: int) -> dict[str, object]:
        return {
            "requests": len(held) + num_waiting,
            "running": sum(one.is_running for one in held),
            "room": self.capacities[klass],
            "prompt_tokens": sum(one.prompt_tokens for one in held),
            "output_tokens": sum(map(self._estimate_output_left, held)),
            "mean_prompt_tokens": _rounded(self.mean_prompt_tokens[klass].value),
            "mean_output_tokens": _rounded(self.mean_output_tokens[klass].value),
        }

    def _estimate_output_left(self, one: TaskLoad) -> int:
        """Return how many output tokens are still to come, about."""
        if one.num_generated is None:
            return one.output_tokens
        mean = self.mean_output_tokens[one.klass].value
        expected = DEFAULT_MAX_TOKENS if mean is None else round(mean)
        return min(one.output_tokens, max(1, expected - one.num_generated))


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 1)
