"""Reference counts and keys of the KV blocks. Plain Python: the tensors are in `storage`.

Each block is in exactly one of three states:

    free      its content is worthless
    pinned    it is in the block table of one or more sequences, or staged, or being stored
    cached    nothing pins it, but it has a key: it is kept until its memory is needed, least recently used first

A block gets its key when it is full. From then on it is never written, so sharing it needs no copy.

A retained block counts as used when its retention ends: it is evicted after all others, and of several the one whose
retention ends first.
"""

import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Reference counts, keys and the LRU list of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_hits = 0
        """Blocks that sequences found by key at their first admission, except those that were staged for them."""
        self.num_misses = 0
        """The other blocks that sequences looked up by key at their first admission."""
        self.num_evictions = 0
        self.page_tags = [0] * num_blocks
        """How often each block was allocated. A reader that sees a changed tag has lost the block to another owner."""
        self._pins = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(reversed(range(num_blocks)))  # the last one freed is taken first: it is still in the caches
        self._cached: OrderedDict[int, None] = OrderedDict()
        """The cached blocks that are not retained, the least recently used first."""
        self._clock = clock
        self._ends: dict[int, float] = {}
        """When the retentions of blocks end, pinned ones too."""
        self._order: list[tuple[float, int]] = []
        """A heap of those ends, with each cached block that is retained, and ends that were replaced since."""
        self._num_pinned = 0
        self._staged: set[int] = set()
        """Blocks that were loaded from a store below and that no sequence has found yet."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return self.num_blocks - self._num_pinned

    def count_cached_prefix(self, keys: list[bytes]) -> int:
        """Return how many of the leading `keys` the pool holds. Pins nothing and counts no hits."""
        for count, key in enumerate(keys):
            if key not in self._by_key:
                return count
        return len(keys)

    def count_free_blocks_besides(self, keys: list[bytes]) -> int:
        """Return how many blocks could be allocated once those of `keys`, which the pool holds, were pinned."""
        return self.num_free_blocks - sum(not self._pins[self._by_key[key]] for key in keys)

    def count_blocks_freed(self, tables: list[list[int]], keys: list[bytes]) -> int:
        """Return how many blocks freeing all of `tables` would unpin, without those of `keys`, which the pool holds."""
        counts = Counter(block for table in tables for block in table)
        kept = {self._by_key[key] for key in keys}
        return sum(count == self._pins[block] and block not in kept for block, count in counts.items())

    def pin_cached_prefix(self, keys: list[bytes], *, counted: bool = True) -> list[int]:
        """Pin and return the blocks of the leading `keys` that the pool holds. `counted`: as hits and misses."""
        blocks = [self._by_key[key] for key in keys[: self.count_cached_prefix(keys)]]
        if counted:
            staged = self._staged.intersection(blocks)
            self._staged -= staged
            num_hits = len(blocks) - len(staged)
            self.num_hits += num_hits
            self.num_misses += len(keys) - num_hits
        for block in blocks:
            self._cached.pop(block, None)
            self._num_pinned += not self._pins[block]
            self._pins[block] += 1
        return blocks

    def pin_block(self, block: int) -> None:
        """Pin a block that is pinned already once more."""
        assert self._pins[block] > 0, f"block {block} is not pinned"
        self._pins[block] += 1

    def allocate_blocks(self, count: int) -> list[int]:
        """Return `count` blocks of undefined content, pinned once. At least so many must be free."""
        assert count <= self.num_free_blocks, f"{count} blocks wanted, {self.num_free_blocks} free"
        self._end_retentions(count - len(self._free))
        blocks = [self._free.pop() if self._free else self._evict_block() for _ in range(count)]
        for block in blocks:
            self._pins[block] = 1
            self.page_tags[block] += 1
        self._num_pinned += count
        return blocks

    def retain_blocks(self, keys: Iterable[bytes], seconds: float) -> None:
        """Retain those of the blocks that the pool holds for so long, unless they are for longer; 0 ends it."""
        now = self._clock()
        for place, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None:
                continue
            if seconds:  # of those that are retained together the last goes first
                self._ends[block] = max(now + seconds - place * 1e-6, self._ends.get(block, 0.0))
            else:
                self._ends.pop(block, None)
            if not self._pins[block]:
                self._cached.pop(block, None)
                self._cache_block(block)

    def _cache_block(self, block: int) -> None:
        """Put a block that nothing pins into the order of eviction."""
        if (end := self._ends.get(block)) is None:
            self._cached[block] = None
            return
        heapq.heappush(self._order, (end, block))
        if len(self._order) > 2 * self.num_blocks:
            self._order = [(end, one) for one, end in self._ends.items() if not self._pins[one]]
            heapq.heapify(self._order)

    def _end_retentions(self, num_evicted: int) -> None:
        """End the retentions that are over, and before their time as many more as blocks are to be evicted."""
        now = self._clock()
        while self._order and (self._order[0][0] <= now or len(self._cached) < num_evicted):
            end, block = heapq.heappop(self._order)
            if self._ends.get(block) == end and not self._pins[block]:
                del self._ends[block]
                self._cached[block] = None

    def _evict_block(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        self._staged.discard(block)
        self.num_evictions += 1
        return block

    def register_block(self, block: int, key: bytes, *, is_staged: bool = False) -> None:
        """Give a full, pinned block its key. A key that names another block already stays with that block.

        `is_staged`: the block was loaded from a store below, and is no hit for the first sequence that finds it.
        """
        assert self._pins[block] > 0, f"block {block} is not pinned"
        if key in self._by_key or self._keys[block] is not None:
            return
        self._by_key[key] = block
        self._keys[block] = key
        if is_staged:
            self._staged.add(block)

    def free_blocks(self, blocks: list[int]) -> None:
        """Unpin each of the blocks once. The last of them is the first to be evicted."""
        for block in reversed(blocks):
            assert self._pins[block] > 0, f"block {block} is freed too often"
            self._pins[block] -= 1
            if self._pins[block] == 0:
                self._num_pinned -= 1
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._cache_block(block)

    def count_pins(self, block: int) -> int:
        """Return how often a block is pinned."""
        return self._pins[block]

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state, and that keys and blocks agree. For tests."""
        retained = {block for end, block in self._order if self._ends.get(block) == end and not self._pins[block]}
        free, cached = set(self._free), {*self._cached, *retained}
        pinned = {block for block, pins in enumerate(self._pins) if pins > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(cached) + len(pinned) == self.num_blocks, "a block is in two states or in none"
        assert not self._cached.keys() & retained, "a block is twice in the order of eviction"
        assert retained == {block for block in self._ends if not self._pins[block]}, "a retained block has no place"
        assert len(pinned) == self._num_pinned, "the pinned blocks are miscounted"
        assert free | cached | pinned == set(range(self.num_blocks)), "a block is lost"
        assert all(pins >= 0 for pins in self._pins)
        assert all(self._keys[block] is None for block in free), "a free block has a key"
        assert all(self._keys[block] is not None for block in cached), "a cached block has no key"
        assert {key: block for block, key in enumerate(self._keys) if key is not None} == self._by_key
        assert all(self._keys[block] is not None for block in self._staged), "a staged block has no key"
