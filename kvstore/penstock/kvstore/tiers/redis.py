"""The Redis tier: blocks that workers on different machines share.

The blocks are on one server, or spread over several. The servers are caches: they may evict, restart empty or be down.
Every failure is counted and is a miss, nothing more.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import urlunsplit

import xxhash

from penstock.errors import KVStoreError
from penstock.kvstore.block import Block, BlockFormat, ReadRequest
from penstock.kvstore.tiers.address import RedisNode
from penstock.kvstore.tiers.contract import TierCounters, TierEntry, TierUsage
from penstock.kvstore.tiers.entries import list_node_entries
from penstock.kvstore.tiers.index import RedisIndex
from penstock.kvstore.tiers.server import KVServer
from penstock.kvstore.tiers.wire import LARGE_VALUE_BYTES
from penstock.redis.sentinel import split_address

if TYPE_CHECKING:
    from penstock.kvstore.codec import TierCodecs

Item = TypeVar("Item")
T = TypeVar("T")

UNKNOWN_FORMAT = BlockFormat(bytes(32), bytes(16), 0)
"""A format that no block has."""


def url_identity(url: str) -> str:
    """Return the part of a url that stays when its password changes: kind, host and port or path, database."""
    parts = split_address(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


class RendezvousHash:
    """Assigns keys to servers by rendezvous hashing: a key belongs to the server whose url hashes highest with it.

    Every process that is given the same urls, in any order, finds the same server. A server that is added takes its
    share from all others and moves nothing else; one that is removed leaves its share to all others.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._seeds = [xxhash.xxh3_64_intdigest(url_identity(url).encode()) for url in urls]

    def find_server(self, key: bytes) -> int:
        """Return the index of the server that holds `key`."""
        if len(self._seeds) == 1:
            return 0
        weights = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return weights.index(max(weights))

    def group_by_server(self, keys: Sequence[bytes]) -> dict[int, list[int]]:
        """Return the indices of `keys` by the server that holds them."""
        groups: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            groups.setdefault(self.find_server(key), []).append(index)
        return groups


class ParallelCalls:
    """Runs calls in threads of its own. All threads start with it, as later the system may refuse to start more."""

    def __init__(self, num_threads: int) -> None:
        """With 0 threads, calls run one after the other. Raise `KVStoreError` if the threads cannot be started."""
        self._pool = ThreadPoolExecutor(num_threads, "kv-redis") if num_threads else None
        if self._pool is None:
            return
        started = threading.Barrier(num_threads + 1)
        try:
            for _ in range(num_threads):
                self._pool.submit(started.wait)
            started.wait()
        except RuntimeError as error:
            started.abort()
            self._pool.shutdown()
            raise KVStoreError(f"{num_threads} threads for the KV Redis cannot be started: {error}") from None

    def run_all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return what each call returns. Raise what one raised, but only after all have ended.

        The calls use memory of the caller, which must not be freed before.
        """
        futures: list[Future[T]] = []
        if self._pool is not None and len(calls) > 1:
            try:
                for call in calls:
                    futures.append(self._pool.submit(call))  # noqa: PERF401 (those before one that fails are needed)
            except RuntimeError:
                pass  # the pool is closed: the other calls run here
            finally:
                wait(futures)
        return [future.result() for future in futures] + [call() for call in calls[len(futures) :]]

    def close(self) -> None:
        """End the threads once their calls have ended. Later calls run one after the other."""
        if self._pool is not None:
            self._pool.shutdown()


class RedisTier:
    """A tier whose blocks are in Redis servers, each for a set time after its last use."""

    name, clock = "redis", staticmethod(time.perf_counter)

    def __init__(self, nodes: Sequence[RedisNode], rendezvous: RendezvousHash) -> None:
        self.counters = TierCounters()
        self._nodes = list(nodes)
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._parallel_calls = ParallelCalls(4 * len(nodes) if len(nodes) > 1 else 0)

    @classmethod
    def open(
        cls, form: BlockFormat, urls: Sequence[str], budget_bytes: int, keep_s: float, codec: "TierCodecs | None" = None
    ) -> Self:
        """Open the blocks of a model at these urls (in any order), with `budget_bytes` at each of them.

        Connections are opened later. Raise `KVStoreError` for a bad url.
        """
        return cls._connect_to(form, urls, RedisIndex(budget_bytes, max(1, int(keep_s * 1000))), codec)

    @classmethod
    def attach(cls, urls: Sequence[str]) -> Self:
        """Open the blocks of all models, for tools: the budget and the order of use are left unchanged."""
        return cls._connect_to(UNKNOWN_FORMAT, urls, RedisIndex(0, 0), None)

    @classmethod
    def _connect_to(cls, form: BlockFormat, urls: Sequence[str], index: RedisIndex, codec: "TierCodecs | None") -> Self:
        distinct = list(dict.fromkeys(urls))
        if not distinct:
            raise KVStoreError("a Redis tier needs an address")
        large = form.payload_bytes >= LARGE_VALUE_BYTES
        return cls([RedisNode(KVServer(url, large), form, index, codec) for url in distinct], RendezvousHash(distinct))

    def get(self, requests: Sequence[ReadRequest]) -> list[bool]:
        """Implement `Tier.get`."""
        return self._call_for_each_item([request.key.hash for request in requests], requests, RedisNode.get)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Implement `Tier.put`."""
        return self._call_for_each_item([block.key.hash for block in blocks], blocks, RedisNode.put)

    def lacks_block(self, key: bytes) -> bool:
        """Return False: the servers would have to be asked."""
        return False

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """Implement `Tier.has_blocks`."""
        return self._call_for_each_item(keys, keys, RedisNode.has_blocks)

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Implement `Tier.lease_blocks`. Leases end by the server's clock; `address.py` says when one is lost."""
        ms = max(1, int(seconds * 1000))
        self._call_for_keys(
            keys,
            lambda node, part, count: node.call_index(
                lambda wire, index: index.lease_blocks(wire, owner, part, ms), count
            ),
        )

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """Implement `Tier.release_leases`."""
        self._call_for_keys(
            keys,
            lambda node, part, count: node.call_index(
                lambda wire, index: index.release_leases(wire, owner, part), count
            ),
        )

    def retain_blocks(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Implement `Tier.retain_blocks`. Retentions end by the server's clock."""
        ms = max(1, int(seconds * 1000)) if seconds else 0

        def retain(node: RedisNode, part: list[bytes], count: TierCounters) -> list[bool]:
            here = node.call_index(lambda wire, index: index.retain_blocks(wire, part, ms), count)
            return here or [False] * len(part)

        return self._call_for_each_item(keys, keys, retain)

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Implement `Tier.remove_blocks`."""

        def remove(node: RedisNode, part: list[bytes], count: TierCounters) -> int:
            return node.call_index(lambda wire, index: index.delete_blocks(wire, part), count) or 0

        return sum(self._call_for_keys(list(dict.fromkeys(keys)), remove))

    def read_usage(self) -> TierUsage:
        """Implement `Tier.read_usage`. Return the sum over the servers that answer."""
        found = self._call_all_nodes(
            lambda node, count: node.call_index(lambda wire, index: index.read_usage(wire), count)
        )
        parts = [usage for usage in found if usage is not None]
        return TierUsage(
            sum(part.blocks for part in parts),
            sum(part.bytes for part in parts),
            sum(part.budget for part in parts),
            sum(part.leased for part in parts),
            sum(part.retained for part in parts),
        )

    def list_entries(self) -> Iterator[TierEntry]:
        """Implement `Tier.list_entries`."""
        for node in self._nodes:
            counters = TierCounters()
            yield from list_node_entries(node, counters)
            self._add_counters(counters)

    def check_integrity(self) -> list[str]:
        """Return problems of the indices, and blocks that would never expire. Reads everything."""
        found = self._call_all_nodes(
            lambda node, count: node.call_index(lambda wire, index: index.check_integrity(wire), count)
        )
        return [line for lines in found for line in (lines if lines is not None else ["a server does not answer"])]

    def close(self) -> None:
        """Implement `Tier.close`."""
        for node in self._nodes:
            node.close()
        self._parallel_calls.close()

    def _call_for_each_item(
        self,
        keys: Sequence[bytes],
        items: Sequence[Item],
        call: Callable[[RedisNode, list[Item], TierCounters], list[bool]],
    ) -> list[bool]:
        """Return what `call` returns for each item, called once for each server with the items of its keys."""
        groups = self._rendezvous.group_by_server(keys)
        calls = [partial(call, self._nodes[server], [items[i] for i in indices]) for server, indices in groups.items()]
        result = [False] * len(keys)
        for indices, part in zip(groups.values(), self._run_calls(calls), strict=True):
            for index, ok in zip(indices, part, strict=True):
                result[index] = ok
        return result

    def _call_for_keys(
        self, keys: Sequence[bytes], call: Callable[[RedisNode, list[bytes], TierCounters], T]
    ) -> list[T]:
        """Return what `call` returns for each server that holds some of the keys."""
        groups = self._rendezvous.group_by_server(keys)
        return self._run_calls(
            [partial(call, self._nodes[server], [keys[i] for i in indices]) for server, indices in groups.items()]
        )

    def _call_all_nodes(self, call: Callable[[RedisNode, TierCounters], T]) -> list[T]:
        """Return what `call` returns for each server."""
        return self._run_calls([partial(call, node) for node in self._nodes])

    def _run_calls(self, calls: Sequence[Callable[[TierCounters], T]]) -> list[T]:
        """Run the calls in parallel, and add their counts to the tier's counters."""
        counted = [TierCounters() for _ in calls]
        try:
            return self._parallel_calls.run_all(
                [partial(call, part) for call, part in zip(calls, counted, strict=True)]
            )
        finally:
            for counters in counted:
                self._add_counters(counters)

    def _add_counters(self, counters: TierCounters) -> None:
        with self._lock:
            for field in fields(TierCounters):
                setattr(self.counters, field.name, getattr(self.counters, field.name) + getattr(counters, field.name))
