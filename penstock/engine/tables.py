"""Block tables: which blocks a sequence finds, needs and holds. Plain Python over the pool."""

from collections import Counter
from collections.abc import Iterable

from penstock.engine.pool import BlockPool
from penstock.engine.sequence import Sequence


class BlockTables:
    """The block tables of the running sequences."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._makers: dict[bytes, Sequence] = {}
        """Which running sequence computes the block of a key, or has computed it."""

    def is_being_made(self, seq: Sequence) -> bool:
        """Whether the first block that a waiting sequence lacks is computed by a running one just now.

        Then it need not compute it as well. The other is of no lower class and has all blocks for the tokens that it
        came in with, so the wait is short.
        """
        keys = self._shareable(seq)
        index = self.pool.count_prefix(keys)
        maker = self._makers.get(keys[index]) if index < len(keys) else None
        return maker is not None and maker.rank <= seq.rank and maker.num_computed < (index + 1) * self.pool.block_size

    def num_leaving(self, seq: Sequence, running: list[Sequence], leaving: list[Sequence]) -> int | None:
        """How many of `leaving`, in order, have to release their blocks for `seq` to come in; None: all are too few.

        Blocks are wanted for the tokens it has, and one for each sequence that still grows, itself included. Alone, it
        wants no more than its own.
        """
        shared = self._shared(seq)
        num_wanted = self.num_blocks(seq) - len(shared)
        num_free = self.pool.num_free_beside(shared)
        if num_wanted > num_free and not leaving:
            return None
        if not running:
            return 0
        num_growing = self.num_growing(running) + self._grows(seq)
        if num_wanted + num_growing <= num_free:
            return 0

        def fits(count: int) -> bool:
            spare = num_growing - self.num_growing(leaving[:count]) if count < len(running) else 0
            freed = self.pool.num_freed([one.blocks for one in leaving[:count]], shared)
            return num_wanted + spare <= num_free + freed

        if not fits(len(leaving)):
            return None
        return next(count for count in range(1, len(leaving) + 1) if fits(count))

    def open(self, seq: Sequence) -> None:
        """Give a sequence blocks for its tokens, and set what of them need not be computed.

        A tail that is of no use goes; one that is still there afterwards is to be copied to its block.
        """
        seq.blocks = self.pool.take_prefix(self._shareable(seq), counted=not seq.num_preemptions)
        num_shared = len(seq.blocks)
        seq.blocks += self.pool.allocate(self.num_blocks(seq) - num_shared)
        seq.num_computed = num_shared * self.pool.block_size
        if num_shared != seq.num_prompt // self.pool.block_size:
            seq.tail = None
        elif seq.tail is not None:
            seq.num_computed = min(seq.num_prompt, len(seq.token_ids) - 1)
        self._makers.update((key, seq) for key in seq.prefix_keys[num_shared:])

    def publish(self, seq: Sequence, first_token: int) -> None:
        """Let others share the sequence's blocks that are full and named, from the one `first_token` is in."""
        size = self.pool.block_size
        num_full = min(seq.num_computed // size, len(seq.blocks), len(seq.prefix_keys))
        for index in range(first_token // size, num_full):
            self.pool.publish(seq.blocks[index], seq.prefix_keys[index])

    def num_growing(self, running: list[Sequence]) -> int:
        """How many of them may need another block."""
        return sum(map(self._grows, running))

    def num_lacking(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that are missing for the sequence's first `num_tokens` tokens; not above 0 if none is."""
        return -(-num_tokens // self.pool.block_size) - len(seq.blocks)

    def leave(self, seq: Sequence) -> None:
        """The sequence computes nothing any more. It may keep its blocks, for its owner to lend them."""
        for key in seq.prefix_keys:
            if self._makers.get(key) is seq:
                del self._makers[key]

    def _shareable(self, seq: Sequence) -> list[bytes]:
        """Keys of the blocks that may be taken from the cache if they are there.

        The last token is always computed, for its logits, and a cached block is never written: so the block
        it falls in is not among them.
        """
        return seq.prefix_keys[: (len(seq.token_ids) - 1) // self.pool.block_size]

    def _shared(self, seq: Sequence) -> list[bytes]:
        """Those of them that are there."""
        keys = self._shareable(seq)
        return keys[: self.pool.count_prefix(keys)]

    def num_blocks(self, seq: Sequence) -> int:
        """Blocks for the tokens it has."""
        return -(-len(seq.token_ids) // self.pool.block_size)

    def _grows(self, seq: Sequence) -> bool:
        """Whether it may need more blocks than it has, or would come in with."""
        return (len(seq.blocks) or self.num_blocks(seq)) < seq.blocks_needed(self.pool.block_size)

    def check_integrity(self, running: Iterable[Sequence], others: Counter[int] | None = None) -> None:
        """Everybody has the blocks it should have, and none writes another's. For tests.

        `others`: how often blocks are held by all that is not running; None if that is not known.
        """
        self.pool.check_integrity()
        running, size = list(running), self.pool.block_size
        held = Counter(block for seq in running for block in seq.blocks)
        assert all(count <= self.pool.num_refs(block) for block, count in held.items()), "held and not counted"
        if others is not None:
            refs = Counter({block: self.pool.num_refs(block) for block in range(self.pool.num_blocks)})
            assert held + others == +refs, "held by nobody, or by more than are counted"
        for seq in running:
            assert len(set(seq.blocks)) == len(seq.blocks), f"{seq}: a block twice"
            assert seq.num_computed <= len(seq.blocks) * size, f"{seq}: no blocks for what is computed"
            assert len(seq.blocks) <= seq.blocks_needed(size), f"{seq}: more blocks than it can use"
            written = seq.blocks[seq.num_computed // size :]
            assert all(self.pool.num_refs(block) == 1 for block in written), f"{seq} writes a shared block"
        assert set(self._makers.values()) <= set(running), "a block is made by nobody"
