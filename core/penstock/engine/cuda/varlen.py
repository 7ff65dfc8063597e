"""One step's attention over the block pool, by torch's `varlen_attn`: in 16 bits, on a GPU.

Behind it is cuDNN (compute capability 9 or 10; any block size that is a power of two; no sliding windows) or
FlashAttention 2 (block sizes that are multiples of 256). Both read K and V through any strides, so the pool is laid
out as on a CPU. Which layers it computes, a trial at load decides (`trial.py`).

cuDNN makes a plan, some tenths of a second long, for each combination of sizes. So numbers of sequences, of queries and
of blocks are padded to few different ones. A combination for which there is no plan is computed by torch.
"""

import logging
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from penstock.engine.attention import LayerAttention, attend_gathered
from penstock.engine.cuda.copies import array_to_device, to_device
from penstock.engine.masks import make_masks
from penstock.engine.scheduler import Plan
from penstock.engine.sequence import Sequence
from penstock.engine.step import Step, gather_rows
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import KVStorage

log = logging.getLogger(__name__)

MIN_QUERIES = 64
"""The least number of rows that the chunks of a step are padded to."""
MIN_TABLE_WIDTH = 16
"""The least number of blocks that block tables are padded to."""

Windows = dict[int, int]
"""By layer that `varlen_attn` computes: its window in tokens, the token itself included; 0: no window."""


def pad_to_power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def pad_table_width(num_blocks: int) -> int:
    """Return the width of block tables: `MIN_TABLE_WIDTH` times a power of four, not below `num_blocks`."""
    width = MIN_TABLE_WIDTH
    while width < num_blocks:
        width *= 4
    return width


class PlanRefused(RuntimeError):
    """`varlen_attn` does not compute calls of these sizes."""

    def __init__(self, plan_key: tuple[int, ...], reason: str) -> None:
        super().__init__(reason)
        self.plan_key = plan_key


@dataclass(frozen=True)
class VarlenCall:
    """The arguments of one call of `varlen_attn` for N sequences, padding ones included."""

    rows: slice
    """The tokens of the sequences in the flat batch."""
    num_queries: int
    """Rows that the call gets: `rows` and padding."""
    starts: Tensor
    """Where each sequence's rows begin, and where the last ones end: int32 [N + 1]."""
    max_rows: int
    """An upper bound of a sequence's rows."""
    tables: Tensor
    """Block tables, padded with blocks that exist: int32 [N, blocks]."""
    lengths: Tensor
    """Tokens to attend to, the new ones included: int32 [N]."""

    @property
    def plan_key(self) -> tuple[int, ...]:
        """The sizes that a plan is made for."""
        return len(self.lengths), self.num_queries, self.max_rows, self.tables.shape[1]

    def compute_attention(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
        """Return attention [rows, heads, size] of query [T, heads, size], K and V [blocks, rows, kv heads, size]."""
        mine = query[self.rows]
        num_padding = self.num_queries - len(mine)
        # Of two offsets the last tokens of queries and keys are aligned, so a single query sees all keys by itself.
        right = 0 if window or self.max_rows > 1 else -1
        out = varlen_attn(
            pad(mine, (0, 0, 0, 0, 0, num_padding)) if num_padding else mine,
            keys,
            values,
            self.starts,
            self.starts,  # where keys begin is in the tables; it is not read
            self.max_rows,
            self.tables.shape[1] * keys.shape[1],
            scale=scale,
            window_size=(window - 1, right),
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=self.lengths,
            block_table=self.tables,
        )
        assert isinstance(out, Tensor)
        return out[: len(mine)]


class VarlenStep(Step):
    """A step in which `varlen_attn` computes the attention of the layers that have a window in `windows`."""

    def __init__(
        self,
        batch: StepBatch,
        storage: KVStorage,
        windows: Windows,
        calls: list[VarlenCall],
        refused: set[tuple[int, ...]] | None = None,
    ) -> None:
        """`refused` are the sizes that `varlen_attn` has no plan for; further ones are added to it.

        torch computes the attention of steps with these sizes. Without `refused` they raise `PlanRefused`.
        """
        super().__init__(batch, storage)
        self._windows, self._calls, self._refused = windows, calls, refused

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new K and V, both [1, heads, T, size]; return them if `varlen_attn` computes the layer's attention."""
        if layer not in self._windows:
            return super().write_kv(layer, key, value)
        self.store_rows(layer, key, value)
        return self.keep_kv(layer, key, value)

    def compute_attention(self, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        """Compute a layer's attention: query [1, heads, T, size] to [1, T, heads, size of V]."""
        layer = self.find_layer(key, value)
        if layer is None or layer not in self._windows:
            return super().compute_attention(query, key, value, how)
        if self._refused is None:
            return self.compute_layer(layer, query, how.scale)
        if not any(call.plan_key in self._refused for call in self._calls):
            try:
                return self.compute_layer(layer, query, how.scale)
            except PlanRefused as refused:
                log.warning("torch computes the attention of steps of the sizes %s: %s", refused.plan_key, refused)
                self._refused.add(refused.plan_key)
        return self._compute_gathered(layer, query, how)

    def _compute_gathered(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """Compute the attention of a layer by torch, over gathered rows."""
        gathered, table = self.gathered, self.gathered.block_ids
        key, value = (gather_rows(pool[layer], table) for pool in (self.storage.keys, self.storage.values))
        masks = make_masks(gathered, how.rule, how.window, query.dtype)
        return attend_gathered(gathered, (query, key, value), masks, how)

    def compute_layer(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Compute the attention of a layer over the pool, whatever K and V it wrote in this step.

        Raises `PlanRefused`.
        """
        keys, values, window = self.storage.keys[layer], self.storage.values[layer], self._windows[layer]
        rows = query[0].transpose(0, 1).contiguous()
        outputs = []
        for call in self._calls:
            try:
                outputs.append(call.compute_attention(rows, keys, values, scale, window))
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except RuntimeError as error:
                raise PlanRefused(call.plan_key, str(error).partition("\n")[0]) from error
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def make_calls(plan: Plan, block_size: int, device: torch.device) -> list[VarlenCall]:
    """Return a call for the sequences with one new token and one for the chunks. The plan is in the batch's order.

    Padding sequences have one row each. They read the first token of the first sequence; their results are not used.
    """
    singles = [seq for seq, num in plan if num == 1]
    chunks = [(seq, num) for seq, num in plan if num > 1]
    parts = []
    if singles:
        padded = pad_to_power_of_two(len(singles))
        lengths = [seq.num_computed_tokens + 1 for seq in singles] + [1] * (padded - len(singles))
        parts.append(
            VarlenCall(
                rows=slice(0, len(singles)),
                num_queries=padded,
                starts=to_device(range(padded + 1), device, torch.int32),
                max_rows=1,
                tables=_pad_block_tables(singles, lengths, block_size, device),
                lengths=to_device(lengths, device, torch.int32),
            )
        )
    if chunks:
        num_padding = pad_to_power_of_two(len(chunks)) - len(chunks)
        starts = [0, *accumulate([num for _, num in chunks] + [1] * num_padding)]
        lengths = [seq.num_computed_tokens + num for seq, num in chunks] + [1] * num_padding
        num_rows = starts[len(chunks)]
        padded = max(MIN_QUERIES, pad_to_power_of_two(starts[-1]))
        parts.append(
            VarlenCall(
                rows=slice(len(singles), len(singles) + num_rows),
                num_queries=padded,
                starts=to_device(starts, device, torch.int32),
                max_rows=padded,
                tables=_pad_block_tables([seq for seq, _ in chunks], lengths, block_size, device),
                lengths=to_device(lengths, device, torch.int32),
            )
        )
    return parts


def _pad_block_tables(seqs: list[Sequence], lengths: list[int], block_size: int, device: torch.device) -> Tensor:
    """Return the block tables of the sequences and of padding ones, [len(lengths), width].

    They are padded with the sequence's own first block, so that masked rows are its own, too.
    """
    held = [-(-length // block_size) for length in lengths]
    tables = np.empty((len(lengths), pad_table_width(max(held))), np.int32)
    for row, seq in enumerate(seqs):
        tables[row] = seq.block_table[0]
        tables[row, : held[row]] = seq.block_table[: held[row]]
    tables[len(seqs) :] = seqs[0].block_table[0]
    return array_to_device(tables, device)
