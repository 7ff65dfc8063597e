"""Several Redis servers for requests, and the rule that chooses the server of a request.

The record, log, live channel and spans of a request are on one server, chosen by its id. All else is on the first
server.

The choice is rendezvous hashing: each server's score for a request is the first 8 bytes, big endian, of the SHA-256 of
`<server's name>`, a line break and `<id>`; the highest score wins. So a server that is added takes its part of the
requests, and all others stay where they are. docs/protocol.md has this for other languages, with examples.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import redis

from penstock.errors import ServersDiffer
from penstock.names import Pipeline
from penstock.redis.client import is_outage, redis_client
from penstock.redis.urls import server_name, split_urls

T = TypeVar("T")
S = TypeVar("S")

SINGLE_SERVER = "*"
"""The stored list where there is one server, whatever its name."""
MAX_CACHED_CHOICES = 65536
"""The most choices of a server that a process keeps."""


@lru_cache(maxsize=MAX_CACHED_CHOICES)
def choose_server(names: tuple[str, ...], request_id: str) -> int:
    """Return the index of the server that a request is on, among the servers with these names."""
    if len(names) == 1:
        return 0
    scores = [hashlib.sha256(f"{name}\n{request_id}".encode()).digest()[:8] for name in names]
    return scores.index(max(scores))


class Sharded(Generic[T]):
    """One object for each server. Indexing it with a request's id returns the object of the request's server."""

    def __init__(self, names: Sequence[str], parts: Sequence[T]) -> None:
        self.names, self.parts = tuple(names), tuple(parts)

    @classmethod
    def from_urls(cls, text: str, make: Callable[[str], T]) -> "Sharded[T]":
        """Return what `make` returns for each of the addresses in a setting."""
        urls = split_urls(text)
        return cls([server_name(url) for url in urls], [make(url) for url in urls])

    def map_parts(self, make: Callable[[T], S]) -> "Sharded[S]":
        """Return what `make` returns for each server's object."""
        return Sharded(self.names, [make(part) for part in self.parts])

    def __getitem__(self, request_id: str) -> T:
        return self.parts[choose_server(self.names, request_id)]


# All processes of a pipeline must use the same list of servers: a request that is claimed on two servers may be
# answered twice. So each server stores the list that it is part of, and a process with another list is refused. A
# single server may be called by any name.


def store_server_list(client: "redis.Redis", pipeline: Pipeline, names: Sequence[str]) -> None:
    """Store the list of all servers on one of them, if it has none. Raise `ServersDiffer` where it has another list."""
    client.set(pipeline.servers_key, _format_server_list(names), nx=True)
    check_server_list(client, pipeline, names)


def check_server_list(client: "redis.Redis", pipeline: Pipeline, names: Sequence[str]) -> None:
    """Raise `ServersDiffer` where a server stores another list than this one."""
    found: Any = client.get(pipeline.servers_key)
    if found is not None and found.decode() != _format_server_list(names):
        raise ServersDiffer(
            f"the requests of {pipeline.name} are spread over {describe_server_list(found.decode())}, and "
            f"PENSTOCK_STREAM_URL here names {describe_server_list(_format_server_list(names))}: give all workers and "
            "gateways the same servers in the same order, with the same #name where their addresses differ; to change "
            "the list let the pipeline run empty, then `penstock servers change` (docs/operations.md)"
        )


def replace_server_list(client: "redis.Redis", pipeline: Pipeline, names: Sequence[str]) -> None:
    """Replace the list that a server stores. No request may be under way, see `penstock servers change`."""
    client.set(pipeline.servers_key, _format_server_list(names))


def store_server_lists(text: str, pipeline: Pipeline) -> None:
    """Store the list on each server of a setting, except those that are away. Raise `ServersDiffer`."""
    clients = Sharded.from_urls(text, redis_client)
    for client in clients.parts:
        with client:
            try:
                store_server_list(client, pipeline, clients.names)
            except redis.RedisError as error:
                if not is_outage(error):
                    raise


def describe_server_list(listed: str) -> str:
    """Return a stored list as text for people."""
    return "one server" if listed == SINGLE_SERVER else ", ".join(listed.splitlines())


def _format_server_list(names: Sequence[str]) -> str:
    return SINGLE_SERVER if len(names) == 1 else "\n".join(names)
