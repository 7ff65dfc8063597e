"""One step's attention over the block pool, by torch's `varlen_attn`: in 16 bits, on a GPU.

Behind it is cuDNN (compute capability 9 or 10; any block size that is a power of two; no sliding windows) or
FlashAttention 2 (block sizes that are multiples of 256). Both read K and V through any strides, so the pool is laid
out as on a CPU. Which layers it computes, a trial at load decides (`trial.py`).

cuDNN plans anew for each combination of sizes. So numbers of sequences, of queries and of blocks are padded to powers
of two.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from penstock.engine.attention import LayerAttention
from penstock.engine.batch import Batch
from penstock.engine.cuda.copies import to_device
from penstock.engine.scheduler import Plan
from penstock.engine.sequence import Sequence
from penstock.engine.step import Step
from penstock.engine.storage import KVStorage

Windows = dict[int, int]
"""By layer that `varlen_attn` computes: its window in tokens, the token itself included; 0: no window."""


def pad_to_power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


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

    def __init__(self, batch: Batch, storage: KVStorage, windows: Windows, calls: list[VarlenCall]) -> None:
        super().__init__(batch, storage)
        self._windows, self._calls = windows, calls

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
        return self.compute_layer(layer, query, how.scale)

    def compute_layer(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Compute the attention of a layer over the pool, whatever K and V it wrote in this step."""
        keys, values, window = self.storage.keys[layer], self.storage.values[layer], self._windows[layer]
        rows = query[0].transpose(0, 1).contiguous()
        outputs = [call.compute_attention(rows, keys, values, scale, window) for call in self._calls]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def make_calls(plan: Plan, block_size: int, device: torch.device) -> list[VarlenCall]:
    """Return a call for the sequences with one new token and one for the chunks. The plan is in the batch's order."""
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
                # Padding rows read the first token of the first sequence; their results are not used.
                tables=_pad_block_tables(singles + singles[:1] * (padded - len(singles)), lengths, block_size, device),
                lengths=to_device(lengths, device, torch.int32),
            )
        )
    if chunks:
        starts = [0, *accumulate(num for _, num in chunks)]
        lengths = [seq.num_computed_tokens + num for seq, num in chunks]
        padded = pad_to_power_of_two(starts[-1])
        parts.append(
            VarlenCall(
                rows=slice(len(singles), len(singles) + starts[-1]),
                num_queries=padded,
                starts=to_device(starts, device, torch.int32),
                max_rows=padded,
                tables=_pad_block_tables([seq for seq, _ in chunks], lengths, block_size, device),
                lengths=to_device(lengths, device, torch.int32),
            )
        )
    return parts


def _pad_block_tables(seqs: list[Sequence], lengths: list[int], block_size: int, device: torch.device) -> Tensor:
    """Return the block tables, padded with the sequence's own first block, so that masked rows are its own, too."""
    held = [seq.block_table[: -(-length // block_size)] for seq, length in zip(seqs, lengths, strict=True)]
    width = pad_to_power_of_two(max(map(len, held)))
    return to_device([blocks + blocks[:1] * (width - len(blocks)) for blocks in held], device, torch.int32)
