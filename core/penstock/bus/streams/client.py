"""The common part of all clients of Redis Streams: connections, entries, groups and errors."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.bus.contract import Outgoing, as_bytes, as_text
from penstock.errors import BusUnavailable
from penstock.names import Pipeline, WorkerKind
from penstock.redis.client import REDIS_TIMEOUT_S, connection_pool

MAX_KEPT_ENTRIES = 50_000
"""About how many entries the streams of results and of dead letters keep, each."""


def connect_client(url: str, timeout_s: float = REDIS_TIMEOUT_S) -> "redis.Redis":
    """Return a client that never repeats a command by itself: only the caller knows whether a command may run twice."""
    limits: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return redis.Redis.from_pool(connection_pool(url, protocol=2, retry=Retry(NoBackoff(), 0), **limits))


@contextlib.contextmanager
def bus_errors() -> Iterator[None]:
    """Raise `BusUnavailable` instead of the errors of Redis' client."""
    try:
        yield
    except redis.RedisError as error:
        raise to_bus_unavailable(error) from error


def to_bus_unavailable(error: redis.RedisError) -> BusUnavailable:
    """Return `BusUnavailable` with an error of Redis' client as its cause."""
    unavailable = BusUnavailable(f"Redis: {error}")
    unavailable.__cause__ = error
    return unavailable


def create_groups(client: "redis.Redis", pipeline: Pipeline, stage: WorkerKind) -> None:
    """Create a stage's group on its streams where it is missing. It reads them from the beginning."""
    for topic in pipeline.input_topics(stage).values():
        try:
            client.xgroup_create(pipeline.stream_key(topic), pipeline.consumer_group(stage), id="0", mkstream=True)
            client.hsetnx(pipeline.finished_key, topic, "0")  # what is gone from now on nobody else has finished
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


def max_stream_entries(pipeline: Pipeline, topic: str) -> int:
    """Return to how many entries a topic is trimmed; 0 for an input topic of a stage, which is never trimmed."""
    return MAX_KEPT_ENTRIES if topic in {pipeline.results_topic, pipeline.dead_letter_topic} else 0


def encode_entry(message: Outgoing) -> dict[str, str | bytes]:
    """Return the fields of a message's stream entry: `value`, and if there are any, `key` and `headers` (JSON)."""
    fields: dict[str, str | bytes] = {"value": message.value}
    if message.key is not None:
        fields["key"] = as_bytes(message.key)
    if message.headers:
        fields["headers"] = json.dumps(dict(message.headers))
    return fields


def _replace_lone_surrogates(text: str) -> str:
    """Return text that can be encoded: JSON may hold lone surrogates. Those that stand for bytes (`as_text`) stay."""
    try:
        return as_text(as_bytes(text))
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()


def decode_entry(fields: dict[bytes, bytes]) -> tuple[bytes, str | None, dict[str, str]]:
    """Return value, key and headers of a stream entry. Headers that are no JSON object of strings are left out."""
    key = fields.get(b"key")
    headers: dict[str, str] = {}
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(fields.get(b"headers", b"{}"))
        if isinstance(found, dict):
            headers = {
                _replace_lone_surrogates(name): _replace_lone_surrogates(text)
                for name, text in found.items()
                if isinstance(text, str)
            }
    return fields.get(b"value", b""), None if key is None else as_text(key), headers
