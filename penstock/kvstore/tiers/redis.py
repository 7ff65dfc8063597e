"""The Redis tier: what workers on different machines share.

One server, or several that the keys are spread over. A cache role: a server may evict, restart empty or be away. Every
failure is counted and is a miss, nothing more.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.errors import KVStoreError
from penstock.kvstore.block import Block, BlockFormat, ReadRequest
from penstock.kvstore.tiers.address import RedisNode
from penstock.kvstore.tiers.contract import TierCounters, TierEntry, TierUsage
from penstock.kvstore.tiers.entries import list_node_entries
from penstock.kvstore.tiers.index import RedisIndex
from penstock.kvstore.tiers.server import KVServer
from penstock.kvstore.tiers.side_by_side import ParallelCalls
from penstock.kvstore.tiers.spread import KeySpread
from penstock.kvstore.tiers.wire import LARGE_VALUE_BYTES, RespConnection, encode_command
from penstock.names import kv_key

if TYPE_CHECKING:
    from penstock.kvstore.codec import TierCodecs

Item = TypeVar("Item")
T = TypeVar("T")

UNKNOWN_FORMAT = BlockFormat(bytes(32), bytes(16), 0)
"""The form that no block has."""


class RedisTier:
    """Blocks in Redis servers, each for a set time after it was last used."""

    name, clock = "redis", staticmethod(time.perf_counter)

    def __init__(self, addresses: Sequence[RedisNode], spread: KeySpread) -> None:
        self.counters = TierCounters()
        self._nodes = list(addresses)
        self._spread = spread
        self._lock = threading.Lock()
        self._parallel_calls = ParallelCalls(4 * len(addresses) if len(addresses) > 1 else 0)

    @classmethod
    def open(
        cls, form: BlockFormat, urls: Sequence[str], budget_bytes: int, keep_s: float, codec: "TierCodecs | None" = None
    ) -> Self:
        """The blocks of a model at these addresses (in any order), `budget_bytes` at each of them.

        Nothing is connected yet. Raises `KVStoreError` for an address that cannot be one.
        """
        return cls._connect_to(form, urls, RedisIndex(budget_bytes, max(1, int(keep_s * 1000))), codec)

    @classmethod
    def attach(cls, urls: Sequence[str]) -> Self:
        """What is there, of any model, for tools: looking changes neither budget nor order of use."""
        return cls._connect_to(UNKNOWN_FORMAT, urls, RedisIndex(0, 0), None)

    @classmethod
    def _connect_to(cls, form: BlockFormat, urls: Sequence[str], index: RedisIndex, codec: "TierCodecs | None") -> Self:
        distinct = list(dict.fromkeys(urls))
        if not distinct:
            raise KVStoreError("a Redis tier needs an address")
        large = form.payload_bytes >= LARGE_VALUE_BYTES
        return cls([RedisNode(KVServer(url, large), form, index, codec) for url in distinct], KeySpread(distinct))

    def get(self, wanted: Sequence[ReadRequest]) -> list[bool]:
        """See `Tier.get`."""
        return self._call_for_each_item([want.key.hash for want in wanted], wanted, RedisNode.get)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """See `Tier.put`."""
        return self._call_for_each_item([block.key.hash for block in blocks], blocks, RedisNode.put)

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.has`."""
        return self._call_for_each_item(keys, keys, RedisNode.has_blocks)

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """See `Tier.lease`. Ends are times of the server's clock. See `address` for when a leased block is lost."""
        ms = max(1, int(seconds * 1000))
        self._call_for_keys(
            keys,
            lambda at, part, count: at.call_index(lambda wire, index: index.lease_blocks(wire, owner, part, ms), count),
        )

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """See `Tier.release`."""
        self._call_for_keys(
            keys,
            lambda at, part, count: at.call_index(lambda wire, index: index.release_leases(wire, owner, part), count),
        )

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """See `Tier.remove`."""

        def remove(at: RedisNode, part: list[bytes], count: TierCounters) -> int:
            return at.call_index(lambda wire, index: index.delete_blocks(wire, part), count) or 0

        return sum(self._call_for_keys(list(dict.fromkeys(keys)), remove))

    def read_usage(self) -> TierUsage:
        """See `Tier.usage`. Of the servers that answer, added up."""
        found = self._call_all_nodes(lambda at, count: at.call_index(lambda wire, index: index.read_usage(wire), count))
        parts = [usage for usage in found if usage is not None]
        return TierUsage(
            sum(part.blocks for part in parts),
            sum(part.bytes for part in parts),
            sum(part.budget for part in parts),
            sum(part.leased for part in parts),
        )

    def list_entries(self) -> Iterator[TierEntry]:
        """See `Tier.entries`."""
        for address in self._nodes:
            counters = TierCounters()
            yield from list_node_entries(address, counters)
            self._add_counters(counters)

    def read_stored(self, key: bytes) -> bytes | None:
        """See `Tier.stored`."""

        def read(address: RedisNode, _: list[bytes], counters: TierCounters) -> bytes | None:
            def ask(wire: RespConnection, _: RedisIndex) -> bytes | None:
                wire.send([encode_command("GET", kv_key(key))])
                reply = wire.read_reply()
                return reply if isinstance(reply, bytes) else None

            return address.call_index(ask, counters)

        return self._call_for_keys([key], read)[0]

    def check_integrity(self) -> list[str]:
        """What does not agree in the indices, and what would stay for ever; reads everything. Empty: all is well."""
        found = self._call_all_nodes(
            lambda at, count: at.call_index(lambda wire, index: index.check_integrity(wire), count)
        )
        return [line for lines in found for line in (lines if lines is not None else ["a server does not answer"])]

    def close(self) -> None:
        """See `Tier.close`."""
        for address in self._nodes:
            address.close()
        self._parallel_calls.close()

    def _call_for_each_item(
        self,
        keys: Sequence[bytes],
        items: Sequence[Item],
        call: Callable[[RedisNode, list[Item], TierCounters], list[bool]],
    ) -> list[bool]:
        """What `call` says of each item, each at its key's address."""
        dealt = self._spread.group_by_server(keys)
        calls = [partial(call, self._nodes[place], [items[i] for i in indices]) for place, indices in dealt.items()]
        result = [False] * len(keys)
        for indices, part in zip(dealt.values(), self._run_calls(calls), strict=True):
            for index, ok in zip(indices, part, strict=True):
                result[index] = ok
        return result

    def _call_for_keys(
        self, keys: Sequence[bytes], call: Callable[[RedisNode, list[bytes], TierCounters], T]
    ) -> list[T]:
        """What `call` says at each address that holds some of the keys."""
        dealt = self._spread.group_by_server(keys)
        return self._run_calls(
            [partial(call, self._nodes[place], [keys[i] for i in indices]) for place, indices in dealt.items()]
        )

    def _call_all_nodes(self, call: Callable[[RedisNode, TierCounters], T]) -> list[T]:
        """What `call` says at each address."""
        return self._run_calls([partial(call, address) for address in self._nodes])

    def _run_calls(self, calls: Sequence[Callable[[TierCounters], T]]) -> list[T]:
        """Do them side by side."""
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
