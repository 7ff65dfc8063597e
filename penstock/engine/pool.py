"""Which KV block belongs to whom. Plain Python: the tensors are in `storage`, this only counts.

A block is in exactly one of three places:

    free      nothing worth keeping in it
    held      one or more sequences have it in their block table
    cached    nobody holds it, but it has a key: kept, oldest use first to go, until the space is needed

A block gets its key when it is full; from then on it is never written, so that sharing it copies nothing.
"""

from collections import Counter, OrderedDict


class BlockPool:
    """Reference counts, keys and the LRU list of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_hits = 0
        """Blocks that sequences found by key when they were first admitted, without those that were landed for them."""
        self.num_misses = 0
        """The other blocks that they looked up by key then: a store below had them, or nobody."""
        self.num_evictions = 0
        self.tags = [0] * num_blocks
        """The page tags: how often each block was allocated. One that changed under a reader has become another's."""
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(reversed(range(num_blocks)))  # the last one freed is taken first: it is still in the caches
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._landed: set[int] = set()
        """Blocks that came from a store below and were not found by a sequence yet."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    def count_prefix(self, keys: list[bytes]) -> int:
        """How many of the leading `keys` are here now. Takes nothing and counts no hits."""
        for count, key in enumerate(keys):
            if key not in self._by_key:
                return count
        return len(keys)

    def num_free_beside(self, keys: list[bytes]) -> int:
        """Blocks that could be allocated once those of `keys`, all of them here, were taken."""
        return self.num_free - sum(self._by_key[key] in self._cached for key in keys)

    def num_freed(self, tables: list[list[int]], keys: list[bytes]) -> int:
        """Blocks that nobody would hold if all of `tables` were released, those of `keys` (all here) not counted."""
        held = Counter(block for table in tables for block in table)
        kept = {self._by_key[key] for key in keys}
        return sum(count == self._refs[block] and block not in kept for block, count in held.items())

    def take_prefix(self, keys: list[bytes], *, counted: bool = True) -> list[int]:
        """The blocks of the leading `keys` that are here, each held once more. `counted`: as hits and misses."""
        blocks = [self._by_key[key] for key in keys[: self.count_prefix(keys)]]
        if counted:
            landed = self._landed.intersection(blocks)
            self._landed -= landed
            num_hits = len(blocks) - len(landed)
            self.num_hits += num_hits
            self.num_misses += len(keys) - num_hits
        for block in blocks:
            self._cached.pop(block, None)
            self._refs[block] += 1
        return blocks

    def hold(self, block: int) -> None:
        """Hold a block once more that is held already."""
        assert self._refs[block] > 0, f"block {block} is not held"
        self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of unknown content, held once. The caller has looked at `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self.tags[block] += 1
        return blocks

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        self._landed.discard(block)
        self.num_evictions += 1
        return block

    def publish(self, block: int, key: bytes, *, landed: bool = False) -> None:
        """Give a held, full block its key. A key that names another block already stays with that one.

        `landed`: it came from a store below, and is no hit for the first sequence that finds it.
        """
        assert self._refs[block] > 0, f"block {block} is not held"
        if key in self._by_key or self._keys[block] is not None:
            return
        self._by_key[key] = block
        self._keys[block] = key
        if landed:
            self._landed.add(block)

    def release(self, blocks: list[int]) -> None:
        """Let go of blocks held once each by the caller. The last of them is the first to be evicted."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released too often"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def num_refs(self, block: int) -> int:
        """How often a block is held."""
        return self._refs[block]

    def check_integrity(self) -> None:
        """Every block is in exactly one place, and keys and blocks agree. For tests."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "a block is in two places or in none"
        assert free | cached | held == set(range(self.num_blocks)), "a block is lost"
        assert all(refs >= 0 for refs in self._refs)
        assert all(self._keys[block] is None for block in free), "a free block has a key"
        assert all(self._keys[block] is not None for block in cached), "a cached block has no key"
        assert {key: block for block, key in enumerate(self._keys) if key is not None} == self._by_key
        assert all(self._keys[block] is not None for block in self._landed), "a landed block has no key"
