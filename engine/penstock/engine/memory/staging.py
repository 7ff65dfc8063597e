"""KV blocks on their way between the pool and the stores below it, while the engine computes.

Loading. 1. `stage_blocks` allocates blocks for keys that the pool does not hold; they are in no block table. 2. A
background thread writes the KV of these keys through `views`. 3. `commit_staged_blocks` registers the blocks that were
filled under their keys. They are cached blocks then, and a sequence finds them by key like any other.

Storing. 1. `pin_block` pins a full block. 2. A background thread reads the pool's memory through `payload`. 3.
`unpin`. A full block is never written again, and a pinned one is not evicted.

Steps 1 and 3 belong to the engine's thread alone; the bytes (step 2) may be moved by any thread. Both ends are in one
process: if it dies the pool dies with it, so nothing has to be cleaned up.

On a GPU, views and payloads are host memory: views are copied to the device when the blocks are committed, payloads are
copied from it when the block is pinned.
"""

from contextlib import suppress
from typing import Any, Protocol

from penstock.engine.memory.pool import BlockPool


class BlockMemory(Protocol):
    """The memory that holds the bytes of the pool's blocks."""

    def allocate_views(self, blocks: list[int]) -> tuple[list[memoryview], Any]:
        """Return a writable view of each block, and the buffer that `commit_views` needs."""

    def commit_views(self, blocks: list[int], upload_buffer: Any) -> None:
        """Make what was written to the first views the content of these blocks, from the next step on."""

    def view_block(self, block: int) -> memoryview | None:
        """Return a read-only view of a block's own bytes, or None if they are not in host memory."""

    def copy_block(self, block: int, num_rows: int) -> memoryview:
        """Return a copy of a block's bytes in which the rows (tokens) from `num_rows` on are zero."""


class StagedPoolBlocks:
    """Blocks set aside in the pool for the KV of `keys`.

    The pool holds the first `num_cached` keys already; `views` are for the keys after those. All of these blocks stay
    in the pool until they are committed. After that `views` must not be written: the blocks may belong to others. The
    views themselves raise then, slices of them do not.
    """

    def __init__(self, pool: BlockPool, keys: list[bytes], cached_blocks: list[int], new_blocks: list[int]) -> None:
        self.keys, self.num_cached = keys, len(cached_blocks)
        self.views: list[memoryview] = []
        """A writable view of each new block, `block_bytes` long; its content is undefined at first."""
        self.cached_blocks, self.new_blocks = cached_blocks, new_blocks
        self.pending_keys = set(keys[self.num_cached : self.num_cached + len(new_blocks)])
        self.upload_buffer: Any = None
        self.is_open = True
        self._pool, self._page_tags = pool, [pool.page_tags[block] for block in new_blocks]

    def is_valid(self) -> bool:
        """Return whether the views may still be written. Any thread may call this."""
        return self.is_open and self._page_tags == [self._pool.page_tags[block] for block in self.new_blocks]


class PinnedPoolBlock:
    """A pinned block: `payload` is a read-only view of its `block_bytes` bytes."""

    def __init__(self, pool: BlockPool, payload: memoryview, block: int | None) -> None:
        self.payload = payload
        """The bytes. Any thread may read them, until the block is unpinned."""
        self.block = block
        """The block that is pinned; None if the payload is a copy."""
        self.is_pinned = True
        self._pool, self._page_tag = pool, 0 if block is None else pool.page_tags[block]

    def is_valid(self) -> bool:
        """Return whether the payload is still this block's, by its page tag. Any thread may call this."""
        return self.block is None or self._pool.page_tags[self.block] == self._page_tag

    def unpin(self) -> None:
        """Unpin the block, which is not read any more. A second call does nothing."""
        if self.is_pinned and self.block is not None:
            self._pool.free_blocks([self.block])
        self.is_pinned = False


class BlockStaging:
    """Stages and pins the blocks of one pool."""

    def __init__(self, pool: BlockPool, memory: BlockMemory) -> None:
        self._pool, self._memory = pool, memory
        self._open: set[StagedPoolBlocks] = set()

    @property
    def has_open(self) -> bool:
        """Whether any staged blocks are not committed yet."""
        return bool(self._open)

    def is_staging(self, keys: list[bytes]) -> bool:
        """Return whether a block is staged for any of these keys."""
        return any(key in staged.pending_keys for staged in self._open for key in keys)

    def stage_blocks(self, keys: list[bytes], num_reserved: int) -> StagedPoolBlocks:
        """Stage blocks for `keys`, or for as many of them as fit if `num_reserved` blocks stay free."""
        cached = self._pool.pin_cached_prefix(keys, counted=False)
        count = min(len(keys) - len(cached), max(0, self._pool.num_free_blocks - num_reserved))
        staged = StagedPoolBlocks(self._pool, keys, cached, self._pool.allocate_blocks(count))
        staged.views, staged.upload_buffer = self._memory.allocate_views(staged.new_blocks)
        self._open.add(staged)
        return staged

    def commit_staged_blocks(self, staged: StagedPoolBlocks, num_filled: int) -> None:
        """Register the blocks of the first `num_filled` views under their keys. A second call does nothing."""
        if not staged.is_open:
            return
        assert 0 <= num_filled <= len(staged.views), f"{num_filled} of {len(staged.views)} views filled"
        staged.is_open = False
        self._open.remove(staged)
        filled = staged.new_blocks[:num_filled]
        self._memory.commit_views(filled, staged.upload_buffer)
        staged.upload_buffer = None
        for view in staged.views:
            with suppress(BufferError):  # an array over the view still exists
                view.release()
        for block, key in zip(filled, staged.keys[staged.num_cached :], strict=False):
            self._pool.register_block(block, key, is_staged=True)
        self._pool.free_blocks(staged.cached_blocks + staged.new_blocks)

    def pin_block(self, block: int, num_rows: int) -> PinnedPoolBlock:
        """Pin a block of which `num_rows` rows are computed.

        The payload is the block itself if it is full and in host memory, otherwise a copy.
        """
        payload = self._memory.view_block(block) if num_rows == self._pool.block_size else None
        if payload is None:
            return PinnedPoolBlock(self._pool, self._memory.copy_block(block, num_rows), None)
        self._pool.pin_block(block)
        return PinnedPoolBlock(self._pool, payload, block)
