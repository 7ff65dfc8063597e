"""Reaching servers: how long Redis may take to answer, what counts as an outage, and how long to pause then."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthorizationError, ClusterDownError, NoPermissionError, OutOfMemoryError, TryAgainError
from redis.retry import Retry

from penstock.errors import BusUnavailable
from penstock.redis.sentinel import AsyncMasterPool, MasterPool, is_sentinel

ANSWER_S = 2.0
"""A Redis that does not answer within this time counts as away."""
ASYNC_CONNECTIONS, TURN_S = 16, 30.0
"""Of one asyncio client; and how long one may wait for its turn."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

_AWAY = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    OutOfMemoryError,
    ClusterDownError,
    TryAgainError,
)
_REFUSED = (redis.AuthenticationError, AuthorizationError)
_CODES = ("MISCONF", "NOREPLICAS", "NOGROUP", "no such key", "BUSY ", "UNKILLABLE", "UNBLOCKED")
"""What redis-py has no class for: the disk is full, replicas are gone, all data is gone, a script does not end, the
server became a replica while we waited."""


def redis_client(url: str, answer_s: float = ANSWER_S) -> "redis.Redis":
    """A client that gives up in time. A connection that the server had closed is opened again, once."""
    retry = Retry(NoBackoff(), 1, (redis.ConnectionError,))
    return redis.Redis.from_pool(connection_pool(url, retry=retry, **_limits(answer_s)))


def async_redis_client(url: str) -> "redis.asyncio.Redis":
    """The same for asyncio, over a few connections: a thousand that ask at once wait for each other."""
    retry = redis.asyncio.retry.Retry(NoBackoff(), 1, (redis.ConnectionError,))
    pool = async_connection_pool(url, max_connections=ASYNC_CONNECTIONS, timeout=TURN_S, retry=retry, **_limits())
    return redis.asyncio.Redis.from_pool(pool)


def connection_pool(url: str, **options: Any) -> redis.ConnectionPool:
    """Connections to the server at an address, or to the master that Sentinels name."""
    return MasterPool(url, **options) if is_sentinel(url) else redis.ConnectionPool.from_url(url, **options)


def async_connection_pool(url: str, **options: Any) -> redis.asyncio.ConnectionPool:
    """The same for asyncio; who finds all connections in use waits for one."""
    if is_sentinel(url):
        return AsyncMasterPool(url, **options)
    pool: Any = redis.asyncio.BlockingConnectionPool
    made: redis.asyncio.ConnectionPool = pool.from_url(url, **options)
    return made


def _limits(answer_s: float = ANSWER_S) -> dict[str, Any]:
    return {"socket_timeout": answer_s, "socket_connect_timeout": answer_s}


def is_away(error: BaseException) -> bool:
    """Whether an error means that a server is away, or cannot work now: the same may succeed later.

    A wrong password or a bug, in ours or in a script, is not that.
    """
    if isinstance(error, BusUnavailable):
        cause = error.__cause__
        return not isinstance(cause, redis.RedisError) or is_away(cause)
    if isinstance(error, _REFUSED):
        return False
    return isinstance(error, _AWAY) or (isinstance(error, redis.ResponseError) and str(error).startswith(_CODES))


def is_outage(error: BaseException) -> bool:
    """The same for who was let in before: then a refusal too may be over soon, as when a password is changed."""
    refusal = error.__cause__ if isinstance(error, BusUnavailable) else error
    return is_away(error) or isinstance(refusal, (*_REFUSED, NoPermissionError))


@contextmanager
def translate_outages() -> Iterator[None]:
    """Raise `BusUnavailable` instead of an error that means that Redis is away."""
    try:
        yield
    except redis.RedisError as error:
        if is_away(error):
            raise BusUnavailable(f"Redis: {error}") from error
        raise


def replies_to(pipe: "redis.client.Pipeline") -> list[Any]:
    """The replies to a pipeline's commands. Raises as `checked`."""
    return checked(pipe.execute(raise_on_error=False))


def replies_once(client: "redis.Redis", commands: Sequence[Sequence[Any]]) -> list[Any]:
    """The replies to commands that are not to be done twice. Raises as `checked`, and where the connection breaks
    before all replies are read: then it is unknown what was done.

    redis-py itself would send them again then.
    """
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        connection.send_packed_command(connection.pack_commands(commands))
        replies = [_reply_to(client, connection, str(command[0])) for command in commands]
    except BaseException:  # what is not read must not be taken for the replies to others
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
    return checked(replies)


def _reply_to(client: "redis.Redis", connection: Any, name: str) -> Any:
    try:
        return client.parse_response(connection, name)  # type: ignore[no-untyped-call]
    except redis.ResponseError as error:
        return error


def checked(replies: list[Any]) -> list[Any]:
    """The same replies. Raises the first error among them as the server said it: redis-py would put words before it,
    and it could no longer be told whether it `is_away`.
    """
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def pauses() -> Iterator[float]:
    """Seconds to wait before each further attempt: longer and longer, and no two workers' alike."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
