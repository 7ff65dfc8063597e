"""The KV store: the tiers in order, and the rule that only the exact block asked for is ever used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvstore.block import chain_keys, chain_root, num_block_tokens, pack, tenant_salt, unpack
from kvstore.tiers.contract import Tier
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.redis import RedisTier
from penstock.settings import KVSettings


@dataclass(frozen=True)
class Layout:
    """What a model's blocks look like: `payload_bytes` is the K and V of all layers for `block_size` tokens."""

    fingerprint: str
    block_size: int
    payload_bytes: int


class KVStore:
    """Blocks of one model, in every tier."""

    def __init__(self, layout: Layout, tiers: Sequence[Tier], salt_secret: str) -> None:
        self.layout = layout
        self.tiers = list(tiers)
        self._salt_secret = salt_secret
        self._fingerprint = bytes.fromhex(layout.fingerprint)

    @classmethod
    def open(cls, layout: Layout, settings: KVSettings, url: str) -> Self:
        """The tiers of a worker: this process's memory, then Redis at `url`."""
        tiers: list[Tier] = [MemoryTier(settings.memory_mb * 2**20), RedisTier(url, settings.keep_s)]
        return cls(layout, tiers, settings.salt_secret)

    def keys(self, tenant: str, token_ids: Sequence[int]) -> list[bytes]:
        """The keys of the blocks that hold a tenant's `token_ids`."""
        root = chain_root(self.layout.fingerprint, tenant_salt(self._salt_secret, tenant))
        return chain_keys(root, token_ids, self.layout.block_size)

    def get_prefix(self, keys: Sequence[bytes], num_tokens: int, start: int = 0) -> list[memoryview]:
        """Payloads of the blocks `start`, `start + 1`, … of a sequence, up to the first that no tier has.

        `keys` are the sequence's keys from block 0; `num_tokens` its length. A damaged, truncated or foreign block is
        a miss of its tier, and the next tier is asked.
        """
        found: dict[int, memoryview] = {}
        for depth, tier in enumerate(self.tiers):
            missing = [index for index in range(start, len(keys)) if index not in found]
            got = self._read(tier, keys, missing, num_tokens)
            for above in self.tiers[:depth]:
                above.put([(keys[index], stored) for index, (stored, _) in got.items()])
            found |= {index: payload for index, (_, payload) in got.items()}
        prefix: list[memoryview] = []
        while (payload := found.get(start + len(prefix))) is not None:
            prefix.append(payload)
        return prefix

    def put(self, keys: Sequence[bytes], num_tokens: int, payloads: Sequence[tuple[int, bytes | memoryview]]) -> None:
        """Write blocks (index, payload) of a sequence to every tier; when this returns, others can read them."""
        blocks = [
            (keys[index], pack(keys[index], self._fingerprint, self._count(index, num_tokens), payload))
            for index, payload in payloads
        ]
        for tier in self.tiers:
            tier.put(blocks)

    def absent(self, keys: Sequence[bytes], indices: Sequence[int]) -> list[int]:
        """Those of the blocks `indices` that the last tier, the one shared by all, does not have. Renews the others."""
        here = self.tiers[-1].touch([keys[index] for index in indices])
        return [index for index, found in zip(indices, here, strict=True) if not found]

    def _read(
        self, tier: Tier, keys: Sequence[bytes], indices: Sequence[int], num_tokens: int
    ) -> dict[int, tuple[bytes, memoryview]]:
        """Stored bytes and payload of the blocks that the tier has whole, by index; counts the rest."""
        got = {}
        for index, stored in zip(indices, tier.get([keys[index] for index in indices]), strict=True):
            payload = None
            if stored is not None:
                count = self._count(index, num_tokens)
                payload = unpack(stored, keys[index], self._fingerprint, count, self.layout.payload_bytes)
                tier.counters.damaged += payload is None
            if stored is None or payload is None:
                tier.counters.misses += 1
            else:
                tier.counters.hits += 1
                tier.counters.bytes_read += len(stored)
                got[index] = (stored, payload)
        return got

    def _count(self, index: int, num_tokens: int) -> int:
        return num_block_tokens(index, num_tokens, self.layout.block_size)
