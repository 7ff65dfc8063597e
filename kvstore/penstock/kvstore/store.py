"""The KV store: the tiers in order, and the rule that only the exact block asked for is ever used.

The engine's pool lies above the tiers. Blocks are read on demand, as far as reading is faster than computing. A job is
settled when its blocks are written to the tiers down to the *hand-off tier* (the first that all decode workers can
read); the tiers below it are written afterwards.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Protocol, Self

from penstock.config.settings import KVSettings
from penstock.errors import ContentErased, InvalidRequest, KVStoreError, TenantKeyMissing
from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.block import (
    Block,
    BlockFormat,
    BlockHasher,
    BlockKey,
    PromptBlocks,
    ReadRequest,
    Span,
    derive_tenant_root,
)
from penstock.kvstore.codec import Element, make_codecs
from penstock.kvstore.cost import CostModel
from penstock.kvstore.retention import Retentions
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.redis.urls import split_urls
from penstock.sealing import BYTES_OVERHEAD, derive_secret, has_tenant_keys, open_bytes, seal_bytes

log = logging.getLogger(__name__)

LEASE_S = 300.0
"""How long the blocks of a waiting job are kept from eviction, at most."""
KEEP_S = 3600.0
"""How long a block stays in Redis after its last use."""
MAX_COPIED_BLOCKS = 16
"""Blocks that are copied from tier to tier at a time."""
HAND_OFF_ORDER = ("redis", "shared", "disk")
"""The hand-off tier is the first of these tiers that is set up."""


class PoolLayout(Protocol):
    """Layout of the blocks of the engine's pool."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of all layers."""

    @property
    def element_type(self) -> Element:
        """Type of the numbers."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence; 0 if the model has none."""

    @property
    def scan_chunk_tokens(self) -> int:
        """Tokens of a prompt that the model reads at once where its KV depends on that (see `BlockHasher`); or 0."""


class PooledModel(Protocol):
    """A model whose blocks are in a pool."""

    @property
    def fingerprint(self) -> str:
        """64 hex digits: models with the same ones can exchange blocks."""

    @property
    def layout(self) -> PoolLayout:
        """The layout of the blocks of its KV."""

    @property
    def has_separate_answer_keys(self) -> bool:
        """Whether a token's KV depends on whether it is the prompt's or the answer's."""


MissingTiers = int
"""Bitmask of the tiers that do not hold a block (bit i = tier i)."""


@dataclass(frozen=True)
class StoreLayout:
    """Layout of a model's blocks: `payload_bytes` is the K and V of all layers for `block_size` tokens."""

    fingerprint: str
    """64 hex digits."""
    block_size: int
    payload_bytes: int
    element: Element
    shapes_text: str = ""
    """The layers' shapes as text. It is part of what blocks are checked against."""
    has_separate_answer_keys: bool = False
    """Whether a token's KV depends on whether it is the prompt's or the answer's."""
    num_state_parts: int = 0
    """Block-sized parts in which the recurrent state is stored; 0 if the model has none."""
    scan_chunk_tokens: int = 0
    """Tokens of a prompt's scan chunk, if the model's KV depends on scan chunks (see `BlockHasher`); else 0."""

    @classmethod
    def from_model(cls, model: PooledModel) -> Self:
        """Return the layout of a model's blocks."""
        pool = model.layout
        return cls(
            model.fingerprint,
            pool.block_size,
            pool.block_bytes,
            pool.element_type,
            str(pool),
            model.has_separate_answer_keys,
            -(-pool.state_bytes // pool.block_bytes),
            pool.scan_chunk_tokens,
        )

    def make_block_format(self, *, is_sealed: bool = False) -> BlockFormat:
        """Return the format of stored blocks; that of sealed ones has room for nonce and tag, and is another one."""
        payload_bytes = self.payload_bytes + (BYTES_OVERHEAD if is_sealed else 0)
        words = f"{self.block_size}|{payload_bytes}|{self.shapes_text}|" + ("sealed" if is_sealed else "")
        layout = hashlib.sha256(words.encode()).digest()[:16]
        return BlockFormat(bytes.fromhex(self.fingerprint), layout, payload_bytes)


@dataclass
class StoreStats:
    """Counts of blocks that requests asked for. The tiers have counters of their own."""

    pool_hits: int = 0
    pool_misses: int = 0
    recomputed_jobs: int = 0
    """Jobs for which decode computed blocks again: they were gone, slower to read, or had no space in the pool."""
    recomputed_blocks: int = 0
    not_worth: int = 0
    """Blocks that a tier had, and that were computed because that is faster."""
    not_written: int = 0
    """Blocks that were not written because too many optional writes were waiting."""


class KVStore:
    """Blocks of one model, in every tier below the pool. Methods may be called from several threads."""

    def __init__(self, layout: StoreLayout, tiers: Sequence[Tier], settings: KVSettings) -> None:
        self.layout, self.tiers, self.stats = layout, list(tiers), StoreStats()
        self.cost, self._counting = CostModel(layout.block_size), threading.Lock()
        self._salt_secret = settings.salt_secret
        self._sealed_tiers = {"disk", "redis"} if has_tenant_keys() else set[str]()
        """Tiers that outlive the host's memory: blocks of tenants with a key are encrypted there."""
        self._sealed_tenants: dict[bytes, str] = {}
        """The tenants with a key, by the tag of their blocks."""
        self.call_retention_s, self._retained_share = settings.call_retention_s, settings.retained_share
        names = [tier.name for tier in tiers]
        sizes_mb = {"shared": settings.shared_mb, "disk": settings.disk_mb, "redis": settings.redis_mb}
        self._largest_tier_bytes = 2**20 * max((sizes_mb.get(name, 0) for name in names), default=0)
        self.hand_off_index = next((names.index(name) for name in HAND_OFF_ORDER if name in names), -1)
        """Index of the hand-off tier. -1: there is none, and decode computes prompts again."""

    @classmethod
    def open(cls, layout: StoreLayout, settings: KVSettings, urls: str, pipeline: str) -> Self:
        """Open the tiers that the settings ask for. Raise `KVStoreError` for one that cannot work as it is set up.

        Shared memory of a size that nobody asked for is left out instead.
        """
        block_format, tiers = layout.make_block_format(), list[Tier]()
        lasting_format = layout.make_block_format(is_sealed=has_tenant_keys())
        if settings.shared_mb:
            budget_bytes, directory = settings.shared_mb * 2**20, settings.shared_dir
            try:
                tiers.append(HostTier(Arena.open(block_format, pipeline, budget_bytes, directory)))
            except KVStoreError as problem:
                if "shared_mb" in settings.model_fields_set:
                    raise
                log.warning("the KV store runs without shared memory: %s", problem)
        if settings.disk_mb:
            budget_bytes = settings.disk_mb * 2**20
            tiers.append(
                HostTier(Arena.open_on_disk(lasting_format, settings.disk_path, budget_bytes, settings.shared_dir))
            )
        if settings.redis_mb:
            addresses, budget_bytes = split_urls(urls), settings.redis_mb * 2**20
            codecs = None if has_tenant_keys() else make_codecs(layout.element)  # what is encrypted gets no shorter
            tiers.append(RedisTier.open(lasting_format, addresses, budget_bytes, KEEP_S, codecs))
        return cls(layout, tiers, settings)

    def make_hasher(
        self, tenant: str, num_prompt_tokens: int = 0, spans: Sequence[Span] = (), adapter: str = ""
    ) -> BlockHasher:
        """Return a hasher for one sequence of a tenant, whose prompt has `num_prompt_tokens` tokens and these spans.

        `adapter` is the digest of the adapter that computes it; empty for the model alone.
        """
        layout, secret = self.layout, self._salt_secret
        if self._sealed_tiers and (own := derive_secret("kv", tenant)):
            secret += own  # nobody else can name the blocks of a prompt
        root, tag = derive_tenant_root(secret, layout.fingerprint, tenant, adapter)
        if secret is not self._salt_secret:
            self._sealed_tenants[tag] = tenant
        return BlockHasher(root, tag, layout.block_size, layout.scan_chunk_tokens, num_prompt_tokens, spans)

    def hash_prompt(
        self, tenant: str, token_ids: Sequence[int], spans: Sequence[Span] = (), adapter: str = ""
    ) -> PromptBlocks:
        """Return the names of the blocks of a tenant's prompt, in which spans stand for pictures.

        `adapter` is the digest of the adapter that computes it; empty for the model alone.
        """
        hasher = self.make_hasher(tenant, len(token_ids), spans, adapter)
        hasher.hash_full_blocks(token_ids)
        tail_key = hasher.hash_tail_block(token_ids)
        if self.layout.has_separate_answer_keys:
            hasher.name_answers_apart(len(token_ids))
        return PromptBlocks(hasher, tail_key, len(hasher.keys), self.layout.num_state_parts)

    def make_retentions(self, pool_bytes: int) -> Retentions:
        """Return the retentions of a worker with a pool of this size above the tiers."""
        max_bytes = int(self._retained_share * max(pool_bytes, self._largest_tier_bytes))
        return Retentions(max_bytes, self.layout.payload_bytes)

    def find_tiers(self, hashes: Sequence[bytes]) -> list[int]:
        """Return for each block the index of the first tier that has it, or `len(tiers)`. It counts as a use."""
        found = [len(self.tiers)] * len(hashes)
        missing = list(range(len(hashes)))
        for tier_index, tier in enumerate(self.tiers):
            if not missing:
                break
            started_s = tier.clock()
            here = tier.has_blocks([hashes[index] for index in missing])
            self.cost.tier_speed(tier.name).record_lookup(tier.clock() - started_s)
            for index, is_here in zip(missing, here, strict=True):
                if is_here:
                    found[index] = tier_index
            missing = [index for index, is_here in zip(missing, here, strict=True) if not is_here]
        return found

    def lacks_block(self, key: BlockKey) -> bool:
        """Return whether no tier has a block, as far as that is known without waiting for one."""
        return all(tier.lacks_block(key.hash) for tier in self.tiers)

    def count_misses(self, tier: Tier, num_blocks: int) -> None:
        """Count blocks that a tier was asked for in vain."""
        with self._counting:
            tier.counters.misses += num_blocks

    def load_blocks(self, requests: Sequence[ReadRequest], *, must_read: bool = False) -> list[int]:
        """Read leading blocks as long as tiers have them, and reading is worth it or they `must_read`. Return the tier
        of each block read.

        A damaged, foreign or vanished block is a miss of its tier, and the next tier is asked.
        """
        tiers_of = self.find_tiers([request.key.hash for request in requests])
        end = next((index for index, found in enumerate(tiers_of) if found == len(self.tiers)), len(requests))
        read_from: dict[int, int] = {}
        for tier_index, tier in enumerate(self.tiers):
            self.count_misses(tier, sum(found > tier_index for found in tiers_of))
            indices = [index for index in range(end) if tiers_of[index] == tier_index]
            while indices:
                count = len(indices) if must_read else self.cost.count_blocks_to_read(tier.name, len(indices))
                if not count:
                    self.stats.not_worth += end - indices[0]
                    end = indices[0]
                    break
                whole = self._read_from_tier(tier, [requests[index] for index in indices[:count]])
                for index, is_whole in zip(indices[:count], whole, strict=True):
                    if is_whole:
                        read_from[index] = tier_index
                    else:
                        tiers_of[index] += 1  # the next tier is asked
                        end = end if tiers_of[index] < len(self.tiers) else min(end, index)
                indices = [index for index in indices[count:] if index < end]
        num_read = next((index for index in range(end) if index not in read_from), end)
        return [read_from[index] for index in range(num_read)]

    def load_state(self, requests: Sequence[ReadRequest], num_tokens: int) -> bool:
        """Read all parts of a state, with which `num_tokens` tokens need not be computed. Return whether they are read.

        They are not if a part is missing, or if computing the tokens is faster.
        """
        tiers_of = self.find_tiers([request.key.hash for request in requests])
        if max(tiers_of) == len(self.tiers):
            return False
        by_tier = {index: [r for r, at in zip(requests, tiers_of, strict=True) if at == index] for index in {*tiers_of}}
        read_s = sum(
            len(some) * (self.cost.tier_speed(self.tiers[at].name).block_s or 0) for at, some in by_tier.items()
        )
        tokens_per_s = self.cost.tokens_per_s()
        if tokens_per_s is not None and read_s * tokens_per_s > num_tokens:
            self.stats.not_worth += len(requests)
            return False
        return all(all(self._read_from_tier(self.tiers[index], some)) for index, some in by_tier.items())

    def _read_from_tier(self, tier: Tier, requests: list[ReadRequest]) -> list[bool]:
        started_s = tier.clock()
        whole = self._get_blocks(tier, requests)
        if num_read := sum(whole):
            self.cost.tier_speed(tier.name).record_read(num_read, tier.clock() - started_s)
        return whole

    def _get_blocks(self, tier: Tier, requests: Sequence[ReadRequest]) -> list[bool]:
        """Read blocks of a tier to their targets. Return which are whole."""
        if tier.name not in self._sealed_tiers:
            return tier.get(requests)
        whole, size = list[bool](), self.layout.payload_bytes + BYTES_OVERHEAD
        for start in range(0, len(requests), MAX_COPIED_BLOCKS):
            part = requests[start : start + MAX_COPIED_BLOCKS]
            memory = memoryview(bytearray(len(part) * size))
            stored = [memory[place * size : (place + 1) * size] for place in range(len(part))]
            found = tier.get([ReadRequest(one.key, view) for one, view in zip(part, stored, strict=True)])
            read = zip(found, part, stored, strict=True)
            whole += [is_whole and self._open_block(one, view) for is_whole, one, view in read]
        return whole

    def _put_blocks(self, tier: Tier, blocks: Sequence[Block]) -> None:
        """Write blocks to a tier, encrypted where their tenant has a key; none of a tenant whose key was dropped."""
        if tier.name not in self._sealed_tiers:
            tier.put(blocks)
            return
        for start in range(0, len(blocks), MAX_COPIED_BLOCKS):
            part = map(self._seal_block, blocks[start : start + MAX_COPIED_BLOCKS])
            tier.put([block for block in part if block is not None])

    def _seal_block(self, block: Block) -> Block | None:
        tenant, key = self._sealed_tenants.get(block.key.tenant_tag), block.key
        if tenant is None:
            return replace(block, payload=memoryview(bytes(block.payload) + bytes(BYTES_OVERHEAD)))
        try:
            sealed = seal_bytes("kv", tenant, "", block.payload.cast("B"), key.hash)
        except (ContentErased, TenantKeyMissing):
            return None
        return replace(block, payload=memoryview(sealed))

    def _open_block(self, request: ReadRequest, stored: memoryview) -> bool:
        """Decrypt a block to its target. Return False for one that cannot be: it is computed again."""
        tenant, target = self._sealed_tenants.get(request.key.tenant_tag), request.target.cast("B")
        try:
            target[:] = (
                stored[: len(target)] if tenant is None else open_bytes("kv", tenant, "", stored, request.key.hash)
            )
        except (ContentErased, TenantKeyMissing, InvalidRequest, ValueError):
            return False
        return True

    def find_missing_tiers(
        self, hashes: Sequence[bytes], tiers_of: Sequence[int], *, hand_off: bool
    ) -> list[MissingTiers]:
        """Return the tiers to which blocks are to be written: all above the tier of `tiers_of` that has the block.

        With `hand_off` the hand-off tier is asked, too, whether it has the blocks.
        """
        missing = [(1 << tier_index) - 1 for tier_index in tiers_of]
        unknown = [index for index, found in enumerate(tiers_of) if found < self.hand_off_index] if hand_off else []
        if unknown:
            here = self.tiers[self.hand_off_index].has_blocks([hashes[index] for index in unknown])
            for index, is_here in zip(unknown, here, strict=True):
                missing[index] |= 0 if is_here else 1 << self.hand_off_index
        return missing

    @property
    def all_tiers(self) -> MissingTiers:
        """The tiers that miss a block that was just computed."""
        return (1 << len(self.tiers)) - 1

    def is_in_hand_off_tier(self, missing: MissingTiers) -> bool:
        """Return whether decode workers can read a block."""
        return self.hand_off_index >= 0 and not missing >> self.hand_off_index & 1

    def is_missing_below(self, missing: MissingTiers) -> bool:
        """Return whether a tier below the hand-off tier misses a block."""
        return missing >> (self.hand_off_index + 1) > 0

    def store_blocks(self, blocks: Sequence[tuple[Block, MissingTiers]], *, below: bool) -> None:
        """Write each block to the tiers that miss it: down to the hand-off tier, or those `below` it."""
        for index, tier in enumerate(self.tiers):
            to_write = [block for block, missing in blocks if missing >> index & 1]
            if to_write and (index > self.hand_off_index) == below:
                self._put_blocks(tier, to_write)

    def retain_blocks(self, keys: Sequence[BlockKey], seconds: float, *, below: bool) -> None:
        """Retain blocks (`Tier.retain_blocks`) in the tiers down to the hand-off tier, or in those `below` it.

        Blocks that a tier has lost are copied to it from the tiers above, which may lose them next.
        """
        for index, tier in enumerate(self.tiers):
            if (index > self.hand_off_index) != below:
                continue
            here = tier.retain_blocks([key.hash for key in keys], seconds)
            lost = [key for key, is_here in zip(keys, here, strict=True) if not is_here] if seconds and index else []
            for start in range(0, len(lost), MAX_COPIED_BLOCKS):
                self._copy_down(lost[start : start + MAX_COPIED_BLOCKS], index)
            if lost:
                tier.retain_blocks([key.hash for key in lost], seconds)

    def _copy_down(self, keys: Sequence[BlockKey], index: int) -> None:
        """Write blocks to a tier, as far as those above it have them."""
        size = self.layout.payload_bytes
        memory, left = memoryview(bytearray(len(keys) * size)), list(enumerate(keys))
        for tier in self.tiers[:index]:
            here = tier.has_blocks([key.hash for _, key in left])
            found = [pair for pair, is_here in zip(left, here, strict=True) if is_here]
            views = [memory[place * size : (place + 1) * size] for place, _ in found]
            read = [ReadRequest(key, view) for (_, key), view in zip(found, views, strict=True)]
            whole = self._get_blocks(tier, read)
            copied = [(pair, Block(pair[1], view)) for pair, view, ok in zip(found, views, whole, strict=True) if ok]
            self._put_blocks(self.tiers[index], [block for _, block in copied])
            left = [pair for pair in left if pair not in [done for done, _ in copied]]

    def lease_blocks(self, owner: str, keys: Sequence[BlockKey]) -> None:
        """Lease a job's blocks in the hand-off tier for `LEASE_S`."""
        if self.hand_off_index >= 0 and keys:
            self.tiers[self.hand_off_index].lease_blocks(owner, [key.hash for key in keys], LEASE_S)

    def release_leases(self, owner: str, keys: Sequence[BlockKey]) -> None:
        """End a job's leases on blocks."""
        if self.hand_off_index >= 0 and keys:
            self.tiers[self.hand_off_index].release_leases(owner, [key.hash for key in keys])

    def count_recomputed(self, num_blocks: int) -> None:
        """Count the blocks of one job that were not found and are computed again."""
        self.stats.recomputed_blocks += max(0, num_blocks)
        self.stats.recomputed_jobs += num_blocks > 0

    def collect_stats(self) -> dict[str, object]:
        """Return all counters, the tiers' included."""
        stats = asdict(self.stats)
        pool = {"hits": stats.pop("pool_hits"), "misses": stats.pop("pool_misses")}
        return {"pool": pool, **{tier.name: asdict(tier.counters) for tier in self.tiers}, **stats}

    def set_compute_speed(self, tokens_per_s: Callable[[], float | None]) -> None:
        """Set how fast the engine computes prompts. A block is read only if reading is faster. None: not known yet."""
        self.cost.tokens_per_s = tokens_per_s

    def close(self) -> None:
        """Close all tiers. The blocks stay."""
        for tier in self.tiers:
            with suppress(OSError):
                tier.close()
