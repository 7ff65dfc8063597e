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
from penstock.kvstore.tiers.address import Address
from penstock.kvstore.tiers.contract import TierCounters, TierEntry, TierUsage
from penstock.kvstore.tiers.entries import entries
from penstock.kvstore.tiers.index import Index
from penstock.kvstore.tiers.server import Server
from penstock.kvstore.tiers.side_by_side import SideBySide
from penstock.kvstore.tiers.spread import Spread
from penstock.kvstore.tiers.wire import LARGE, Wire, command
from penstock.names import kv_key

if TYPE_CHECKING:
    from penstock.kvstore.codec import Codecs

Item = TypeVar("Item")
T = TypeVar("T")

UNKNOWN = BlockFormat(bytes(32), bytes(16), 0)
"""The form that no block has."""


class RedisTier:
    """Blocks in Redis servers, each for a set time after it was last used."""

    name, clock = "redis", staticmethod(time.perf_counter)

    def __init__(self, addresses: Sequence[Address], spread: Spread) -> None:
        self.counters = TierCounters()
        self._addresses = list(addresses)
        self._spread = spread
        self._lock = threading.Lock()
        self._side_by_side = SideBySide(4 * len(addresses) if len(addresses) > 1 else 0)

    @classmethod
    def open(
        cls, form: BlockFormat, urls: Sequence[str], budget_bytes: int, keep_s: float, codec: "Codecs | None" = None
    ) -> Self:
        """The blocks of a model at these addresses (in any order), `budget_bytes` at each of them.

        Nothing is connected yet. Raises `KVStoreError` for an address that cannot be one.
        """
        return cls._at(form, urls, Index(budget_bytes, max(1, int(keep_s * 1000))), codec)

    @classmethod
    def attach(cls, urls: Sequence[str]) -> Self:
        """What is there, of any model, for tools: looking changes neither budget nor order of use."""
        return cls._at(UNKNOWN, urls, Index(0, 0), None)

    @classmethod
    def _at(cls, form: BlockFormat, urls: Sequence[str], index: Index, codec: "Codecs | None") -> Self:
        distinct = list(dict.fromkeys(urls))
        if not distinct:
            raise KVStoreError("a Redis tier needs an address")
        large = form.payload_bytes >= LARGE
        return cls([Address(Server(url, large), form, index, codec) for url in distinct], Spread(distinct))

    def get(self, wanted: Sequence[ReadRequest]) -> list[bool]:
        """See `Tier.get`."""
        return self._spread_over([want.key.hash for want in wanted], wanted, Address.get)

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """See `Tier.put`."""
        return self._spread_over([block.key.hash for block in blocks], blocks, Address.put)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.has`."""
        return self._spread_over(keys, keys, Address.has)

    def lease(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """See `Tier.lease`. Ends are times of the server's clock. See `address` for when a leased block is lost."""
        ms = max(1, int(seconds * 1000))
        self._each(keys, lambda at, part, count: at.ask(lambda wire, index: index.lease(wire, owner, part, ms), count))

    def release(self, owner: str, keys: Sequence[bytes]) -> None:
        """See `Tier.release`."""
        self._each(keys, lambda at, part, count: at.ask(lambda wire, index: index.release(wire, owner, part), count))

    def remove(self, keys: Sequence[bytes]) -> int:
        """See `Tier.remove`."""

        def remove(at: Address, part: list[bytes], count: TierCounters) -> int:
            return at.ask(lambda wire, index: index.delete(wire, part), count) or 0

        return sum(self._each(list(dict.fromkeys(keys)), remove))

    def usage(self) -> TierUsage:
        """See `Tier.usage`. Of the servers that answer, added up."""
        found = self._all(lambda at, count: at.ask(lambda wire, index: index.usage(wire), count))
        parts = [usage for usage in found if usage is not None]
        return TierUsage(
            sum(part.blocks for part in parts),
            sum(part.bytes for part in parts),
            sum(part.budget for part in parts),
            sum(part.leased for part in parts),
        )

    def entries(self) -> Iterator[TierEntry]:
        """See `Tier.entries`."""
        for address in self._addresses:
            counters = TierCounters()
            yield from entries(address, counters)
            self._add(counters)

    def stored(self, key: bytes) -> bytes | None:
        """See `Tier.stored`."""

        def read(address: Address, _: list[bytes], counters: TierCounters) -> bytes | None:
            def ask(wire: Wire, _: Index) -> bytes | None:
                wire.send([command("GET", kv_key(key))])
                reply = wire.reply()
                return reply if isinstance(reply, bytes) else None

            return address.ask(ask, counters)

        return self._each([key], read)[0]

    def check_integrity(self) -> list[str]:
        """What does not agree in the indices, and what would stay for ever; reads everything. Empty: all is well."""
        found = self._all(lambda at, count: at.ask(lambda wire, index: index.check(wire), count))
        return [line for lines in found for line in (lines if lines is not None else ["a server does not answer"])]

    def close(self) -> None:
        """See `Tier.close`."""
        for address in self._addresses:
            address.close()
        self._side_by_side.close()

    def _spread_over(
        self,
        keys: Sequence[bytes],
        items: Sequence[Item],
        call: Callable[[Address, list[Item], TierCounters], list[bool]],
    ) -> list[bool]:
        """What `call` says of each item, each at its key's address."""
        dealt = self._spread.deal(keys)
        calls = [partial(call, self._addresses[place], [items[i] for i in indices]) for place, indices in dealt.items()]
        result = [False] * len(keys)
        for indices, part in zip(dealt.values(), self._run(calls), strict=True):
            for index, ok in zip(indices, part, strict=True):
                result[index] = ok
        return result

    def _each(self, keys: Sequence[bytes], call: Callable[[Address, list[bytes], TierCounters], T]) -> list[T]:
        """What `call` says at each address that holds some of the keys."""
        dealt = self._spread.deal(keys)
        return self._run(
            [partial(call, self._addresses[place], [keys[i] for i in indices]) for place, indices in dealt.items()]
        )

    def _all(self, call: Callable[[Address, TierCounters], T]) -> list[T]:
        """What `call` says at each address."""
        return self._run([partial(call, address) for address in self._addresses])

    def _run(self, calls: Sequence[Callable[[TierCounters], T]]) -> list[T]:
        """Do them side by side."""
        counted = [TierCounters() for _ in calls]
        try:
            return self._side_by_side.run([partial(call, part) for call, part in zip(calls, counted, strict=True)])
        finally:
            for counters in counted:
                self._add(counters)

    def _add(self, counters: TierCounters) -> None:
        with self._lock:
            for field in fields(TierCounters):
                setattr(self.counters, field.name, getattr(self.counters, field.name) + getattr(counters, field.name))
