"""The KV store: the tiers in order, and the rule that only the exact block asked for is ever used.

The engine's pool is the first tier; those here lie below it. Reads go up on demand, as far as fetching is faster than
computing. Writes go down: those above and including the *hand-off tier* (the first that all decode workers can read)
before a job is settled, the rest behind it.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol, Self

from penstock.config.settings import KVSettings
from penstock.kvstore.block import (
    Block,
    BlockFormat,
    BlockKey,
    ReadRequest,
    derive_tenant_salt,
    derive_tenant_tag,
    hash_chain_root,
)
from penstock.kvstore.chain import BlockHasher
from penstock.kvstore.codec import Element, PayloadShape, make_codecs
from penstock.kvstore.cost import CostModel
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.disk import DiskTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.kvstore.tiers.shared import SharedTier
from penstock.redis.urls import split_urls

HAND_OFF_ORDER = ("redis", "shared", "disk")
"""The first of these that there is can be read by all decode workers of the pipeline."""


class PoolLayout(Protocol):
    """The form of a pool's blocks, as the engine has it."""

    @property
    def block_size(self) -> int:
        """Tokens."""

    @property
    def block_bytes(self) -> int:
        """Of all layers' K and V."""

    @property
    def element_type(self) -> Element:
        """What the numbers are."""

    @property
    def vector_shapes(self) -> tuple[tuple[int, int], ...]:
        """(Rows, numbers in a row) of each K and V, in order."""


MissingTiers = int
"""The tiers that lack a block: bit i stands for tier i."""


@dataclass(frozen=True)
class KVLayout:
    """What a model's blocks look like: `payload_bytes` is the K and V of all layers for `block_size` tokens."""

    fingerprint: str
    """64 hex digits."""
    block_size: int
    payload_bytes: int
    shape: PayloadShape
    shapes_text: str = ""
    """The layers' shapes, in words."""

    @classmethod
    def from_pool(cls, fingerprint: str, pool: PoolLayout) -> Self:
        """What a model's pool has."""
        shape = PayloadShape(pool.element_type, pool.vector_shapes)
        return cls(fingerprint, pool.block_size, pool.block_bytes, shape, str(pool))

    def make_block_format(self, *, lossy: bool) -> BlockFormat:
        """The form of stored blocks. Blocks that went through a lossy codec are those of another model."""
        words = f"{self.block_size}|{self.payload_bytes}|{self.shapes_text}|{'int8' if lossy else ''}"
        fingerprint = bytes.fromhex(self.fingerprint)
        if lossy:
            fingerprint = hashlib.sha256(b"int8" + fingerprint).digest()
        return BlockFormat(fingerprint, hashlib.sha256(words.encode()).digest()[:16], self.payload_bytes)


@dataclass
class StoreStats:
    """What became of the blocks that requests asked for, besides the tiers' own counters."""

    pool_hits: int = 0
    pool_misses: int = 0
    recomputed_jobs: int = 0
    """Jobs of whose blocks some were not read when decode came for them: gone, not worth it, or no room for them."""
    recomputed_blocks: int = 0
    not_worth: int = 0
    """Blocks that a tier had, and that were computed because that was faster."""
    not_written: int = 0
    """Blocks that were not written below the hand-off tier, because too many were waiting for that."""


class KVStore:
    """Blocks of one model, in every tier below the pool. Methods may be called from several threads."""

    def __init__(self, layout: KVLayout, tiers: Sequence[Tier], settings: KVSettings) -> None:
        self.layout, self.tiers, self.stats = layout, list(tiers), StoreStats()
        self.cost = CostModel(layout.block_size)
        self.lease_s = settings.lease_s
        self._salt_secret = settings.salt_secret
        self._fingerprint = layout.make_block_format(lossy=is_lossy(settings)).fingerprint.hex()
        names = [tier.name for tier in tiers]
        self.hand_off_index = next((names.index(name) for name in HAND_OFF_ORDER if name in names), -1)
        """Index of the tier through which jobs are handed off; -1: there is none, decode computes again."""

    @classmethod
    def open(cls, layout: KVLayout, settings: KVSettings, urls: str, pipeline: str) -> Self:
        """The tiers of a worker. Raises `KVStoreError` for one that cannot work as it is set up."""
        form, tiers = layout.make_block_format(lossy=is_lossy(settings)), list[Tier]()
        if settings.shared_mb:
            tiers.append(SharedTier.open(form, pipeline, settings.shared_mb * 2**20, settings.shared_dir))
        if settings.disk_mb:
            codec = make_codecs(settings.disk_codec, layout.shape)
            tiers.append(DiskTier.open(form, settings.disk_path, settings.disk_mb * 2**20, codec))
        if settings.redis_mb:
            codec = make_codecs(settings.redis_codec, layout.shape)
            tiers.append(RedisTier.open(form, split_urls(urls), settings.redis_mb * 2**20, settings.keep_s, codec))
        return cls(layout, tiers, settings)

    def make_hasher(self, tenant: str) -> BlockHasher:
        """Names blocks of a tenant's sequences."""
        salt = derive_tenant_salt(self._salt_secret, tenant)
        return BlockHasher(hash_chain_root(self._fingerprint, salt), derive_tenant_tag(salt), self.layout.block_size)

    def find_tiers(self, keys: Sequence[bytes]) -> list[int]:
        """For each block the index of the first tier that has it, `len(tiers)` where none has. Those are used now."""
        found = [len(self.tiers)] * len(keys)
        missing = list(range(len(keys)))
        for depth, tier in enumerate(self.tiers):
            if not missing:
                break
            begun = tier.clock()
            here = tier.has_blocks([keys[index] for index in missing])
            self.cost.tier_speed(tier.name).record_lookup(tier.clock() - begun)
            for index, is_here in zip(missing, here, strict=True):
                if is_here:
                    found[index] = depth
            missing = [index for index, is_here in zip(missing, here, strict=True) if not is_here]
        return found

    def load_blocks(self, wanted: Sequence[ReadRequest]) -> list[int]:
        """Read the leading blocks that there are, as far as that is worth it: the tier each came from, in order.

        A damaged, foreign or vanished block is a miss of its tier, and the next tier is asked.
        """
        places = self.find_tiers([one.key.hash for one in wanted])
        reach = next((index for index, depth in enumerate(places) if depth == len(self.tiers)), len(wanted))
        origin: dict[int, int] = {}
        for depth, tier in enumerate(self.tiers):
            tier.counters.misses += sum(place > depth for place in places)
            mine = [index for index in range(reach) if places[index] == depth]
            while mine:
                count = self.cost.count_blocks_to_read(tier.name, len(mine))
                if not count:
                    self.stats.not_worth += reach - mine[0]
                    reach = mine[0]
                    break
                whole = self._read_from_tier(tier, [wanted[index] for index in mine[:count]])
                for index, is_whole in zip(mine[:count], whole, strict=True):
                    if is_whole:
                        origin[index] = depth
                    else:
                        places[index] += 1  # the next tier is asked
                        reach = reach if places[index] < len(self.tiers) else min(reach, index)
                mine = [index for index in mine[count:] if index < reach]
        count = next((index for index in range(reach) if index not in origin), reach)
        return [origin[index] for index in range(count)]

    def _read_from_tier(self, tier: Tier, wanted: list[ReadRequest]) -> list[bool]:
        begun = tier.clock()
        whole = tier.get(wanted)
        if num_read := sum(whole):
            self.cost.tier_speed(tier.name).record_read(num_read, tier.clock() - begun)
        return whole

    def find_missing_tiers(self, keys: Sequence[bytes], depths: Sequence[int], *, hand_off: bool) -> list[MissingTiers]:
        """Where blocks of these `depths` are to be written: above; with `hand_off`, there too if it lacks them."""
        lacks = [(1 << depth) - 1 for depth in depths]
        unknown = [index for index, depth in enumerate(depths) if depth < self.hand_off_index] if hand_off else []
        if unknown:
            here = self.tiers[self.hand_off_index].has_blocks([keys[index] for index in unknown])
            for index, is_here in zip(unknown, here, strict=True):
                lacks[index] |= 0 if is_here else 1 << self.hand_off_index
        return lacks

    @property
    def all_tiers(self) -> MissingTiers:
        """The lack of a block that was just computed."""
        return (1 << len(self.tiers)) - 1

    def is_in_hand_off_tier(self, lack: MissingTiers) -> bool:
        """Whether decode workers can read a block."""
        return self.hand_off_index >= 0 and not lack >> self.hand_off_index & 1

    def is_missing_below(self, lack: MissingTiers) -> bool:
        """Whether a block is to be written behind the hand-off tier."""
        return lack >> (self.hand_off_index + 1) > 0

    def store_blocks(self, blocks: Sequence[tuple[Block, MissingTiers]], *, behind: bool) -> None:
        """Write each block to the tiers that lack it: those up to the hand-off tier, or those `behind` it."""
        for index, tier in enumerate(self.tiers):
            mine = [block for block, lack in blocks if lack >> index & 1]
            if mine and (index > self.hand_off_index) == behind:
                tier.put(mine)

    def lease_blocks(self, owner: str, names: Sequence[BlockKey]) -> None:
        """Keep a job's blocks in the hand-off tier while it waits, `lease_s` at most."""
        if self.hand_off_index >= 0 and names:
            self.tiers[self.hand_off_index].lease_blocks(owner, [name.hash for name in names], self.lease_s)

    def release_leases(self, owner: str, names: Sequence[BlockKey]) -> None:
        """The job is done: its leases end."""
        if self.hand_off_index >= 0 and names:
            self.tiers[self.hand_off_index].release_leases(owner, [name.hash for name in names])

    def count_recomputed(self, num_blocks: int) -> None:
        """A job came for its blocks, and so many were gone."""
        self.stats.recomputed_blocks += max(0, num_blocks)
        self.stats.recomputed_jobs += num_blocks > 0

    def collect_stats(self) -> dict[str, object]:
        """All counters, for people and graphs."""
        stats = asdict(self.stats)
        pool = {"hits": stats.pop("pool_hits"), "misses": stats.pop("pool_misses")}
        return {"pool": pool, **{tier.name: asdict(tier.counters) for tier in self.tiers}, **stats}

    def set_compute_speed(self, tokens_per_s: Callable[[], float | None]) -> None:
        """How fast the engine computes prompts, for deciding what is worth fetching."""
        self.cost.tokens_per_s = tokens_per_s

    def close(self) -> None:
        """Let go of all tiers. The blocks stay."""
        for tier in self.tiers:
            with suppress(OSError):
                tier.close()


def is_lossy(settings: KVSettings) -> bool:
    """Whether some blocks go through a codec that changes them."""
    return (bool(settings.disk_mb) and settings.disk_codec == "int8") or (
        bool(settings.redis_mb) and settings.redis_codec == "int8"
    )
