"""Redis clients with time limits, the errors that count as an outage, and the pauses between attempts."""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import hiredis
import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthorizationError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    TryAgainError,
)
from redis.retry import Retry

from penstock.errors import BusUnavailable
from penstock.pace import NUM_STEADY, ServerPace
from penstock.redis.logins import split_login
from penstock.redis.sentinel import AsyncMasterPool, MasterPool, is_sentinel

REDIS_TIMEOUT_S = 2.0
"""A Redis server that does not answer within this time counts as away. Workers measure how late it answers, and wait
for longer where it is slow, see `find_pace`.
"""
LARGE_BYTES, SLOW_BYTES_PER_S = 2**20, 2**17
"""A command of more bytes may take as long as it takes at this rate, 1 Mbit/s, and `REDIS_TIMEOUT_S` more."""
MAX_ASYNC_CONNECTIONS = 16
"""The most connections that one asyncio client opens."""
CONNECTION_WAIT_S = 30.0
"""Seconds that a command waits for a free connection of an asyncio client."""
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 2.0

_AWAY_ERRORS = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    OutOfMemoryError,
    ClusterDownError,
    TryAgainError,
)
_REFUSED_ERRORS = (redis.AuthenticationError, AuthorizationError)
REPEAT_S = 60.0
"""Seconds within which a line about an outage is not repeated."""
_said_at: dict[str, float] = {}
_paces: dict[str, ServerPace] = {}
"""The pace of each server, by its address."""
_AWAY_CODES = ("MISCONF", "NOREPLICAS", "NOGROUP", "no such key", "BUSY ", "UNKILLABLE", "UNBLOCKED")
"""Outages for which redis-py has no class: the disk is full, replicas are gone, all data is gone, a script does not
end, the server became a replica while we waited."""


def redis_client(url: str, answer_s: float = REDIS_TIMEOUT_S) -> "redis.Redis":
    """Return a client that waits at most `answer_s` for a reply. It opens a connection that the server closed again,
    once.
    """
    retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
    return redis.Redis.from_pool(connection_pool(url, retry=retry, **_timeout_options(answer_s)))


def async_redis_client(url: str) -> "redis.asyncio.Redis":
    """Return an asyncio client with at most `MAX_ASYNC_CONNECTIONS` connections: commands wait for a free one."""
    retry = redis.asyncio.retry.Retry(NoBackoff(), 1, (redis.ConnectionError,))
    pool = async_connection_pool(
        url, max_connections=MAX_ASYNC_CONNECTIONS, timeout=CONNECTION_WAIT_S, retry=retry, **_timeout_options()
    )
    return redis.asyncio.Redis.from_pool(pool)


def connection_pool(url: str, **options: Any) -> redis.ConnectionPool:
    """Return a pool of connections to the server at an address, or to the master that Sentinels name. The time limits
    of its answers grow with the server's pace.
    """
    options["driver_info"] = None  # telling a driver's name takes two round trips for each connection
    plain, login = split_login(url)
    options |= login
    pool: Any = MasterPool(plain, **options) if is_sentinel(url) else redis.ConnectionPool.from_url(plain, **options)
    pool.url, pool.pace = url, _paces.setdefault(url, ServerPace())
    pace: ServerPace = pool.pace

    class PatientConnection(pool.connection_class):  # type: ignore[misc]
        """A connection whose time limit is set by the pace each time it is opened.

        A large command and its reply have more time, for a slow link. With the usual limit the command would fail each
        time, and the worker would be opened again each time.
        """

        is_patient = False

        @property
        def socket_timeout(self) -> float | None:
            usual_s: float | None = super().socket_timeout
            return None if usual_s is None else pace.stretch(usual_s)

        @socket_timeout.setter
        def socket_timeout(self, usual_s: float | None) -> None:
            self._socket_timeout = usual_s

        def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            num_bytes = sum(map(len, command))
            if (num_bytes > LARGE_BYTES or self.is_patient) and self.socket_timeout is not None:
                self.connect_check_health(check_health=False)
                self.is_patient = num_bytes > LARGE_BYTES
                more_s = num_bytes / SLOW_BYTES_PER_S if self.is_patient else 0.0
                self._sock.settimeout(self.socket_timeout + more_s)
            super().send_packed_command(command, check_health)

    pool.connection_class = PatientConnection
    return pool  # type: ignore[no-any-return]


def find_pace(client: "redis.Redis") -> ServerPace:
    """Return how late a client's server answers, as all workers of this process have seen it."""
    pace: ServerPace = getattr(client.connection_pool, "pace", None) or ServerPace()
    return pace


def learn_pace(client: "redis.Redis", limit_s: float = REDIS_TIMEOUT_S) -> None:
    """Ask a server as often as it takes to know that it is slow. Raise `redis.RedisError` where it does not answer: the
    next call waits for longer.
    """
    pool: Any = client.connection_pool
    pace = find_pace(client)
    with pace.ask(limit_s) as longest_s:
        asking = redis_client(pool.url, longest_s / pace.slowness)
        asking.ping()
    with contextlib.closing(asking):
        for _ in range(NUM_STEADY - 1):
            with pace.ask(limit_s):
                asking.ping()


def async_connection_pool(url: str, **options: Any) -> redis.asyncio.ConnectionPool:
    """Return an asyncio pool of connections. A caller that finds all of them in use waits for one."""
    url, login = split_login(url)
    options |= login
    pool: Any = redis.asyncio.BlockingConnectionPool
    made: Any = AsyncMasterPool(url, **options) if is_sentinel(url) else pool.from_url(url, **options)
    made.connection_class = _keep_cancellation(made.connection_class)
    return cast(redis.asyncio.ConnectionPool, made)


@functools.cache
def _keep_cancellation(connection_class: Any) -> Any:
    """Return the class, with commands that raise `CancelledError` whenever their task is cancelled meanwhile."""

    # redis-py sends commands in `asyncio.wait_for`. On Python 3.11 that swallows a cancellation which comes just as the
    # command was sent. The task would then go on, for a stream until its end.
    class Connection(connection_class):  # type: ignore[misc]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            task = asyncio.current_task()
            num_before = task.cancelling() if task else 0
            await super().send_packed_command(command, check_health)
            if task and task.cancelling() > num_before:
                await self.disconnect(nowait=True)  # its reply is not read
                raise asyncio.CancelledError

    return Connection


def _timeout_options(answer_s: float = REDIS_TIMEOUT_S) -> dict[str, Any]:
    return {"socket_timeout": answer_s, "socket_connect_timeout": min(answer_s, REDIS_TIMEOUT_S)}


def is_away(error: BaseException) -> bool:
    """Return whether an error means that a server is away or cannot work now, so that the same call may succeed later.

    A refused login or a bug, in this code or in a script, is no such error.
    """
    if isinstance(error, BusUnavailable):
        cause = error.__cause__
        return not isinstance(cause, redis.RedisError) or is_away(cause)
    if isinstance(error, _REFUSED_ERRORS):
        return False
    return isinstance(error, _AWAY_ERRORS) or (
        isinstance(error, redis.ResponseError) and str(error).startswith(_AWAY_CODES)
    )


def is_outage(error: BaseException) -> bool:
    """Return whether an error is an outage for a client that was let in before.

    Beside what `is_away` says, these are refusals: they may be over soon, as when a password is changed.
    """
    refusal = error.__cause__ if isinstance(error, BusUnavailable) else error
    is_refusal = isinstance(refusal, (*_REFUSED_ERRORS, NoPermissionError))
    # redis-py has no class for the refusal of a command within a script.
    return is_away(error) or is_refusal or str(refusal).startswith("ACL failure in script")


def log_outage(log: logging.Logger, line: str) -> None:
    """Log a warning, unless the same line was logged within the last minute."""
    if time.monotonic() > _said_at.get(line, -REPEAT_S) + REPEAT_S:
        _said_at[line] = time.monotonic()
        log.warning("%s", line)


@contextlib.contextmanager
def translate_outages() -> Iterator[None]:
    """Raise `BusUnavailable` instead of an error that means that Redis is away, or refuses this client."""
    try:
        yield
    except redis.RedisError as error:
        if is_outage(error):
            raise BusUnavailable(f"Redis: {error}") from error
        raise


def execute_pipeline(pipe: "redis.client.Pipeline") -> list[Any]:
    """Return the replies to a pipeline's commands. Raise the first error among them."""
    return raise_first_error(pipe.execute(raise_on_error=False))


def execute_all(client: "redis.Redis", commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the replies to commands as the server sends them, in one round trip, errors in their places. Where the
    connection breaks they are sent again as often as the client's own commands are.

    redis-py's pipelines take three times as much processor time for it.
    """
    if not commands:
        return []
    if (retry := client.get_retry()) is None:
        return execute_once(client, commands)
    return retry.call_with_retry(lambda: execute_once(client, commands), lambda _: None)


def execute_once(client: "redis.Redis", commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the replies to commands that must not run twice, as the server sends them, errors in their places.

    Raise `redis.ConnectionError` or `redis.TimeoutError` where the connection breaks before all replies are read: then
    it is unknown which commands ran. redis-py's own methods would send them again.
    """
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        # hiredis packs the words directly: redis-py would first look for words with blanks in them, and for buffers.
        packed = b"".join(hiredis.pack_command(tuple(command)) for command in commands)
        connection.send_packed_command([packed], check_health=False)
        replies = [_read_reply(connection) for _ in commands]
    except BaseException:  # replies that were not read must not be taken for the replies to other commands
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    return replies


def _read_reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error


def raise_first_error(replies: list[Any]) -> list[Any]:
    """Return the replies as they are, or raise the first error among them with the server's own text.

    redis-py would put words before that text, and `is_away` could not recognise it any more.
    """
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def raise_outage(replies: list[Any]) -> list[Any]:
    """Return the replies, with errors in the places of refused commands. Raise an error that concerns all commands: an
    outage, or `NoScriptError`.
    """
    for reply in replies:
        if isinstance(reply, Exception) and (is_outage(reply) or isinstance(reply, NoScriptError)):
            raise reply
    return replies


def backoff_pauses() -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: growing up to `MAX_BACKOFF_S`, with random jitter."""
    pause_s = MIN_BACKOFF_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, MAX_BACKOFF_S)
