"""One Redis server of the KV store: connections to it, and the rule that one that fails is left alone for a while."""

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
from penstock.kvstore.tiers.wire import NotRedis, Refused, Wire, command
from penstock.redis.client import connection_pool
from penstock.redis.urls import hide_password

T = TypeVar("T")
log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
LEFT_ALONE_S = 1.0
"""How long a server that did not answer is not asked again: one that hangs must not hold up every request."""
LANES = 4
"""Large values come over so many connections at once from a unix socket. It holds no more than 200 KB, and the
server sleeps until most of it was read: over one alone, server and reader work in turns. TCP holds megabytes."""
IDLE = 8
"""Connections that are kept for the next call."""


class Server:
    """Connections are used by one call at a time, and dropped after any doubt."""

    def __init__(self, url: str, large: bool) -> None:
        """`large`: whether most values will be. Raises `KVStoreError` for what is no url; connects later."""
        self._name = hide_password(url)
        self._large = large
        self.lanes = LANES if large and url.startswith("unix:") else 1
        try:
            pool = connection_pool(url, protocol=2, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
            options = {**pool.connection_kwargs, "redis_connect_func": _say_nothing}
            self._greeting = _greeting(options)
            self._make = partial(pool.connection_class, **options)  # the pool itself makes no more than 100, ever
            self._make()
            _check_host(options.get("host", ""))
        except (ValueError, TypeError, redis.RedisError) as error:
            raise KVStoreError(f"{self._name} is no address of a KV Redis: {error}") from None
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._closed = False
        self._ask_again_at = 0.0

    def ask(self, call: Callable[[Wire], T], counters: TierCounters) -> T | None:
        """What `call` returns, or None, counted and logged, when the server did not do it."""
        return self.ask_on(1, lambda wires: call(wires[0]), counters)

    def ask_on(self, count: int, call: Callable[[list[Wire]], T], counters: TierCounters) -> T | None:
        """The same on several connections at once."""
        if self._closed or time.monotonic() < self._ask_again_at:
            counters.errors += 1
            return None
        wires: list[Wire] = []
        try:
            while len(wires) < count:
                wires.append(self._connection())
            result = call(wires)
        except (OSError, redis.RedisError, NotRedis, Refused) as error:
            self._drop(wires + self._take_idle())  # they are in doubt, too: what ended one may have ended all
            counters.errors += 1
            self._ask_again_at = time.monotonic() + LEFT_ALONE_S
            log.warning("the KV server %s did not answer, going on without it: %r", self._name, error)
            return None
        except BaseException:
            self._drop(wires)
            raise
        self._keep(wires)
        return result

    def close(self) -> None:
        """Close what waits; what is in use is closed when its call is over."""
        self._closed = True
        self._drop(self._take_idle())

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
        connection: ConnectionInterface = self._make()
        try:
            wire = Wire(connection, self._large)
            wire.send([*self._greeting, *(command("SCRIPT", "LOAD", script.text) for script in SCRIPTS)])
            for _ in self._greeting:
                if (reply := wire.reply()) != b"OK":
                    raise reply if isinstance(reply, Refused) else NotRedis(f"not what is answered: {reply!r}"[:200])
            for script in SCRIPTS:
                if (reply := wire.reply()) != script.sha.encode():
                    raise reply if isinstance(reply, Refused) else NotRedis(f"a script has another hash: {reply!r}")
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        return wire

    def _take_idle(self) -> list[Wire]:
        with self._lock:
            idle, self._idle = self._idle, []
        return idle

    def _keep(self, wires: list[Wire]) -> None:
        with self._lock:
            room = 0 if self._closed else IDLE - len(self._idle)
            self._idle += wires[:room]
        self._drop(wires[room:])

    @staticmethod
    def _drop(wires: list[Wire]) -> None:
        for wire in wires:
            wire.close()


def _greeting(options: Mapping[str, Any]) -> list[bytes]:
    """What is said first on a connection; each is answered OK."""
    username, password, name, database = (options.get(key) for key in ("username", "password", "client_name", "db"))
    commands: list[bytes] = []
    if username or password:
        commands.append(command("AUTH", *([username] if username else []), password or ""))
    if name:
        commands.append(command("CLIENT", "SETNAME", name))
    if database:
        commands.append(command("SELECT", database))
    return commands


def _say_nothing(_: object) -> None:
    """Instead of redis-py's greeting, which waits for each byte as long as for all."""


def _check_host(host: str) -> None:
    """Raises `ValueError` for a name that the resolver would not even be asked for."""
    if "\0" in host:
        raise ValueError("a zero byte in the host name")
    host.encode("idna")
