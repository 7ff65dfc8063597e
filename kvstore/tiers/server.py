"""One Redis server of the KV store: connections to it, and the rule that one that fails is left alone for a while."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import redis

from kvstore.tiers.contract import Counters
from kvstore.tiers.scripts import ALL
from kvstore.tiers.wire import NotRedis, Refused, Wire, command
from penstock.errors import KVStoreError
from penstock.settings import shown

T = TypeVar("T")
log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
LEFT_ALONE_S = 1.0
"""How long a server that did not answer is not asked again: one that hangs must not hold up every request."""
IDLE = 4
"""Connections that are kept for the next call."""


class Server:
    """Connections are used by one call at a time, and dropped after any doubt."""

    def __init__(self, url: str, large: bool) -> None:
        """`large`: whether most values will be. Raises `KVStoreError` for what is no url; connects later."""
        self._name = shown(url)
        self._large = large
        try:
            self._maker = redis.ConnectionPool.from_url(
                url, protocol=2, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
            )
        except (ValueError, redis.RedisError) as error:
            raise KVStoreError(f"{self._name} is no address of a KV Redis: {error}") from None
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._closed = False
        self._ask_again_at = 0.0

    def ask(self, call: Callable[[Wire], T], counters: Counters) -> T | None:
        """What `call` returns, or None, counted and logged, when the server did not do it."""
        if time.monotonic() < self._ask_again_at:
            counters.errors += 1
            return None
        wire = None
        try:
            wire = self._connection()
            result = call(wire)
        except (OSError, redis.RedisError, NotRedis, Refused) as error:
            self._drop(wire)
            counters.errors += 1
            self._ask_again_at = time.monotonic() + LEFT_ALONE_S
            log.warning("the KV server %s did not answer, going on without it: %r", self._name, error)
            return None
        except BaseException:
            self._drop(wire)
            raise
        self._keep(wire)
        return result

    def close(self) -> None:
        """Close what waits; what is in use is closed when its call is over."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for wire in idle:
            wire.close()

    def _connection(self) -> Wire:
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                return self._connect()
            if wire.is_quiet():
                return wire
            wire.close()

    def _connect(self) -> Wire:
        connection = self._maker.make_connection()
        try:
            wire = Wire(connection, self._large)
            wire.send([command("SCRIPT", "LOAD", script.text) for script in ALL])
            for script in ALL:
                if (reply := wire.reply()) != script.sha.encode():
                    raise reply if isinstance(reply, Refused) else NotRedis(f"a script has another hash: {reply!r}")
        except BaseException:
            connection.disconnect()
            raise
        return wire

    def _keep(self, wire: Wire) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < IDLE:
                self._idle.append(wire)
                return
        wire.close()

    @staticmethod
    def _drop(wire: Wire | None) -> None:
        if wire is not None:
            wire.close()
