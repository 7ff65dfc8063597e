"""The work that waits, in tokens, and the time that a new request would wait for its turn.

The topics know how many messages are not settled (`Bus.count_unsettled`). Each worker's heartbeat has what it holds of
them in tokens, the mean tokens of a message, and how fast the worker is (`penstock.worker.load`). So

    tokens = (messages that no worker holds) x (recent mean of a message) + what the workers hold
    wait   = tokens before it / (rates of the living workers together), of the stage that takes longer

A producer need not say what its request costs. Where nothing was measured yet, the answer is None.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.names import CLASSES, STAGES, Pipeline, PriorityClass, Stage, find_stages
from penstock.ops.status import read_heartbeats
from penstock.redis.client import redis_client

T = TypeVar("T")
HeartbeatStatus = Mapping[str, Any]
MAX_AGE_S = 0.5
"""Seconds for which an answer is used: heartbeats come every second."""
SERVING_STATES = ("ready", "degraded")
RATE_FIELDS: Mapping[Stage, str] = {"prefill": "prompt_tokens_per_s", "decode": "output_tokens_per_s"}
"""The heartbeat's field with the rate of each stage's work."""


@dataclass(frozen=True)
class Lag:
    """The work of one class that is left in one stage."""

    messages: int
    """Messages that are not settled: in the topic, or in a worker."""
    prompt_tokens: int | None
    """Prompt tokens to compute, None where not known. In decode, jobs that no worker has begun count whole, as it is
    not known what is stored.
    """
    output_tokens: int | None
    """Output tokens to generate, about; None where not known. Requests that a worker holds count with their maximum."""


@dataclass(frozen=True)
class PipelineLag:
    """The lag of a pipeline at one moment."""

    stages: Mapping[Stage, Mapping[PriorityClass, Lag]]
    waits: Mapping[PriorityClass, float | None]
    """By class, what `estimated_wait_s` returns."""
    queued_batch_s: float | None
    """Seconds that decode takes for the batch jobs that no worker holds; None if that is not known."""
    mean_output_tokens: Mapping[PriorityClass, float | None]
    """Mean tokens of an answer; until one is complete, the mean limit of the requests. None where not known."""
    is_served: bool = True
    """Whether each stage has a worker that serves. If so, a wait that is not known has not been measured yet."""

    def estimated_wait_s(self, priority_class: PriorityClass = "interactive") -> float | None:
        """Return how long a request submitted now would wait until it is worked on, in seconds.

        Interactive requests do not wait for batch work, which they overtake. None where that is not known: a stage has
        no worker, or has not measured its rate yet.
        """
        return self.waits[priority_class]

    def as_json(self) -> dict[str, Any]:
        """Return the lag by class, then by stage, for `penstock lag --json`."""
        return {
            priority_class: {stage: vars(self.stages[stage][priority_class]) for stage in STAGES}
            | {"estimated_wait_s": None if (wait := self.waits[priority_class]) is None else round(wait, 3)}
            for priority_class in CLASSES
        }


class PipelineWatch(ABC, Generic[T]):
    """Reads the state of a pipeline from its topics and heartbeats. Thread-safe."""

    def __init__(self, addresses: Addresses, settings: BusSettings) -> None:
        self._addresses, self._settings, self._pipeline = addresses, settings, Pipeline(addresses.pipeline)
        self._redis = redis_client(addresses.first_url)
        self._bus: Bus | None = None
        self._last: T | None = None
        self._asked_at = 0.0
        self._lock = threading.Lock()

    def read_latest(self) -> T:
        """Return the state as of now or of `MAX_AGE_S` ago; it must not be changed.

        Raises `BusUnavailable` or `redis.RedisError`.
        """
        with self._lock:
            if self._last is None or time.monotonic() > self._asked_at + MAX_AGE_S:
                self._last = self._read_now(self._open_bus())
                self._asked_at = time.monotonic()
            return self._last

    def find_gone(self, places: Sequence[str]) -> set[str]:
        """Return those of the places at which no message waits; see `contract.Bus.find_gone`."""
        with self._lock:
            bus = self._open_bus()
        return bus.find_gone(places)

    def _open_bus(self) -> Bus:
        self._bus = self._bus or connect_bus(self._addresses, self._settings)
        return self._bus

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            bus, self._bus = self._bus, None
        if bus is not None:
            bus.close()
        self._redis.close()

    @abstractmethod
    def _read_now(self, bus: Bus) -> T:
        """Return the state as of now."""


class LagWatch(PipelineWatch[PipelineLag]):
    """Reads how much work waits."""

    def _read_now(self, bus: Bus) -> PipelineLag:
        return compute_lag(self._pipeline, bus.count_unsettled(), read_heartbeats(self._redis, self._pipeline))


def compute_lag(pipeline: Pipeline, unsettled: Mapping[str, int], workers: Sequence[HeartbeatStatus]) -> PipelineLag:
    """Return the lag that follows from unsettled messages and heartbeats."""
    stages = {stage: _StageWorkers(stage, workers) for stage in STAGES}
    outputs = {priority_class: _mean_output_tokens(stages, priority_class) for priority_class in CLASSES}
    lags = {
        stage: {
            priority_class: _compute_class_lag(unsettled[topic], stages[stage], priority_class, outputs[priority_class])
            for priority_class, topic in pipeline.input_topics(stage).items()
        }
        for stage in STAGES
    }
    waits = {
        priority_class: _estimate_wait_s(lags, stages, outputs, CLASSES[: rank + 1])
        for rank, priority_class in enumerate(CLASSES)
    }
    num_jobs = unsettled[pipeline.job_topic("batch")]
    ahead_s = _estimate_queued_batch_s(num_jobs, stages["decode"], outputs["batch"])
    return PipelineLag(lags, waits, ahead_s, outputs, all(stage.is_there for stage in stages.values()))


class _StageWorkers:
    """The workers of one stage, taken together. Some do the work of both."""

    def __init__(self, stage: Stage, workers: Iterable[HeartbeatStatus]) -> None:
        mine = [worker for worker in workers if stage in find_stages(worker["stage"]) and "load" in worker]
        self._held, self._in_place = ("requests", -1) if stage == "prefill" else ("jobs", 1)
        self._loads = [worker["load"] for worker in mine]
        serving = [worker["load"] for worker in mine if worker["state"] in SERVING_STATES]
        rates = [load[RATE_FIELDS[stage]] for load in serving if load[RATE_FIELDS[stage]]]
        self.is_there = bool(serving)
        self.tokens_per_s: float | None = sum(rates) / len(rates) * len(serving) if rates else None
        """Rate of all serving workers. One that has measured nothing counts as the mean of the others."""
        self._serving = serving

    def sum_field(self, priority_class: PriorityClass, what: str) -> int:
        """Return the sum of a field over all workers."""
        return int(sum(load[priority_class][what] for load in self._loads))

    def count_unheld(self, priority_class: PriorityClass, messages: int) -> int:
        """Return how many of a class's messages no worker holds.

        A heartbeat may be a second old: it may include messages that are settled by now.
        """
        return max(0, messages - self.sum_field(priority_class, self._held))

    def count_messages(self, priority_class: PriorityClass, unsettled: int) -> int:
        """Return how many of a class's messages are this stage's work, of `unsettled` ones in its topic.

        A request that is decoded by the worker that read it is decode's work from its first token on.
        """
        return max(0, unsettled + self._in_place * self.sum_field(priority_class, "in_place"))

    def sum_capacity(self, priority_class: PriorityClass) -> int:
        """Return how many more requests the workers could run at once."""
        return int(sum(load[priority_class]["capacity"] for load in self._serving))

    def compute_mean(self, priority_class: PriorityClass, what: str) -> float | None:
        """Return the mean of a field over the workers that have it; None if none has."""
        means = [load[priority_class][what] for load in self._loads if load[priority_class][what] is not None]
        return sum(means) / len(means) if means else None


def _mean_output_tokens(stages: Mapping[Stage, _StageWorkers], priority_class: PriorityClass) -> float | None:
    """Return the mean tokens of answers, or of requests' limits until an answer is complete."""
    means = (stages[stage].compute_mean(priority_class, "mean_output_tokens") for stage in ("decode", "prefill"))
    return next((mean for mean in means if mean is not None), None)


def _compute_class_lag(
    unsettled: int, stage: _StageWorkers, priority_class: PriorityClass, mean_output: float | None
) -> Lag:
    unheld, messages = stage.count_unheld(priority_class, unsettled), stage.count_messages(priority_class, unsettled)

    def tokens(held: str, mean: float | None) -> int | None:
        if not messages:
            return 0
        return None if unheld and mean is None else stage.sum_field(priority_class, held) + round(unheld * (mean or 0))

    prompt = tokens("prompt_tokens", stage.compute_mean(priority_class, "mean_prompt_tokens"))
    return Lag(messages, prompt, tokens("output_tokens", mean_output))


def _estimate_wait_s(
    lags: Mapping[Stage, Mapping[PriorityClass, Lag]],
    stages: Mapping[Stage, _StageWorkers],
    outputs: Mapping[PriorityClass, float | None],
    before: Sequence[PriorityClass],
) -> float | None:
    """Return how long a new request of the last class of `before` waits for decode. The stages work side by side."""
    if not all(stage.is_there for stage in stages.values()):
        return None
    waits = (
        _estimate_prefill_s(lags["prefill"], stages["prefill"], before),
        _estimate_decode_s(lags, stages["decode"], outputs, before),
    )
    known = [wait for wait in waits if wait is not None]
    return max(known) if len(known) == len(waits) else None


def _estimate_prefill_s(
    lags: Mapping[PriorityClass, Lag], prefill: _StageWorkers, before: Sequence[PriorityClass]
) -> float | None:
    """Return how long the prompts before it take: they are computed one after the other, about."""
    tokens = [lags[priority_class].prompt_tokens for priority_class in before]
    known = [count for count in tokens if count is not None]
    if len(known) < len(tokens):
        return None
    return _to_seconds(sum(known), prefill.tokens_per_s)


def _estimate_decode_s(
    lags: Mapping[Stage, Mapping[PriorityClass, Lag]],
    decode: _StageWorkers,
    outputs: Mapping[PriorityClass, float | None],
    before: Sequence[PriorityClass],
) -> float | None:
    """Return how long the answers before it take that do not run yet and will find no capacity."""
    capacity = decode.sum_capacity(before[-1])
    seconds = 0.0
    for priority_class in before:
        num_waiting = max(
            0,
            sum(lags[stage][priority_class].messages for stage in STAGES) - decode.sum_field(priority_class, "running"),
        )
        num_behind, capacity, mean = (
            max(0, num_waiting - capacity),
            max(0, capacity - num_waiting),
            outputs[priority_class],
        )
        more = None if num_behind and mean is None else _to_seconds(num_behind * (mean or 0), decode.tokens_per_s)
        if more is None:
            return None
        seconds += more
    return seconds


def _estimate_queued_batch_s(num_jobs: int, decode: _StageWorkers, mean_output: float | None) -> float | None:
    """Return how long batch jobs that no worker holds take, as if no interactive ones came."""
    unheld = decode.count_unheld("batch", num_jobs)
    return None if unheld and mean_output is None else _to_seconds(unheld * (mean_output or 0), decode.tokens_per_s)


def _to_seconds(num_tokens: float, tokens_per_s: float | None) -> float | None:
    if not num_tokens:
        return 0.0
    return None if tokens_per_s is None else num_tokens / tokens_per_s
