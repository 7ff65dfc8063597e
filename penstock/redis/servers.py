"""Several Redis servers for requests, and which of them one request is on.

A request's record, log, live channel and spans are on one server, chosen by its id. All else is on the first server.

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
from penstock.redis.urls import name_of, urls_of

T = TypeVar("T")
S = TypeVar("S")

ALONE = "*"
"""The list of one server, whatever its name."""
REMEMBERED = 65536
"""Choices that a process keeps."""


@lru_cache(maxsize=REMEMBERED)
def place_of(names: tuple[str, ...], request_id: str) -> int:
    """Return which of the servers with these names a request is on."""
    if len(names) == 1:
        return 0
    scores = [hashlib.sha256(f"{name}\n{request_id}".encode()).digest()[:8] for name in names]
    return scores.index(max(scores))


class ByServer(Generic[T]):
    """One thing for each server; indexed by the id of a request, that of the request's server."""

    def __init__(self, names: Sequence[str], parts: Sequence[T]) -> None:
        self.names, self.parts = tuple(names), tuple(parts)

    @classmethod
    def of(cls, text: str, make: Callable[[str], T]) -> "ByServer[T]":
        """Return what `make` returns for each of the addresses in a text."""
        urls = urls_of(text)
        return cls([name_of(url) for url in urls], [make(url) for url in urls])

    def each(self, make: Callable[[T], S]) -> "ByServer[S]":
        """Return what `make` returns for each server's part."""
        return ByServer(self.names, [make(part) for part in self.parts])

    def __getitem__(self, request_id: str) -> T:
        return self.parts[place_of(self.names, request_id)]


# Which servers there are has to be the same for all processes of a pipeline: a request that is claimed on two servers
# may be answered twice. So each server keeps the list that it is part of, and whoever comes with another is refused.
# One server that is alone may be called by any name.


def keep_list(client: "redis.Redis", pipeline: Pipeline, names: Sequence[str]) -> None:
    """Have a server keep the list of all servers. Raises `ServersDiffer` where it keeps another."""
    client.set(pipeline.servers_key, _listed(names), nx=True)
    check_list(client, pipeline, names)


def check_list(client: "redis.Redis", pipeline: Pipeline, names: Sequence[str]) -> None:
    """Raise `ServersDiffer` where a server keeps another list than this one."""
    found: Any = client.get(pipeline.servers_key)
    if found is not None and found.decode() != _listed(names):
        raise ServersDiffer(
            f"the requests of {pipeline.name} are spread over {in_words(found.decode())}, and PENSTOCK_STREAM_URL here "
            f"names {in_words(_listed(names))}: give all workers and gateways the same servers in the same order, with "
            "the same #name where their addresses differ; to change the list let the pipeline run empty, then "
            "`penstock servers change` (docs/operations.md)"
        )


def change_list(client: "redis.Redis", pipeline: Pipeline, names: Sequence[str]) -> None:
    """Have a server keep another list than before. Nothing may be under way, see `penstock servers change`."""
    client.set(pipeline.servers_key, _listed(names))


def keep_lists(text: str, pipeline: Pipeline) -> None:
    """Have each server of an address list keep it; those that are away are passed over. Raises `ServersDiffer`."""
    clients = ByServer.of(text, redis_client)
    for client in clients.parts:
        with client:
            try:
                keep_list(client, pipeline, clients.names)
            except redis.RedisError as error:
                if not is_outage(error):
                    raise


def in_words(listed: str) -> str:
    """A list as a server keeps it, for people."""
    return "one server" if listed == ALONE else ", ".join(listed.splitlines())


def _listed(names: Sequence[str]) -> str:
    return ALONE if len(names) == 1 else "\n".join(names)
