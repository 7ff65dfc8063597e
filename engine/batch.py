"""One step's batch as tensors: token ids, positions, and where new KV goes.

Made once a step, before the forward pass; the layers only use it. What the native kernels want beside it is in
`paged`, what the torch path wants in `gathered`.
"""

from functools import cached_property

import torch
from torch import Tensor

from engine.gathered import Gathered
from engine.kernels.library import Library
from engine.kernels.paged import PagedStep
from engine.scheduler import Plan
from engine.storage import KVStorage


class Batch:
    """The tensors of one step. `plan` is reordered: sequences with one token first, then chunks."""

    def __init__(self, plan: Plan, block_size: int, device: torch.device) -> None:
        self.plan = [*((seq, num) for seq, num in plan if num == 1), *((seq, num) for seq, num in plan if num > 1)]
        self.sampled = [seq for seq, num in self.plan if num == seq.num_pending]
        """Sequences whose next token this step decides."""
        self.fresh_blocks: list[int] = []
        """Blocks that this step begins and does not fill."""
        self.num_attended = 0
        """Layers whose attention came to the engine in this step."""
        self.paged: PagedStep | None = None
        """For layers whose attention the native kernels compute."""
        self.given: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer: K and V as the cache gave them in this step."""
        self.direct: set[int] = set()
        """Layers whose K and V came to attention just so."""
        self._block_size, self._device = block_size, device
        self._build()

    def _build(self) -> None:
        ids: list[int] = []
        positions: list[int] = []
        slot_blocks: list[int] = []
        keep: list[int] = []
        size, device = self._block_size, self._device
        for seq, num in self.plan:
            start, end = seq.num_computed, seq.num_computed + num
            ids += seq.token_ids[start:end]
            positions += range(start, end)
            slot_blocks += [seq.blocks[position // size] for position in range(start, end)]
            last = (end - 1) // size
            if end % size and start <= last * size:
                self.fresh_blocks.append(seq.blocks[last])
            if end == len(seq.token_ids):
                keep.append(len(ids) - 1)
        position_tensor = torch.tensor(positions)
        self.input_ids = torch.tensor([ids], device=device)
        """[1, T]"""
        self.position_ids = position_tensor.to(device)[None]
        """[1, T]"""
        self.slots = (torch.tensor(slot_blocks, device=device), (position_tensor % size).to(device))
        """Block and row in it of each of the T new tokens."""
        self.logits_to_keep = torch.tensor(keep or [0], device=device)
        """Indices in the flat batch, one for each of `sampled`; one that nobody looks at if there is none."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    def owner(self, key: Tensor, value: Tensor) -> int | None:
        """The layer for which the cache gave just these tensors in this step."""
        found = (layer for layer, (k, v) in reversed(self.given.items()) if k is key and v is value)
        return next(found, None)

    @cached_property
    def gathered(self) -> Gathered:
        """How the torch path finds the rows of each sequence."""
        return Gathered(self.plan, self._block_size, self._device)

    def page(self, native: Library, storage: KVStorage) -> None:
        """Let the native kernels compute the attention of the layers that they can."""
        self.paged = PagedStep(native, storage, self.plan, self.slots)
