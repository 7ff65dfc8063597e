"""Checks whether a stream server can be used: one that evicts deletes records and logs of accepted requests at its
memory limit, and one in cluster mode refuses changes of several keys.

Measures the share of that limit that is used, too.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import redis

from penstock.config.addresses import Addresses
from penstock.config.settings import EvictionChoice
from penstock.errors import ClusterMode, ServerEvicts
from penstock.redis.client import redis_client
from penstock.redis.urls import server_name, split_urls

log = logging.getLogger(__name__)

CLUSTER_REASON = (
    "is in cluster mode, where one script cannot change keys in several slots, as requests' records need: use servers "
    "with cluster-enabled no; PENSTOCK_STREAM_URL may list several, with commas between"
)
"""Why a server in cluster mode is refused, and what to do."""
LOOK_S = 60.0
"""Seconds between two questions to the servers: their settings may be changed while they run."""


def find_policy(client: "redis.Redis") -> str:
    """Return the policy by which a server evicts, empty if it does not. Raises `redis.RedisError`."""
    memory = client.info("memory")
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    return "" if policy == "noeviction" or not memory.get("maxmemory", 0) else policy


def is_in_cluster_mode(client: "redis.Redis") -> bool:
    """Return whether a server is in cluster mode. Raises `redis.RedisError`."""
    return bool(client.info("cluster").get("cluster_enabled"))


def refuse_cluster_mode(addresses: Addresses) -> None:
    """Raise `ClusterMode` where a stream server is in cluster mode. Servers that are away are left out."""
    for url in split_urls(addresses.stream_url):
        with suppress(redis.RedisError), redis_client(url) as client:
            if is_in_cluster_mode(client):
                raise ClusterMode(f"Redis {server_name(url)} {CLUSTER_REASON}")


def describe_eviction(addresses: Addresses) -> str:
    """Return which stream servers evict and what to do; empty if none does. Servers that are away are left out."""
    found = []
    for url in split_urls(addresses.stream_url):
        with suppress(redis.RedisError), redis_client(url) as client:
            if policy := find_policy(client):
                found.append(f"Redis {server_name(url)} evicts keys at its memory limit ({policy})")
    return f"{', '.join(found)}: token logs must not be evicted: set maxmemory-policy noeviction" if found else ""


def measure_memory(addresses: Addresses) -> float | None:
    """Return the share of its limit of memory that the fullest stream server uses; None where none answers.

    A server without a limit has that of its machine.
    """
    shares = []
    for url in split_urls(addresses.stream_url):
        with suppress(redis.RedisError), redis_client(url) as client:
            shares.append(measure_share(client))
    return max((share for share in shares if share is not None), default=None)


def measure_share(client: "redis.Redis") -> float | None:
    """Return the share of its limit of memory that a server uses; None where it does not tell. Raises
    `redis.RedisError`.
    """
    memory = client.info("memory")
    limit = memory.get("maxmemory") or memory.get("total_system_memory")
    return float(memory.get("used_memory", 0)) / float(limit) if limit else None


@contextmanager
def watch_eviction(addresses: Addresses, choice: EvictionChoice) -> Iterator[None]:
    """Raise `ServerEvicts` where a stream server evicts, or only log it, as the setting says; then ask once a minute.

    The thread that asks is its own: a server that is slow holds up nothing else.
    """
    problem, is_over = describe_eviction(addresses), threading.Event()
    if problem and choice == "refuse":
        raise ServerEvicts(f"{problem}, or accept it with PENSTOCK_RECORD_EVICTION=warn")

    if problem:
        log.warning("%s", problem)

    def look() -> None:
        while not is_over.wait(LOOK_S):
            if found := describe_eviction(addresses):
                log.warning("%s", found)

    thread = threading.Thread(target=look, name="penstock-eviction", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
