"""Redis behind Sentinels: they are asked at each new connection which server is the master now.

    redis+sentinel://user:password@host1:26379,host2:26379/service/0

User and password are those of the Redis servers; those of the Sentinels, where they ask for any, are
`?sentinel_username=…&sentinel_password=…`. With `rediss+sentinel://` both are spoken to with TLS.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""Schemes of Sentinels' addresses, and those of the servers behind them."""
PORT = 26379
ANSWER_S = 0.5
"""How long one Sentinel may take: the next one is asked while whoever wants a connection still waits for it."""
FORM = "redis+sentinel://user:password@host1:26379,host2:26379/service/0"

Place = tuple[str, int]


@dataclass(frozen=True, repr=False)
class Sentinels:
    """What an address says."""

    scheme: str
    """Of the servers' addresses."""
    login: str
    """User and password of the servers as they stand in a url, with the `@`; or nothing."""
    places: tuple[Place, ...]
    service: str
    db: int
    query: Mapping[str, str]
    """Options for connections to the servers and, where they are about TLS, to the Sentinels."""
    username: str | None
    password: str | None
    """Those of the Sentinels."""

    def url_of(self, place: Place) -> str:
        """The address of one of the servers."""
        host, port = place
        query = urlencode(self.query, quote_via=quote, safe="/")
        return f"{self.scheme}://{self.login}{_host(host)}:{port}/{self.db}{'?' if query else ''}{query}"

    def sentinel_url(self, place: Place) -> str:
        """The address of one of the Sentinels, without a password."""
        return f"{self.scheme}://{_host(place[0])}:{place[1]}"

    def server_options(self) -> dict[str, Any]:
        """Options of connections to the servers."""
        options: dict[str, Any] = parse_url(self.url_of(self.places[0]))  # type: ignore[no-untyped-call]
        for name in ("host", "port", "connection_class"):
            options.pop(name, None)
        return {**options, "ssl": self.scheme == "rediss"}

    def sentinel_options(self) -> dict[str, Any]:
        """Options of connections to the Sentinels."""
        found = {name: value for name, value in self.server_options().items() if name.startswith("ssl")}
        login = {"username": self.username, "password": self.password}
        return {**found, **login, "protocol": 2, "socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S}

    def __str__(self) -> str:
        return ", ".join(f"{_host(host)}:{port}" for host, port in self.places)


def is_sentinel(url: str) -> bool:
    """Whether a url is an address of Sentinels."""
    return url.partition("://")[0] in SCHEMES


def parse_sentinels(url: str) -> Sentinels:
    """What an address says. Raises `ValueError`."""
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    service, _, db = unquote(parts.path.removeprefix("/")).partition("/")
    query = dict(parse_qsl(parts.query))
    if not service or "/" in service + db or not (db or "0").isdecimal():
        raise ValueError("after the hosts come the service's name and the number of the database")
    username, password = query.pop("sentinel_username", None), query.pop("sentinel_password", None)
    places = tuple(_place(host) for host in hosts.split(","))
    found = Sentinels(SCHEMES[parts.scheme], login + at, places, service, int(db or 0), query, username, password)
    found.server_options()
    return found


def _place(host: str) -> Place:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or parts.username is not None:
        raise ValueError("a host is missing")
    return parts.hostname, parts.port or PORT


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def find_masters(url: str) -> dict[Place, Place | redis.RedisError | None]:
    """What each Sentinel says: the master's place, None where it does not know the service, or the error."""
    found: dict[Place, Place | redis.RedisError | None] = {}
    address = parse_sentinels(url)
    for place in address.places:
        options = address.sentinel_options()
        try:
            with redis.Redis(*place, retry=Retry(NoBackoff(), 0), **options) as client:
                said: Any = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service)
            found[place] = (said[0].decode(), int(said[1])) if said else None
        except redis.RedisError as error:
            found[place] = error
    return found


class MasterPool(redis.sentinel.SentinelConnectionPool):
    """Connections to the master. Those to a server that is the master no longer are opened anew when they fail."""

    def __init__(self, url: str, **options: Any) -> None:
        address = parse_sentinels(url)
        manager = _Sentinels(address, sentinel_kwargs={**address.sentinel_options(), "retry": Retry(NoBackoff(), 0)})
        given = options | address.server_options()
        given["connection_class"] = _TLSConnection if given.pop("ssl") else _Connection
        super().__init__(address.service, manager, **given)  # type: ignore[no-untyped-call]

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections; with those in use, those to the Sentinels too."""
        super().disconnect(inuse_connections)
        if inuse_connections:
            self.sentinel_manager.close()


class _Connection(redis.sentinel.SentinelManagedConnection):
    """A connection that is closed when a reply cannot be read.

    redis-py would keep this kind, and only this one (https://github.com/redis/redis-py/pull/4292): after a time limit
    the late reply would be taken for that to the next command.
    """

    def read_response(self, *given: Any, disconnect_on_error: bool | None = True, **options: Any) -> Any:
        return super().read_response(*given, disconnect_on_error=disconnect_on_error, **options)


class _TLSConnection(_Connection, redis.sentinel.SentinelManagedSSLConnection):
    pass


class _Sentinels(redis.sentinel.Sentinel):
    def __init__(self, address: Sentinels, **options: Any) -> None:
        super().__init__(address.places, **options)  # type: ignore[no-untyped-call]
        self._address = address

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError:
            raise _no_master(self._address) from None


class AsyncMasterPool(redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """The same for asyncio; who finds all its connections in use waits for one."""

    def __init__(self, url: str, **options: Any) -> None:
        address = parse_sentinels(url)
        retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
        manager = _AsyncSentinels(address, sentinel_kwargs={**address.sentinel_options(), "retry": retry})
        super().__init__(address.service, manager, **(options | address.server_options()))  # type: ignore[no-untyped-call]

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections; with those in use, those to the Sentinels too."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


class _AsyncSentinels(redis.asyncio.sentinel.Sentinel):
    def __init__(self, address: Sentinels, **options: Any) -> None:
        super().__init__(address.places, **options)  # type: ignore[no-untyped-call]
        self._address = address

    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except redis.asyncio.sentinel.MasterNotFoundError:
            raise _no_master(self._address) from None


def _no_master(address: Sentinels) -> redis.ConnectionError:
    """redis-py would list its own objects, with all that is in them."""
    return redis.ConnectionError(f"none of the Sentinels at {address} names a master of {address.service!r} that lives")
