"""Redis behind Sentinels: each new connection asks them which server is the master now.

    redis+sentinel://user:password@host1:26379,host2:26379/service/0

User and password are those of the Redis servers; those of the Sentinels, where they ask for any, are
`?sentinel_username=…&sentinel_password=…`. With `rediss+sentinel://` both are reached with TLS.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.sentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from penstock.own_servers import format_place

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""The scheme of the servers for each scheme of a Sentinel address."""
SENTINEL_PORT = 26379
SENTINEL_TIMEOUT_S = 0.5
"""Seconds that one Sentinel may take to answer: the next one must be asked within the caller's own time limit."""
SENTINEL_URL_FORM = "redis+sentinel://user:password@host1:26379,host2:26379/service/0"

HostPort = tuple[str, int]


@dataclass(frozen=True, repr=False)
class SentinelAddress:
    """The parts of an address of Sentinels."""

    scheme: str
    """The scheme of the servers' own addresses."""
    login: str
    """User and password of the servers as they stand in a url, with the `@`, or an empty string."""
    hosts: tuple[HostPort, ...]
    service: str
    db: int
    query: Mapping[str, str]
    """Options for connections to the servers. Those about TLS also hold for the Sentinels."""
    username: str | None
    """The user of the Sentinels themselves."""
    password: str | None
    """The password of the Sentinels themselves."""

    def server_url(self, address: HostPort) -> str:
        """Return the url of one of the servers."""
        host, port = address
        query = urlencode(self.query, quote_via=quote, safe="/")
        return f"{self.scheme}://{self.login}{format_place(host, port)}/{self.db}{'?' if query else ''}{query}"

    def sentinel_url(self, address: HostPort) -> str:
        """Return the url of one of the Sentinels, without a password."""
        return f"{self.scheme}://{format_place(*address)}"

    def server_options(self) -> dict[str, Any]:
        """Return the options of connections to the servers."""
        options: dict[str, Any] = parse_url(self.server_url(self.hosts[0]))  # type: ignore[no-untyped-call]
        for name in ("host", "port", "connection_class"):
            options.pop(name, None)
        return {**options, "ssl": self.scheme == "rediss"}

    def sentinel_options(self) -> dict[str, Any]:
        """Return the options of connections to the Sentinels."""
        found = {name: value for name, value in self.server_options().items() if name.startswith("ssl")}
        login = {"username": self.username, "password": self.password}
        return {
            **found,
            **login,
            "protocol": 2,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        }

    def __str__(self) -> str:
        return ", ".join(format_place(host, port) for host, port in self.hosts)


def is_sentinel(url: str) -> bool:
    """Return whether a url is an address of Sentinels."""
    return url.partition("://")[0] in SCHEMES


def split_address(url: str) -> SplitResult:
    """Return the parts of the address of a server or of several, as `urlsplit` does, which refuses several hosts if one
    of them is in brackets. Raise `ValueError` where it is none.
    """
    if not is_sentinel(url):
        return urlsplit(url)
    scheme, _, rest = url.partition("://")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}://hosts{rest.removeprefix(hosts)}")._replace(netloc=hosts)


def parse_sentinels(url: str) -> SentinelAddress:
    """Return the parts of an address of Sentinels. Raise `ValueError` where it is none."""
    parts = split_address(url)
    login, at, hosts = parts.netloc.rpartition("@")
    service, _, db = unquote(parts.path.removeprefix("/")).partition("/")
    query = dict(parse_qsl(parts.query))
    if not service or "/" in service + db or not (db or "0").isdecimal():
        raise ValueError("the path must be the service's name and the database number, as in /SERVICE/0")
    username, password = query.pop("sentinel_username", None), query.pop("sentinel_password", None)
    addresses = tuple(_parse_host(host) for host in hosts.split(","))
    found = SentinelAddress(
        SCHEMES[parts.scheme], login + at, addresses, service, int(db or 0), query, username, password
    )
    found.server_options()
    return found


def _parse_host(host: str) -> HostPort:
    parts = urlsplit(f"//{host}")
    if not parts.hostname or parts.username is not None:
        raise ValueError("the address has an empty host")
    return parts.hostname, parts.port or SENTINEL_PORT


def find_masters(url: str) -> dict[HostPort, HostPort | redis.RedisError | None]:
    """Return each Sentinel's answer about the master.

    An answer is the master's host and port, None if the Sentinel does not know the service, or the error.
    """
    found: dict[HostPort, HostPort | redis.RedisError | None] = {}
    address = parse_sentinels(url)
    for host in address.hosts:
        options = address.sentinel_options()
        try:
            with redis.Redis(*host, retry=Retry(NoBackoff(), 0), **options) as client:
                reply: Any = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service)
            found[host] = (reply[0].decode(), int(reply[1])) if reply else None
        except redis.RedisError as error:
            found[host] = error
    return found


class MasterPool(redis.sentinel.SentinelConnectionPool):
    """Connections to the master. One that fails, as its server is the master no longer, is opened to the new master."""

    def __init__(self, url: str, **options: Any) -> None:
        address = parse_sentinels(url)
        manager = _Sentinels(address, sentinel_kwargs={**address.sentinel_options(), "retry": Retry(NoBackoff(), 0)})
        given = options | address.server_options()
        given["connection_class"] = _TLSConnection if given.pop("ssl") else _Connection
        super().__init__(address.service, manager, **given)  # type: ignore[no-untyped-call]

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections. With `inuse_connections` close those to the Sentinels too."""
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
    def __init__(self, address: SentinelAddress, **options: Any) -> None:
        super().__init__(address.hosts, **options)  # type: ignore[no-untyped-call]
        self._address = address

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError:
            raise _no_master(self._address) from None


class AsyncMasterPool(redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """`MasterPool` for asyncio. A caller that finds all connections in use waits for one."""

    def __init__(self, url: str, **options: Any) -> None:
        address = parse_sentinels(url)
        retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
        manager = _AsyncSentinels(address, sentinel_kwargs={**address.sentinel_options(), "retry": retry})
        super().__init__(address.service, manager, **(options | address.server_options()))  # type: ignore[no-untyped-call]

    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close the connections. With `inuse_connections` close those to the Sentinels too."""
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


class _AsyncSentinels(redis.asyncio.sentinel.Sentinel):
    def __init__(self, address: SentinelAddress, **options: Any) -> None:
        super().__init__(address.hosts, **options)  # type: ignore[no-untyped-call]
        self._address = address

    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except redis.asyncio.sentinel.MasterNotFoundError:
            raise _no_master(self._address) from None


def _no_master(address: SentinelAddress) -> redis.ConnectionError:
    # redis-py's own message would list its objects, with the passwords in them.
    return redis.ConnectionError(f"none of the Sentinels at {address} names a master of {address.service!r} that lives")
