"""The workers of a pipeline, from their heartbeats, and whether the pipeline can serve."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import redis
from redis.exceptions import NoPermissionError

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.names import STAGES, WORKERS_KEY, Pipeline, find_stages
from penstock.redis.client import REDIS_TIMEOUT_S, redis_client


@dataclass(frozen=True)
class Health:
    """`ok`; `degraded`: accepted requests are answered later or more slowly; `down`: no requests can be accepted."""

    state: Literal["ok", "degraded", "down"]
    reasons: tuple[str, ...] = ()


def read_worker_status(addresses: Addresses) -> list[dict[str, Any]]:
    """Return the last heartbeat of each live worker, by stage and name (see `penstock.worker.heartbeat`)."""
    with redis_client(addresses.first_url) as client:
        return read_heartbeats(client, Pipeline(addresses.pipeline))


def read_heartbeats(client: "redis.Redis", pipeline: Pipeline) -> list[dict[str, Any]]:
    """Return the last heartbeats over an open connection, and remove expired workers from the list in Redis."""
    known: Any = client.smembers(WORKERS_KEY)
    keys = sorted(key for key in known if key.startswith(pipeline.worker_prefix.encode()))
    beats: dict[bytes, Any] = dict(zip(keys, client.mget(keys) if keys else [], strict=True))
    if gone := [key for key, value in beats.items() if value is None]:  # one that lives is back with its next beat
        with suppress(NoPermissionError):  # the user may have the right to read only
            client.srem(WORKERS_KEY, *gone)
    return [json.loads(value) for value in beats.values() if value is not None]


def check_health(addresses: Addresses, settings: BusSettings) -> Health:
    """Return the pipeline's health, within a few seconds also where servers do not answer."""
    try:
        connect_bus(addresses, settings).check_connection(REDIS_TIMEOUT_S)
    except BusUnavailable as error:
        return Health("down", (str(error),))
    try:
        workers = read_worker_status(addresses)
    except redis.RedisError as error:
        return Health("degraded", (f"Redis: {error}",))
    return assess_health(workers)


def assess_health(workers: Iterable[dict[str, Any]], server_problem: str = "") -> Health:
    """Return the pipeline's health, by the heartbeats of its workers and the problems of its servers."""
    reasons = (*([server_problem] if server_problem else []), *_list_problems(workers))
    return Health("degraded" if reasons else "ok", reasons)


def _list_problems(workers: Iterable[dict[str, Any]]) -> Iterable[str]:
    workers = list(workers)
    for stage in STAGES:
        if not any(stage in find_stages(worker["stage"]) and worker["state"] == "ready" for worker in workers):
            yield f"no {stage} worker is ready"
    for worker in workers:
        if worker["state"] == "degraded":
            yield f"{worker['stage']} worker {worker['name']}: {worker['reason']}"
