"""The heartbeat: a worker's state, written to Redis while it lives."""

import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import redis

from penstock.errors import PenstockError
from penstock.names import WORKERS_KEY, Pipeline
from penstock.redis.client import execute_pipeline, redis_client

log = logging.getLogger(__name__)

GOODBYE_TTL_S = 60.0
"""How long Redis remembers that a worker left in good order and was not lost."""


class Heartbeat:
    """A Redis key with this worker's state, renewed by a thread. It expires soon after the process dies.

    The value is a JSON object: stage, name, host, pid, token (tells apart containers with one host name and process
    id), model, max_model_len (tokens of prompt and answer together), response_template (of the model's tokenizer, if it
    has one), kafka (the brokers it reads from, empty on Redis Streams), state (`loading`, `ready`, `degraded`,
    `draining`), reason (why it is degraded), progress (0 to 1, while loading), running, waiting, load (in tokens, see
    `load.py`), pool and kv (blocks), recent (see `penstock.telemetry.recent`), since (seconds since the epoch by the
    clock of Redis, as hosts' clocks may be changed).
    """

    def __init__(self, url: str, pipeline: Pipeline, stage: str, name: str, interval_s: float) -> None:
        self._redis = redis_client(url)
        self._key, self._left_key = pipeline.worker_key(stage, name), pipeline.left_key(stage, name)
        self._interval_s = interval_s
        self._since_s: float | None = None
        self._status: dict[str, object] = {
            "stage": stage, "name": name, "host": socket.gethostname(), "pid": os.getpid(),
            "token": uuid.uuid4().hex, "state": "loading", "progress": 0.0,
        }  # fmt: skip
        self.state = "loading"
        """The state of the last beat, whether it could be written or not."""
        self._logged = ("", -1)
        self._load: Callable[[], dict[str, object]] = dict
        self._wake = threading.Event()
        self._ended = self._is_written = False
        self.is_replaced = False
        """Whether a newer process has this worker's name: this one was given up while it was paused."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        self._wake.set()
        self._thread.join()

    def update_status(self, *, now: bool = False, **status: object) -> None:
        """Change fields of the heartbeat. With `now` it is written at once."""
        self._status.update(status)
        if now:
            self._wake.set()

    def set_load_source(self, load: Callable[[], dict[str, object]]) -> None:
        """Call `load` at each beat for fields that change all the time. A ready worker with a `reason` is degraded."""
        self._load = load

    def report_progress(self, what: str, share: float) -> None:
        """Report the progress of a long load to the heartbeat and, every tenth of it, to the log."""
        if (what, int(share * 10)) != self._logged:
            self._logged = (what, int(share * 10))
            log.info("%s: %.0f%%", what, share * 100)
        self.update_status(doing=what, progress=round(share, 3))

    def write_beat(self) -> None:
        """Write a beat now, and check whose the last one was. Raises `redis.RedisError`."""
        if self._since_s is None:
            seconds, microseconds = self._redis.time()
            self._since_s = seconds + microseconds / 1e6
        status = self._status | {"since": self._since_s} | self._load()
        if status["state"] == "ready" and status.get("reason"):
            status["state"] = "degraded"
        self.state = str(status["state"])
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._key, json.dumps(status), px=int(self._interval_s * 4000), get=True)
            pipe.sadd(WORKERS_KEY, self._key)
            if not self._is_written:
                pipe.delete(self._left_key)
            before, *_ = execute_pipeline(pipe)
        self._is_written = True
        self._compare_token(before)

    def check_replaced(self) -> bool:
        """Ask Redis and return `is_replaced`. Where Redis does not answer it stays as it was."""
        with suppress(redis.RedisError):
            self._compare_token(self._redis.get(self._key))
        return self.is_replaced

    def _run(self) -> None:
        while not self._ended and not self.is_replaced:
            try:
                self.write_beat()
            except redis.RedisError as error:
                if self._is_written:
                    log.warning("heartbeats cannot be written: %s", error)
                self._is_written = False
            except Exception:  # a bug in a figure: without heartbeats a worker that works would look lost
                log.exception("a heartbeat could not be made; the next one is tried")
            self._wake.wait(self._interval_s)
            self._wake.clear()
        if self._is_written and not self.is_replaced:
            with suppress(redis.RedisError):  # else it runs out
                self._redis.set(self._left_key, "", px=int(GOODBYE_TTL_S * 1000))
                self._redis.delete(self._key)

    def _compare_token(self, found: object) -> None:
        if isinstance(found, bytes) and self._since_s is not None:
            other: dict[str, Any] = json.loads(found)
            is_mine = other.get("token") == self._status["token"]
            self.is_replaced = self.is_replaced or (not is_mine and other["since"] > self._since_s)


def choose_worker_name(given: str) -> str:
    """Return the given name, or one made of host name, process id and a random part.

    The random part is needed as containers on their host's network may have equal process ids. Of two workers with one
    name the older is fenced.
    """
    return given or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def pin_to_cores(cores: str) -> None:
    """Pin this process to cores (`0` or `0,1`). Raises `PenstockError` for cores that do not exist; does nothing where
    the system has no affinity.
    """
    if cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        except (OSError, ValueError) as error:
            raise PenstockError(f"PENSTOCK_WORKER_CORES={cores}: {error}") from None
