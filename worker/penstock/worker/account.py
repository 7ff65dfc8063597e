"""Adds a worker's seconds to the sums in Redis, by which `penstock usage --cost` divides its price."""

import json
import time
from collections.abc import Callable

import redis

from penstock.names import Pipeline, WorkerKind
from penstock.redis.scripts import load_script
from penstock.telemetry.seconds import Work

COUNT_SECONDS = load_script("penstock.worker", "count_seconds")
WRITE_INTERVAL_S = 10.0
"""How often seconds are written. A worker that is killed leaves out as many."""
REMEMBERED_S = 3600
"""For how long Redis remembers which call was the last."""


class SecondsAccount:
    """The sums of one worker process. One thread writes them."""

    def __init__(
        self, pipeline: Pipeline, kind: WorkerKind, model: str, token: str, seconds: Callable[[], dict[Work, float]]
    ) -> None:
        """`token` tells this process apart; `seconds` returns what its seconds were spent on so far."""
        self._pipeline, self._kind, self._model, self._seconds = pipeline, kind, model, seconds
        self._last_key = pipeline.seconds_key(f"last:{token}")
        self._written: dict[Work, int] = {}
        self._number, self._due_s = 0, time.monotonic() + WRITE_INTERVAL_S
        self._open: tuple[str, dict[Work, int]] | None = None
        """The day and the microseconds of a call that was not answered: it is made again as it was."""

    def write(self, client: "redis.Redis", *, is_last: bool = False) -> None:
        """Add what was spent since the last call, once it is due. Raises `redis.RedisError`: the next repeats it."""
        if time.monotonic() < self._due_s and not is_last:
            return
        self._due_s = time.monotonic() + WRITE_INTERVAL_S
        if self._open is None:
            now = {work: round(spent_s * 1e6) for work, spent_s in self._seconds().items()}
            self._number += 1
            day = time.strftime("%Y-%m-%d", time.gmtime())
            self._open = day, {work: total - self._written.get(work, 0) for work, total in now.items()}
        day, spent = self._open
        words = [word for work, count in spent.items() if count for word in (self._name_field(work), count)]
        COUNT_SECONDS.run(
            client, [self._pipeline.seconds_key(day), self._last_key], [self._number, REMEMBERED_S, *words]
        )
        self._written = {work: self._written.get(work, 0) + count for work, count in spent.items()}
        self._open = None

    def _name_field(self, work: Work) -> str:
        """Return the field of a kind of worker, a model, and what the seconds were spent on."""
        return json.dumps([self._kind, self._model, *work])
