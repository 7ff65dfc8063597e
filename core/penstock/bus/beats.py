"""Reads the heartbeats that tell a placer what each worker has left to do."""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.bus.placement import JobLoad, WorkerBeat
from penstock.names import CLASSES, WHOLE_KINDS, WORKERS_KEY, Pipeline
from penstock.redis.client import redis_client
from penstock.redis.scripts import load_script
from penstock.worker_speed import WorkerSpeed

STALE_SHARE = 0.75
"""A heartbeat is too old after this share of its lease, which is three periods."""

MAX_MEAN_TOKENS = 1e9
BEATS = load_script("penstock.bus", "beats")
"""Reads heartbeats. Producers may have no right to run scripts: `BeatReader` does without."""


class BeatReader:
    """Reads the heartbeats of the workers of one pipeline. It connects when it is first used."""

    def __init__(self, url: str, pipeline: Pipeline) -> None:
        self._redis = redis_client(url)
        self._pipeline = pipeline
        self._prefixes = tuple(
            pipeline.worker_key(kind, "").encode() for kind in ("prefill", "auto", *WHOLE_KINDS, "decode")
        )

    def read_beats(self) -> list[WorkerBeat]:
        """Return the last heartbeat of each of the workers. Raises `redis.RedisError`.

        The list is empty where one of them is of a version that does not tell its partitions: it would get no requests.
        """
        known: Any = self._redis.smembers(WORKERS_KEY)
        keys = sorted(key for key in known if key.startswith(self._prefixes))
        if not keys:
            return []
        now_s = time.monotonic()
        with self._redis.pipeline(transaction=False) as asked:
            asked.mget(keys)
            for key in keys:
                asked.pttl(key)
            values, *left = asked.execute()
        return parse_beats(self._pipeline, zip(keys, values, left, strict=True), now_s)

    def close(self) -> None:
        """Free the connection, unless it is being used: that one is freed with the client."""
        self._redis.connection_pool.disconnect(inuse_connections=False)


def parse_beats(pipeline: Pipeline, told: Iterable[tuple[bytes, bytes | None, int]], now_s: float) -> list[WorkerBeat]:
    """Return the heartbeats of workers that have joined their group, of their keys, values and left milliseconds.

    The list is empty where one of them cannot be read.
    """
    found, num_before = list[WorkerBeat](), len(pipeline.worker_prefix)
    for key, value, left_ms in told:
        if value is not None:
            try:
                beat = _parse_beat(key.decode()[num_before:], json.loads(value), left_ms, now_s)
            except (KeyError, TypeError, ValueError, OverflowError):
                return []
            found += [] if beat is None else [beat]
    return found


def _parse_beat(worker: str, told: Mapping[str, Any], left_ms: int, now_s: float) -> WorkerBeat | None:
    """Return a heartbeat; None of a worker that has not joined its group."""
    if "load" not in told:
        return None
    lease_ms, load = told["lease_ms"], told["load"]
    at_s = now_s - (lease_ms - left_ms) / 1000
    return WorkerBeat(
        worker,
        at_s,
        at_s + STALE_SHARE * lease_ms / 1000,
        {priority_class: tuple(map(int, load[priority_class]["partitions"])) for priority_class in CLASSES},
        {priority_class: max(0, int(load[priority_class]["waiting_tokens"])) for priority_class in CLASSES},
        load["chars_per_token"] and max(0.1, float(load["chars_per_token"])),
        WorkerSpeed.parse(load.get("speed")),
        _parse_jobs(told, load),
        _bound_mean(load["interactive"].get("mean_prompt_tokens")),
        told.get("state") == "ready" and _is_reading(worker, load["interactive"]),
        frozenset(map(str, told.get("adapters") or ())),
    )


def _bound_mean(told: Any) -> float | None:
    return min(MAX_MEAN_TOKENS, max(1.0, float(told))) if told else None


def _is_reading(worker: str, load: Mapping[str, Any]) -> bool:
    """Return whether a worker takes requests. Without capacity, it does soon if prompts wait in it: else answers fill
    it.
    """
    is_reader = worker.startswith(("prefill:", "auto:", "embed:"))
    return is_reader and (load.get("capacity", 0) > 0 or load["waiting_tokens"] > 0)


def _parse_jobs(told: Mapping[str, Any], load: Mapping[str, Any]) -> JobLoad | None:
    """Return what a heartbeat tells of jobs; None if it is of a version that does not. A worker that computes no
    model reads none.
    """
    if "pool" not in told:
        return JobLoad(dict.fromkeys(CLASSES, ()), 0, 0)
    if not all("job_partitions" in load[priority_class] for priority_class in CLASSES):
        return None
    return JobLoad(
        {priority_class: tuple(map(int, load[priority_class]["job_partitions"])) for priority_class in CLASSES},
        sum(int(load[priority_class]["waiting_jobs"]) for priority_class in CLASSES),
        int(told["pool"]["total"]) - int(told["pool"]["used"]),
    )
