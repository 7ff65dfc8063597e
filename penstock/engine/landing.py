"""Where KV comes in from the store and goes out to it, while steps run.

In. 1. `land` allocates blocks for keys that the pool lacks; nobody's table has them. 2. Whoever fetches writes their
bytes through `views`, in the background. 3. `close_landing` gives what was filled its key: the blocks are cached then,
and a sequence that is added finds them as it finds any other.

Out. 1. `lend` holds a full block once more. 2. Whoever stores it reads the pool's memory through `payload`, in the
background. 3. `give_back`. A full block is never written again, and one that is held is nobody else's.

The books are kept by the engine's thread alone, steps 1 and 3; the bytes may be moved by any other, step 2. Both ends
are in one process: if it dies the pool dies with it, and nothing is left to clear up.

On a GPU views and payloads are memory of the host: views are copied to the device when the landing is closed, payloads
from it when they are lent.
"""

from collections import Counter
from contextlib import suppress
from typing import Any, Protocol

from penstock.engine.pool import BlockPool


class Memory(Protocol):
    """What holds the blocks' bytes."""

    def room(self, blocks: list[int]) -> tuple[list[memoryview], Any]:
        """Writable bytes for each block, and what `settle` has to know of them."""

    def settle(self, blocks: list[int], staged: Any) -> None:
        """What was written to the first views of `room` is the content of these blocks, from the next step on."""

    def view(self, block: int) -> memoryview | None:
        """A block's own bytes, to read only; None if the host cannot see them."""

    def read(self, block: int, num_rows: int) -> memoryview:
        """A copy of a block's bytes; rows (tokens) from `num_rows` on are zero."""


class Landing:
    """Room in the pool for the KV of some keys: the leading `held` are there already, the next go to `views`.

    What it holds stays in the pool until it is closed. `views` must not be written after that: their blocks are others'
    then. The views themselves refuse it, slices of them do not.
    """

    def __init__(self, pool: BlockPool, keys: list[bytes], found: list[int], blocks: list[int]) -> None:
        self.keys, self.held = keys, len(found)
        self.views: list[memoryview] = []
        """A block's bytes each, `block_bytes` long and writable; of undefined content at first."""
        self.found, self.blocks = found, blocks
        self.coming = set(keys[self.held : self.held + len(blocks)])
        self.staged: Any = None
        self.is_open = True
        self._pool, self._tags = pool, [pool.tags[block] for block in blocks]

    def is_valid(self) -> bool:
        """Whether the views' blocks are this landing's. Any thread may ask."""
        return self.is_open and self._tags == [self._pool.tags[block] for block in self.blocks]


class Lent:
    """A block lent for reading: `payload` has its `block_bytes` bytes, to read only."""

    def __init__(self, pool: BlockPool, payload: memoryview, block: int | None) -> None:
        self.payload = payload
        self.block = block
        """Whose memory the payload is; None if it is a copy."""
        self.is_out = True
        self._pool, self._tag = pool, 0 if block is None else pool.tags[block]

    def is_valid(self) -> bool:
        """The page tag: whether the memory is still this block's. Any thread may ask."""
        return self.block is None or self._pool.tags[self.block] == self._tag


class Quay:
    """The landings and lent blocks of one pool."""

    def __init__(self, pool: BlockPool, memory: Memory) -> None:
        self._pool, self._memory = pool, memory
        self._landings: set[Landing] = set()
        self._lent: set[Lent] = set()

    @property
    def has_landings(self) -> bool:
        """Whether any is open."""
        return bool(self._landings)

    def is_landing(self, keys: list[bytes]) -> bool:
        """Whether room for one of them is kept already."""
        return any(key in landing.coming for landing in self._landings for key in keys)

    def land(self, keys: list[bytes], num_spared: int) -> Landing:
        """Room for `keys`: as many blocks as can be had if `num_spared` are to be left."""
        found = self._pool.take_prefix(keys, counted=False)
        count = min(len(keys) - len(found), max(0, self._pool.num_free - num_spared))
        landing = Landing(self._pool, keys, found, self._pool.allocate(count))
        landing.views, landing.staged = self._memory.room(landing.blocks)
        self._landings.add(landing)
        return landing

    def close_landing(self, landing: Landing, num_filled: int) -> None:
        """The first `num_filled` views hold the KV of their keys. Twice is harmless."""
        if not landing.is_open:
            return
        assert 0 <= num_filled <= len(landing.views), f"{num_filled} of {len(landing.views)} views filled"
        landing.is_open = False
        self._landings.remove(landing)
        filled = landing.blocks[:num_filled]
        self._memory.settle(filled, landing.staged)
        landing.staged = None
        for view in landing.views:
            with suppress(BufferError):  # somebody made an array of it
                view.release()
        for block, key in zip(filled, landing.keys[landing.held :], strict=False):
            self._pool.publish(block, key, landed=True)
        self._pool.release(landing.found + landing.blocks)

    def lend(self, block: int, num_rows: int) -> Lent:
        """A block of which `num_rows` rows are computed: a full one itself if the host sees it, otherwise a copy."""
        payload = self._memory.view(block) if num_rows == self._pool.block_size else None
        if payload is None:
            return Lent(self._pool, self._memory.read(block, num_rows).toreadonly(), None)
        self._pool.hold(block)
        lent = Lent(self._pool, payload, block)
        self._lent.add(lent)
        return lent

    def give_back(self, lent: Lent) -> None:
        """Nobody reads it any more. Twice is harmless."""
        if lent.is_out and lent.block is not None:
            self._lent.remove(lent)
            self._pool.release([lent.block])
        lent.is_out = False

    def held(self) -> Counter[int]:
        """How often each block is held by what is open here."""
        landed = (block for landing in self._landings for block in landing.found + landing.blocks)
        return Counter(landed) + Counter(lent.block for lent in self._lent if lent.block is not None)
