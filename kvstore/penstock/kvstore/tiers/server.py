"""Connections to one Redis server of the KV store. A server that fails is not called for a while."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import redis
from redis.connection import ConnectionInterface

from penstock.errors import KVStoreError
from penstock.kvstore.tiers.contract import TierCounters
from penstock.kvstore.tiers.index import SCRIPTS
from penstock.kvstore.tiers.wire import ErrorReply, RespConnection, UnexpectedReply, encode_command
from penstock.redis.client import connection_pool
from penstock.redis.urls import hide_password

T = TypeVar("T")
log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
RETRY_AFTER_S = 1.0
"""Seconds for which a failed server is not called. A server that hangs must not hold up every request."""
NUM_SOCKET_LANES = 4
"""Connections over which large values are read from a unix socket at once."""
# A unix socket buffers at most 200 KB, and the server sleeps until most of it was read: over one connection, server and
# reader work in turns. TCP buffers megabytes.
MAX_IDLE_CONNECTIONS = 8
"""Connections that are kept open for later calls."""


class KVServer:
    """A connection is used by one call at a time, and closed after any error."""

    def __init__(self, url: str, large: bool) -> None:
        """`large` says whether most values are large. Raise `KVStoreError` for a bad url. Nothing is connected yet."""
        self._name = hide_password(url)
        self._large = large
        self.num_lanes = NUM_SOCKET_LANES if large and url.startswith("unix:") else 1
        try:
            pool = connection_pool(url, protocol=2, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
            options = {**pool.connection_kwargs, "redis_connect_func": _skip_greeting}
            self._make_greeting = partial(_make_greeting, options)
            if "credential_provider" not in options:
                self._make_greeting()
            self._make_connection = partial(
                pool.connection_class, **options
            )  # the pool itself would never make more than 100
            self._make_connection()
            _check_host(options.get("host", ""))
        except (ValueError, TypeError, redis.RedisError) as error:
            raise KVStoreError(f"{self._name} is not a valid address of a KV Redis: {error}") from None
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False
        self._retry_at_s = 0.0

    def call(self, call: Callable[[RespConnection], T], counters: TierCounters) -> T | None:
        """Return what `call` returns, or None if the server failed, which is counted and logged."""
        return self.call_on_connections(1, lambda wires: call(wires[0]), counters)

    def call_on_connections(
        self, count: int, call: Callable[[list[RespConnection]], T], counters: TierCounters
    ) -> T | None:
        """Like `call`, with several connections at once."""
        if self._closed or time.monotonic() < self._retry_at_s:
            counters.errors += 1
            return None
        wires: list[RespConnection] = []
        try:
            while len(wires) < count:
                wires.append(self._get_connection())
            result = call(wires)
        except (OSError, redis.RedisError, UnexpectedReply, ErrorReply) as error:
            self._close_connections(wires + self._take_idle())  # the other connections may be broken, too
            counters.errors += 1
            self._retry_at_s = time.monotonic() + RETRY_AFTER_S
            log.warning("KV server %s did not answer, its blocks are treated as missing: %r", self._name, error)
            return None
        except BaseException:
            self._close_connections(wires)
            raise
        self._keep_idle(wires)
        return result

    def close(self) -> None:
        """Close idle connections. Those in use are closed when their call is over."""
        self._closed = True
        self._close_connections(self._take_idle())

    def _get_connection(self) -> RespConnection:
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                return self._open_connection()
            if wire.is_quiet():
                return wire
            wire.close()

    def _open_connection(self) -> RespConnection:
        connection: ConnectionInterface = self._make_connection()
        try:
            wire = RespConnection(connection, self._large)
            greeting = self._make_greeting()
            wire.send([*greeting, *(encode_command("SCRIPT", "LOAD", script.text) for script in SCRIPTS)])
            for _ in greeting:
                if (reply := wire.read_reply()) != b"OK":
                    raise (
                        reply
                        if isinstance(reply, ErrorReply)
                        else UnexpectedReply(f"not what is answered: {reply!r}"[:200])
                    )
            for script in SCRIPTS:
                if (reply := wire.read_reply()) != script.sha.encode():
                    raise (
                        reply
                        if isinstance(reply, ErrorReply)
                        else UnexpectedReply(f"a script has another hash: {reply!r}")
                    )
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        return wire

    def _take_idle(self) -> list[RespConnection]:
        with self._lock:
            idle, self._idle = self._idle, []
        return idle

    def _keep_idle(self, wires: list[RespConnection]) -> None:
        with self._lock:
            room = 0 if self._closed else MAX_IDLE_CONNECTIONS - len(self._idle)
            self._idle += wires[:room]
        self._close_connections(wires[room:])

    @staticmethod
    def _close_connections(wires: list[RespConnection]) -> None:
        for wire in wires:
            wire.close()


def _make_greeting(options: Mapping[str, Any]) -> list[bytes]:
    """Return the first commands of a connection. Each is answered OK."""
    username, password, name, database = (options.get(key) for key in ("username", "password", "client_name", "db"))
    if (login := options.get("credential_provider")) is not None:
        username, password = login.get_credentials()
    commands: list[bytes] = []
    if username or password:
        commands.append(encode_command("AUTH", *([username] if username else []), password or ""))
    if name:
        commands.append(encode_command("CLIENT", "SETNAME", name))
    if database:
        commands.append(encode_command("SELECT", database))
    return commands


def _skip_greeting(_: object) -> None:
    """Replace redis-py's greeting, which waits for each reply with the full timeout."""


def _check_host(host: str) -> None:
    """Raise `ValueError` for a host name that cannot be resolved at all."""
    if "\0" in host:
        raise ValueError("a zero byte in the host name")
    host.encode("idna")
