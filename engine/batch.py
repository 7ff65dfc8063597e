"""One step's batch as tensors: token ids, positions, where new KV goes, what is attended to, and the masks.

Made once a step, before the forward pass; the layers only use it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from engine.scheduler import Plan

Visible = Callable[[Tensor, Tensor], Tensor]
"""(query positions, key positions) -> bool: what a layer lets a query see, besides being causal."""


class Causal(Enum):
    """A mask that needs no tensor."""

    PLAIN = "plain"
    """As many queries as keys, and each sees those up to its own."""


Mask = Tensor | Causal | None
"""Added to the scores; None lets everything through."""


@dataclass(frozen=True)
class Masks:
    """The masks of one kind of layer."""

    single: Mask
    """[num_single, 1, 1, single_len]"""
    chunks: list[Mask]
    """For each chunk [new tokens, all tokens]."""


@dataclass(frozen=True)
class Chunk:
    """The part of one sequence that is computed in this step, from token `start` to before `end`."""

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
        self.sampled = [seq for seq, num in self.plan if num == seq.num_pending]
        """Sequences whose next token this step decides."""
        self.num_single = len(singles)
        self.chunks: list[Chunk] = []
        self._device = device
        self._single_lens = [seq.num_computed + 1 for seq, _ in singles]
        self.single_len = max(self._single_lens, default=0)
        """Tokens of the longest of the single-token sequences."""
        self.single_padded = -(-self.single_len // block_size) * block_size
        """Gathered rows for each of them."""
        self.fresh_blocks: list[int] = []
        """Blocks that this step begins and does not fill."""
        self._build(block_size)

    def _build(self, block_size: int) -> None:
        ids: list[int] = []
        positions: list[int] = []
        slot_blocks: list[int] = []
        table: list[int] = []
        keep: list[int] = []
        for seq, num in self.plan:
            start, end = seq.num_computed, seq.num_computed + num
            held = seq.blocks[: -(-end // block_size)]
            if num > 1:
                query, first_row = slice(len(ids), len(ids) + num), len(table) * block_size
                self.chunks.append(Chunk(start, end, query, slice(first_row, first_row + end)))
            ids += seq.token_ids[start:end]
            positions += range(start, end)
            slot_blocks += [held[position // block_size] for position in range(start, end)]
            table += held
            if num == 1:
                # Padded with the sequence's own first block: what is behind a mask is still its own.
                table += held[:1] * (self.single_padded // block_size - len(held))
            if end % block_size and start <= (len(held) - 1) * block_size:
                self.fresh_blocks.append(held[-1])
            if end == len(seq.token_ids):
                keep.append(len(ids) - 1)
        self.num_rows = len(table) * block_size
        """Rows gathered."""
        device, position_tensor = self._device, torch.tensor(positions)
        self.input_ids = torch.tensor([ids], device=device)
        """[1, T]"""
        self.position_ids = position_tensor.to(device)[None]
        """[1, T]"""
        self.slots = (torch.tensor(slot_blocks, device=device), (position_tensor % block_size).to(device))
        """Block and row in it of each of the T new tokens."""
        self.table = torch.tensor(table, device=device)
        """Blocks to gather."""
        self.logits_to_keep = torch.tensor(keep or [0], device=device)
        """Indices in the flat batch, one for each of `sampled`; one that nobody looks at if there is none."""
        self._plain: dict[torch.dtype, Masks] = {}

    def masks(self, visible: Visible | None, dtype: torch.dtype) -> Masks:
        """The masks for layers that see what `visible` says, or all that came before (made once)."""
        if visible is None and dtype in self._plain:
            return self._plain[dtype]
        chunks = [self._chunk_mask(chunk, visible, dtype) for chunk in self.chunks]
        masks = Masks(self._single_mask(visible, dtype), chunks)
        if visible is None:
            self._plain[dtype] = masks
        return masks

    def _single_mask(self, visible: Visible | None, dtype: torch.dtype) -> Mask:
        if visible is None and min(self._single_lens, default=0) == self.single_len:
            return None
        query = torch.tensor(self._single_lens, device=self._device)[:, None] - 1
        key = torch.arange(self.single_len, device=self._device)[None]
        return _additive(query, key, visible, dtype)[:, None, None]

    def _chunk_mask(self, chunk: Chunk, visible: Visible | None, dtype: torch.dtype) -> Mask:
        if visible is None and chunk.start == 0:
            return Causal.PLAIN
        query = torch.arange(chunk.start, chunk.end, device=self._device)[:, None]
        key = torch.arange(chunk.end, device=self._device)[None]
        return _additive(query, key, visible, dtype)


def _additive(query: Tensor, key: Tensor, visible: Visible | None, dtype: torch.dtype) -> Tensor:
    seen = key <= query
    if visible is not None:
        seen = seen & visible(query, key)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
