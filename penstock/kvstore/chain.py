"""The names of one sequence's blocks, growing with its tokens."""

from collections.abc import Sequence

from penstock.kvstore.block import Name, chain_keys


class Chain:
    """Names blocks of `block_size` tokens after `root`, for one tenant and one model."""

    def __init__(self, root: bytes, tag: bytes, block_size: int) -> None:
        self.names: list[Name] = []
        """Of the full blocks so far, in order."""
        self.block_size = block_size
        self._root, self._tag = root, tag

    def extend(self, token_ids: Sequence[int]) -> list[Name]:
        """Take in a sequence's tokens, all from the first on; the names of the blocks that became full by it."""
        known, size = len(self.names), self.block_size
        fresh = token_ids[known * size : len(token_ids) // size * size]
        added = [Name(key, size, self._tag) for key in chain_keys(self._parent(known), fresh, size)]
        self.names += added
        return added

    def tail(self, token_ids: Sequence[int]) -> Name | None:
        """The name of the last block of a prompt if it is partial. `extend` has seen the prompt."""
        full = len(token_ids) // self.block_size
        rest = token_ids[full * self.block_size :]
        if not rest:
            return None
        return Name(chain_keys(self._parent(full), rest, self.block_size)[0], len(rest), self._tag)

    def _parent(self, index: int) -> bytes:
        return self.names[index - 1].key if index else self._root
