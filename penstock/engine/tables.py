"""Block tables: which blocks a sequence finds, needs and holds. Plain Python over the pool."""

from collections import Counter
from collections.abc import Iterable

from penstock.engine.pool import BlockPool
from penstock.engine.sequence import Sequence


class BlockTables:
    """The block tables of the running sequences."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._computing: dict[bytes, Sequence] = {}
        """Which running sequence computes the block of a key, or has computed it."""

    def is_being_computed(self, seq: Sequence) -> bool:
        """Whether the first block that a waiting sequence lacks is computed by a running one just now.

        Then it need not compute it as well. The other is of no lower class and has all blocks for the tokens that it
        came in with, so the wait is short.
        """
        keys = self._shareable_keys(seq)
        index = self.pool.count_cached_prefix(keys)
        maker = self._computing.get(keys[index]) if index < len(keys) else None
        return (
            maker is not None
            and maker.priority <= seq.priority
            and maker.num_computed_tokens < (index + 1) * self.pool.block_size
        )

    def count_preemptions_needed(self, seq: Sequence, running: list[Sequence], leaving: list[Sequence]) -> int | None:
        """How many of `leaving`, in order, have to release their blocks for `seq` to come in; None: all are too few.

        Blocks are wanted for the tokens it has, and one for each sequence that still grows, itself included. Alone, it
        wants no more than its own.
        """
        shared = self._cached_keys(seq)
        num_wanted = self.count_blocks_held(seq) - len(shared)
        num_free = self.pool.count_free_blocks_besides(shared)
        if num_wanted > num_free and not leaving:
            return None
        if not running:
            return 0
        num_growing = self.count_growing(running) + self._can_grow(seq)
        if num_wanted + num_growing <= num_free:
            return 0

        def fits(count: int) -> bool:
            spare = num_growing - self.count_growing(leaving[:count]) if count < len(running) else 0
            freed = self.pool.count_blocks_freed([one.block_table for one in leaving[:count]], shared)
            return num_wanted + spare <= num_free + freed

        if not fits(len(leaving)):
            return None
        return next(count for count in range(1, len(leaving) + 1) if fits(count))

    def allocate_table(self, seq: Sequence) -> None:
        """Give a sequence blocks for its tokens, and set what of them need not be computed.

        A tail that is of no use goes; one that is still there afterwards is to be copied to its block.
        """
        seq.block_table = self.pool.pin_cached_prefix(self._shareable_keys(seq), counted=not seq.num_preemptions)
        num_shared = len(seq.block_table)
        seq.block_table += self.pool.allocate_blocks(self.count_blocks_held(seq) - num_shared)
        seq.num_computed_tokens = num_shared * self.pool.block_size
        if num_shared != seq.num_prompt_tokens // self.pool.block_size:
            seq.tail_payload = None
        elif seq.tail_payload is not None:
            seq.num_computed_tokens = min(seq.num_prompt_tokens, len(seq.token_ids) - 1)
        self._computing.update((key, seq) for key in seq.block_keys[num_shared:])

    def register_blocks(self, seq: Sequence, first_token: int) -> None:
        """Let others share the sequence's blocks that are full and named, from the one `first_token` is in."""
        size = self.pool.block_size
        num_full = min(seq.num_computed_tokens // size, len(seq.block_table), len(seq.block_keys))
        for index in range(first_token // size, num_full):
            self.pool.register_block(seq.block_table[index], seq.block_keys[index])

    def count_growing(self, running: list[Sequence]) -> int:
        """How many of them may need another block."""
        return sum(map(self._can_grow, running))

    def count_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that are missing for the sequence's first `num_tokens` tokens; not above 0 if none is."""
        return -(-num_tokens // self.pool.block_size) - len(seq.block_table)

    def stop_computing(self, seq: Sequence) -> None:
        """The sequence computes nothing any more. It may keep its blocks, for its owner to lend them."""
        for key in seq.block_keys:
            if self._computing.get(key) is seq:
                del self._computing[key]

    def _shareable_keys(self, seq: Sequence) -> list[bytes]:
        """Keys of the blocks that may be taken from the cache if they are there.

        The last token is always computed, for its logits, and a cached block is never written: so the block
        it falls in is not among them.
        """
        return seq.block_keys[: (len(seq.token_ids) - 1) // self.pool.block_size]

    def _cached_keys(self, seq: Sequence) -> list[bytes]:
        """Those of them that are there."""
        keys = self._shareable_keys(seq)
        return keys[: self.pool.count_cached_prefix(keys)]

    def count_blocks_held(self, seq: Sequence) -> int:
        """Blocks for the tokens it has."""
        return -(-len(seq.token_ids) // self.pool.block_size)

    def _can_grow(self, seq: Sequence) -> bool:
        """Whether it may need more blocks than it has, or would come in with."""
        return (len(seq.block_table) or self.count_blocks_held(seq)) < seq.count_blocks_needed(self.pool.block_size)

    def check_integrity(self, running: Iterable[Sequence], others: Counter[int] | None = None) -> None:
        """Everybody has the blocks it should have, and none writes another's. For tests.

        `others`: how often blocks are held by all that is not running; None if that is not known.
        """
        self.pool.check_integrity()
        running, size = list(running), self.pool.block_size
        held = Counter(block for seq in running for block in seq.block_table)
        assert all(count <= self.pool.count_pins(block) for block, count in held.items()), "held and not counted"
        if others is not None:
            refs = Counter({block: self.pool.count_pins(block) for block in range(self.pool.num_blocks)})
            assert held + others == +refs, "held by nobody, or by more than are counted"
        for seq in running:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq}: a block twice"
            assert seq.num_computed_tokens <= len(seq.block_table) * size, f"{seq}: no blocks for what is computed"
            assert len(seq.block_table) <= seq.count_blocks_needed(size), f"{seq}: more blocks than it can use"
            written = seq.block_table[seq.num_computed_tokens // size :]
            assert all(self.pool.count_pins(block) == 1 for block in written), f"{seq} writes a shared block"
        assert set(self._computing.values()) <= set(running), "a block is made by nobody"
