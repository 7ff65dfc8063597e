"""One step's batch as tensors: token ids, positions, where new KV goes, which rows are attended to, and the
masks.

Made once a step, before the forward pass; the layers only use it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.scheduler import Plan

Visible = Callable[[Tensor, Tensor], Tensor]
"""(query positions, key positions) -> bool: which keys a layer lets a query see, besides being causal.
Broadcasts.
"""


@dataclass(frozen=True)
class Masks:
    """The masks of one kind of layer, added to the scores; None lets everything through."""

    single: Tensor | None
    """[num_single, 1, 1, single_len]"""
    chunks: list[tuple[Tensor | None, bool]]
    """For each chunk [new tokens, all tokens], or None and whether plain causal masking does it."""


@dataclass(frozen=True)
class Chunk:
    """The part of one sequence's prompt that is computed in this step, behind `start` tokens computed before."""

    start: int
    end: int
    query: slice
    """Its tokens in the flat batch."""
    rows: slice
    """Its rows among the gathered."""


class Batch:
    """The tensors of one step. `plan` is reordered: sequences with one token first, then chunks."""

    def __init__(self, plan: Plan, block_size: int, device: torch.device) -> None:
        singles = [(seq, num) for seq, num in plan if num == 1]
        self.plan = [*singles, *((seq, num) for seq, num in plan if num > 1)]
        self.num_single = len(singles)
        self.chunks: list[Chunk] = []
        self._device = device
        self._single_lens = [seq.num_computed + 1 for seq, _ in singles]
        self.single_len = max(self._single_lens, default=0)
        """Tokens of the longest of the single-token sequences."""
        num_padded = -(-self.single_len // block_size)
        self.single_padded = num_padded * block_size
        """Gathered rows for each of them."""

        ids: list[int] = []
        positions: list[int] = []
        slot_blocks: list[int] = []
        table: list[int] = []
        last: list[int] = []
        fresh: list[int] = []
        for seq, num in self.plan:
            start, end = seq.num_computed, seq.num_computed + num
            num_blocks = -(-end // block_size)
            if num == 1:
                # Padded with the sequence's own first block: what is behind a mask is still its own.
                table += seq.blocks[:num_blocks]
                table += seq.blocks[:1] * (num_padded - num_blocks)
                slot_blocks.append(seq.blocks[num_blocks - 1])
                ids.append(seq.token_ids[start])
                positions.append(start)
            else:
                first_row = len(table) * block_size
                self.chunks.append(
                    Chunk(start, end, slice(len(ids), len(ids) + num), slice(first_row, first_row + end))
                )
                table += seq.blocks[:num_blocks]
                slot_blocks += [seq.blocks[position // block_size] for position in range(start, end)]
                ids += seq.token_ids[start:end]
                positions += range(start, end)
            if start <= (num_blocks - 1) * block_size and end % block_size:
                fresh.append(seq.blocks[num_blocks - 1])
            if end == len(seq.token_ids):
                last.append(len(ids) - 1)
        self.num_rows = len(table) * block_size
        self.fresh_blocks = fresh
        """Blocks that this step begins and does not fill."""
        self.sampled = [seq for seq, num in self.plan if seq.num_computed + num == len(seq.token_ids)]
        """Sequences whose next token this step decides."""

        position_tensor = torch.tensor(positions)
        self.input_ids = torch.tensor([ids], device=device)
        """[1, T]"""
        self.position_ids = position_tensor.to(device)[None]
        """[1, T]"""
        self.slots = (torch.tensor(slot_blocks, device=device), (position_tensor % block_size).to(device))
        """Block and row in it of each of the T new tokens."""
        self.table = torch.tensor(table, device=device)
        """Blocks to gather."""
        self.logits_to_keep = torch.tensor(last or [0], device=device)
        """Indices in the flat batch, one for each of `sampled`; one row nobody looks at if there is none."""
        self._plain: dict[torch.dtype, Masks] = {}

    def masks(self, visible: Visible | None, dtype: torch.dtype) -> Masks:
        """The masks for layers that see what `visible` says, or all that came before (made once)."""
        if visible is not None:
            return Masks(
                self._single_mask(visible, dtype), [self._chunk_mask(c, visible, dtype) for c in self.chunks]
            )
        if dtype not in self._plain:
            chunks = [self._chunk_mask(chunk, None, dtype) for chunk in self.chunks]
            self._plain[dtype] = Masks(self._single_mask(None, dtype), chunks)
        return self._plain[dtype]

    def _single_mask(self, visible: Visible | None, dtype: torch.dtype) -> Tensor | None:
        if visible is None and min(self._single_lens, default=0) == self.single_len:
            return None
        query = torch.tensor(self._single_lens, device=self._device)[:, None] - 1
        key = torch.arange(self.single_len, device=self._device)[None]
        return _additive(query, key, visible, dtype)[:, None, None]

    def _chunk_mask(
        self, chunk: Chunk, visible: Visible | None, dtype: torch.dtype
    ) -> tuple[Tensor | None, bool]:
        if visible is None and chunk.start == 0:
            return None, True
        query = torch.arange(chunk.start, chunk.end, device=self._device)[:, None]
        key = torch.arange(chunk.end, device=self._device)[None]
        return _additive(query, key, visible, dtype), False


def _additive(query: Tensor, key: Tensor, visible: Visible | None, dtype: torch.dtype) -> Tensor:
    seen = key <= query
    if visible is not None:
        seen = seen & visible(query, key)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
