"""The names of one sequence's blocks, growing with its tokens."""

from collections.abc import Sequence

from penstock.kvstore.block import BlockKey, hash_blocks


class BlockHasher:
    """Names blocks of `block_size` tokens after `root`, for one tenant and one model."""

    def __init__(self, root: bytes, tag: bytes, block_size: int) -> None:
        self.keys: list[BlockKey] = []
        """Of the full blocks so far, in order."""
        self.block_size = block_size
        self._root, self._tag = root, tag

    def hash_full_blocks(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Take in a sequence's tokens, all from the first on; the names of the blocks that became full by it."""
        known, size = len(self.keys), self.block_size
        fresh = token_ids[known * size : len(token_ids) // size * size]
        added = [BlockKey(key, size, self._tag) for key in hash_blocks(self._parent_hash(known), fresh, size)]
        self.keys += added
        return added

    def hash_tail_block(self, token_ids: Sequence[int]) -> BlockKey | None:
        """The name of the last block of a prompt if it is partial. `extend` has seen the prompt."""
        full = len(token_ids) // self.block_size
        rest = token_ids[full * self.block_size :]
        if not rest:
            return None
        return BlockKey(hash_blocks(self._parent_hash(full), rest, self.block_size)[0], len(rest), self._tag)

    def _parent_hash(self, index: int) -> bytes:
        return self.keys[index - 1].hash if index else self._root
