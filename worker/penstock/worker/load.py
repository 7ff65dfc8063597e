"""How much work a worker holds and how fast it is, in tokens.

The heartbeat carries it (`penstock.ops.lag` reads it there), and roles use it to decide how many requests to admit.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.bus.placement import count_prompt_chars
from penstock.messages import Request, estimate_open_answer_tokens
from penstock.names import CLASSES, PriorityClass, Stage
from penstock.running_mean import RunningMean

MEAN_MESSAGES = 64
"""About how many of the last messages a mean covers."""
MEAN_TOKENS = 65_536
"""About how many of the last prompt tokens the mean of their characters covers."""
UNKNOWN_PROMPT_TOKENS = 256
"""Expected of a request that waits before a worker has seen any."""
HALF_LIFE_S = 5.0
"""Seconds of working time after which older work counts half in a worker's throughput."""


class TaskLoad(NamedTuple):
    """The work that one request still needs."""

    priority_class: PriorityClass
    is_running: bool
    """Whether the engine works on it; otherwise it waits for something."""
    prompt_tokens: int
    """Prompt tokens left to compute."""
    output_tokens: int
    """Output tokens still to come, at most."""
    num_generated: int | None = None
    """Output tokens so far, where the answer has no limit of its own and is expected to get as long as others."""
    is_in_place: bool = False
    """Whether it is decoded by the worker that read the request, and has its first token."""


class Throughput:
    """Tokens per second of the time in which there was work."""

    def __init__(self) -> None:
        self._tokens_per_s = RunningMean()
        self._busy_since_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """The throughput; None until there were tokens. Any thread may read it."""
        return self._tokens_per_s.value or None

    def record_step(self, num_tokens: int, *, is_busy: bool) -> None:
        """Record the tokens of one turn of the loop. `is_busy`: the time until the next turn is working time."""
        now_s = time.monotonic()
        if self._busy_since_s is not None:
            passed_s = now_s - self._busy_since_s
            self._tokens_per_s.add(num_tokens, passed_s, kept=0.5 ** (passed_s / HALF_LIFE_S))
        self._busy_since_s = now_s if is_busy else None


class WorkerLoad:
    """A worker's means and throughput. The loop records, any thread may read."""

    def __init__(self) -> None:
        self.mean_prompt_tokens = {priority_class: RunningMean(MEAN_MESSAGES) for priority_class in CLASSES}
        """Prompt tokens of a message."""
        self.mean_computed_tokens = {priority_class: RunningMean(MEAN_MESSAGES) for priority_class in CLASSES}
        """Those of them that were not found in the pool or the KV store."""
        self.mean_output_tokens = {priority_class: RunningMean(MEAN_MESSAGES) for priority_class in CLASSES}
        """Output tokens of a message: in prefill the request's limit, in decode what was generated."""
        self.throughput = Throughput()
        """Tokens per second of this stage's work: of prompts that are done, or of answers."""
        self.chars_per_token = RunningMean(MEAN_TOKENS)
        """Characters of prompts that were texts, for each of their tokens."""
        self.hand_offs = Counter[str]()
        """How many requests were handed off, by cause."""
        self.capacities: Mapping[PriorityClass, int] = dict.fromkeys(CLASSES, 0)
        """How many more requests of each class the worker could run when the loop last polled."""

    def estimate_admission(self, priority_class: PriorityClass, max_requests: int) -> tuple[int, int]:
        """Return the prompt tokens expected of each next request of a class, and how many requests to admit.

        Before the first request of the class its length is unknown: then at most one is admitted.
        """
        mean_tokens = self.mean_prompt_tokens[priority_class].value
        return (1, min(1, max_requests)) if mean_tokens is None else (max(1, round(mean_tokens)), max_requests)

    def count_chars(self, request: Request, num_tokens: int) -> None:
        """Count how many characters the tokens of a prompt have, unless it came as token ids."""
        if num_chars := count_prompt_chars(request):
            self.chars_per_token.add(num_chars, num_tokens)

    def summarize_load(
        self,
        tasks: Iterable[TaskLoad],
        held: Mapping[tuple[PriorityClass, Stage], int],
        partitions: Mapping[PriorityClass, Sequence[int]],
        num_waiting: Mapping[PriorityClass, int],
        job_partitions: Mapping[PriorityClass, Sequence[int]] | None = None,
        num_waiting_jobs: Mapping[PriorityClass, int] | None = None,
    ) -> dict[str, object]:
        """Return the load by class, and the hand-offs, for the heartbeat. `held`: how many messages of a class and
        stage are here. `partitions`: those of requests that this worker reads. `num_waiting`: how many requests wait
        there, or here, of which no task was made yet. The last two are the same of jobs.
        """
        tasks = list(tasks)
        told: dict[str, object] = {
            "hand_offs": dict(self.hand_offs),
            "chars_per_token": _round_tokens(self.chars_per_token.value),
        }
        for priority_class in CLASSES:
            mine = [task for task in tasks if task.priority_class == priority_class]
            summary = self._summarize_class(
                priority_class, mine, held[priority_class, "prefill"], held[priority_class, "decode"]
            )
            mean_tokens = self.mean_computed_tokens[priority_class].value
            expected = UNKNOWN_PROMPT_TOKENS if mean_tokens is None else mean_tokens
            left = sum(task.prompt_tokens for task in mine) + round(num_waiting[priority_class] * expected)
            told[priority_class] = summary | {
                "partitions": list(partitions[priority_class]), "waiting_tokens": left,
                "job_partitions": list((job_partitions or {}).get(priority_class, ())),
                "waiting_jobs": (num_waiting_jobs or {}).get(priority_class, 0),
            }  # fmt: skip
        return told

    def _summarize_class(
        self, priority_class: PriorityClass, tasks: list[TaskLoad], num_requests: int, num_jobs: int
    ) -> dict[str, object]:
        return {
            "requests": num_requests,
            "jobs": num_jobs,
            "in_place": sum(task.is_in_place for task in tasks),
            "running": sum(task.is_running for task in tasks),
            "capacity": self.capacities[priority_class],
            "prompt_tokens": sum(task.prompt_tokens for task in tasks),
            "output_tokens": sum(map(self._estimate_output_left, tasks)),
            "mean_prompt_tokens": _round_tokens(self.mean_prompt_tokens[priority_class].value),
            "mean_output_tokens": _round_tokens(self.mean_output_tokens[priority_class].value),
        }

    def _estimate_output_left(self, task: TaskLoad) -> int:
        if task.num_generated is None:
            return task.output_tokens
        expected = estimate_open_answer_tokens(self.mean_output_tokens[task.priority_class].value)
        return min(task.output_tokens, max(1, expected - task.num_generated))


def _round_tokens(number: float | None) -> float | None:
    return None if number is None else round(number, 1)
