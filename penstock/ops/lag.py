"""How much work waits, counted in tokens, and how long a request would have to wait for its turn.

The topics know how many messages are not settled (`Bus.unsettled`); each worker's heartbeat knows what it holds of
them, token by token, what a message lately brought, and how fast the worker is (`penstock.worker.load`). So

    tokens = (messages that no worker holds) x (recent mean of a message) + what the workers hold
    wait   = tokens before it / (rates of the living workers together), of the stage that takes longer

A plain producer need not say what its request costs. Where nothing was measured yet, the answer is None.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.bus.connect import connect
from penstock.bus.contract import Bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.names import CLASSES, STAGES, Pipeline, PriorityClass, Stage
from penstock.ops.status import read_heartbeats
from penstock.redis.client import redis_client

T = TypeVar("T")
HeartbeatStatus = Mapping[str, Any]
MAX_AGE_S = 0.5
"""How long an answer is good: heartbeats come every second."""
SERVING_STATES = ("ready", "degraded")
RATE_FIELDS: Mapping[Stage, str] = {"prefill": "prompt_tokens_per_s", "decode": "output_tokens_per_s"}
"""Which of a worker's rates is its work."""


@dataclass(frozen=True)
class Lag:
    """What one class has still to do in one stage."""

    messages: int
    """Not settled: in the topic, or in a worker."""
    prompt_tokens: int | None
    """Of prompts that are not computed. In decode those that no worker has looked at count: their KV may be stored."""
    output_tokens: int | None
    """Still to be generated, about; of requests that a worker holds, at most."""


@dataclass(frozen=True)
class PipelineLag:
    """One look at a pipeline."""

    stages: Mapping[Stage, Mapping[PriorityClass, Lag]]
    waits: Mapping[PriorityClass, float | None]
    """See `estimated_wait_s`."""
    queued_batch_s: float | None
    """How long decode has to do with batch work that was handed over and that nobody has taken; None: not known."""
    mean_output_tokens: Mapping[PriorityClass, float | None]
    """Tokens of an answer: as they lately were; until one is complete, as it may become. None: not known."""

    def estimated_wait_s(self, klass: PriorityClass = "interactive") -> float | None:
        """How long a request submitted now would wait until it is worked on, in seconds.

        Batch work does not count for interactive, which overtakes it. None: not known, as some stage has no worker,
        or has not measured yet what it would take to say.
        """
        return self.waits[klass]

    def as_json(self) -> dict[str, Any]:
        """For `penstock lag --json`: by class, then by stage."""
        return {
            klass: {stage: vars(self.stages[stage][klass]) for stage in STAGES}
            | {"estimated_wait_s": None if (wait := self.waits[klass]) is None else round(wait, 3)}
            for klass in CLASSES
        }


class PipelineWatch(ABC, Generic[T]):
    """Asks the topics and the workers of a pipeline, as often as there is news. Thread-safe."""

    def __init__(self, addresses: Addresses, settings: BusSettings) -> None:
        self._addresses, self._settings, self._pipeline = addresses, settings, Pipeline(addresses.pipeline)
        self._redis = redis_client(addresses.first_url)
        self._bus: Bus | None = None
        self._last: T | None = None
        self._asked_at = 0.0
        self._lock = threading.Lock()

    def read_latest(self) -> T:
        """As of now, or of `FRESH_S` ago: not to be changed. Raises `BusUnavailable` or `redis.RedisError`."""
        with self._lock:
            if self._bus is None:
                self._bus = connect(self._addresses, self._settings)
            if self._last is None or time.monotonic() > self._asked_at + MAX_AGE_S:
                self._last = self._read_now(self._bus)
                self._asked_at = time.monotonic()
            return self._last

    def close(self) -> None:
        """Free the connection."""
        self._redis.close()

    @abstractmethod
    def _read_now(self, bus: Bus) -> T:
        """As of now."""


class LagWatch(PipelineWatch[PipelineLag]):
    """Only how much waits."""

    def _read_now(self, bus: Bus) -> PipelineLag:
        return compute_lag(self._pipeline, bus.unsettled(), read_heartbeats(self._redis, self._pipeline))


def compute_lag(pipeline: Pipeline, unsettled: Mapping[str, int], workers: Sequence[HeartbeatStatus]) -> PipelineLag:
    """What topics and heartbeats say together."""
    stages = {stage: _StageWorkers(stage, workers) for stage in STAGES}
    outputs = {klass: _mean_output_tokens(stages, klass) for klass in CLASSES}
    lags = {
        stage: {
            klass: _compute_class_lag(unsettled[topic], stages[stage], klass, outputs[klass])
            for klass, topic in pipeline.input_topics(stage).items()
        }
        for stage in STAGES
    }
    waits = {klass: _estimate_wait_s(lags, stages, outputs, CLASSES[: rank + 1]) for rank, klass in enumerate(CLASSES)}
    ahead_s = _estimate_queued_batch_s(lags["decode"]["batch"], stages["decode"], outputs["batch"])
    return PipelineLag(lags, waits, ahead_s, outputs)


class _StageWorkers:
    """The workers of one stage, taken together."""

    def __init__(self, stage: Stage, workers: Iterable[HeartbeatStatus]) -> None:
        mine = [worker for worker in workers if worker["stage"] == stage and "load" in worker]
        self._loads = [worker["load"] for worker in mine]
        serving = [worker["load"] for worker in mine if worker["state"] in SERVING_STATES]
        rates = [load[RATE_FIELDS[stage]] for load in serving if load[RATE_FIELDS[stage]]]
        self.is_there = bool(serving)
        self.tokens_per_s: float | None = sum(rates) / len(rates) * len(serving) if rates else None
        """One that has measured nothing yet counts as the others do."""
        self._serving = serving

    def sum_field(self, klass: PriorityClass, what: str) -> int:
        """Over all workers."""
        return int(sum(load[klass][what] for load in self._loads))

    def count_unheld(self, klass: PriorityClass, messages: int) -> int:
        """Of so many messages of a class, those that no worker holds.

        A heartbeat may be a second old: what it holds may be settled by now, or be more than the topic says.
        """
        return max(0, messages - self.sum_field(klass, "requests"))

    def sum_capacity(self, klass: PriorityClass) -> int:
        """How many more requests would run at once."""
        return int(sum(load[klass]["room"] for load in self._serving))

    def compute_mean(self, klass: PriorityClass, what: str) -> float | None:
        """Tokens of a message, over the workers that had any."""
        means = [load[klass][what] for load in self._loads if load[klass][what] is not None]
        return sum(means) / len(means) if means else None


def _mean_output_tokens(stages: Mapping[Stage, _StageWorkers], klass: PriorityClass) -> float | None:
    """Of an answer: as long as they lately were; until one is complete, as long as they may become."""
    means = (stages[stage].compute_mean(klass, "mean_output_tokens") for stage in ("decode", "prefill"))
    return next((mean for mean in means if mean is not None), None)


def _compute_class_lag(messages: int, stage: _StageWorkers, klass: PriorityClass, mean_output: float | None) -> Lag:
    unheld = stage.count_unheld(klass, messages)

    def tokens(held: str, mean: float | None) -> int | None:
        if not messages:
            return 0
        return None if unheld and mean is None else stage.sum_field(klass, held) + round(unheld * (mean or 0))

    prompt = tokens("prompt_tokens", stage.compute_mean(klass, "mean_prompt_tokens"))
    return Lag(messages, prompt, tokens("output_tokens", mean_output))


def _estimate_wait_s(
    lags: Mapping[Stage, Mapping[PriorityClass, Lag]],
    stages: Mapping[Stage, _StageWorkers],
    outputs: Mapping[PriorityClass, float | None],
    before: Sequence[PriorityClass],
) -> float | None:
    """Until a new request of the last class of `before` is decoded: the stages work side by side."""
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
    """Prompts are computed one after the other, more or less: all that are there come before it."""
    tokens = [lags[klass].prompt_tokens for klass in before]
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
    """Answers are written side by side: only those come before it that do not run yet and will find no place."""
    room = decode.sum_capacity(before[-1])
    seconds = 0.0
    for klass in before:
        num_waiting = max(0, sum(lags[stage][klass].messages for stage in STAGES) - decode.sum_field(klass, "running"))
        num_behind, room, mean = max(0, num_waiting - room), max(0, room - num_waiting), outputs[klass]
        more = None if num_behind and mean is None else _to_seconds(num_behind * (mean or 0), decode.tokens_per_s)
        if more is None:
            return None
        seconds += more
    return seconds


def _estimate_queued_batch_s(lag: Lag, decode: _StageWorkers, mean_output: float | None) -> float | None:
    """All of decode's pace is counted, as if nothing interactive came."""
    unheld = decode.count_unheld("batch", lag.messages)
    return None if unheld and mean_output is None else _to_seconds(unheld * (mean_output or 0), decode.tokens_per_s)


def _to_seconds(num_tokens: float, tokens_per_s: float | None) -> float | None:
    if not num_tokens:
        return 0.0
    return None if tokens_per_s is None else num_tokens / tokens_per_s
