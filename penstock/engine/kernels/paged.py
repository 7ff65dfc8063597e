"""One step's attention over the block pool, by the native kernels."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from penstock.engine.kernels import library
from penstock.engine.kernels.library import Library
from penstock.engine.scheduler import Plan
from penstock.engine.storage import KVStorage


class PagedStep:
    """The step's batch as the kernels read it: block tables, segments, and where new K and V go.

    `slots` are block and row in it of each new token, both int64 [T]. Sequences lie in the flat batch in the order
    of the plan.
    """

    def __init__(self, native: Library, storage: KVStorage, plan: Plan, slots: tuple[Tensor, Tensor]) -> None:
        self.native, self.storage = native, storage
        self._blocks, self._offsets = slots
        layout = storage.layout
        segments: list[tuple[int, int, int, int]] = []
        table: list[int] = []
        row = 0
        for seq, num in plan:
            segments.append((row, num, seq.num_computed_tokens, len(table)))
            table += seq.block_table[: -(-(seq.num_computed_tokens + num) // layout.block_size)]
            row += num
        self.num_rows = row
        self._segments = np.array(segments, dtype=np.int32)
        self._table = np.array(table, dtype=np.int32)
        self.args = library.AttentionArgs(
            block_stride=layout.block_elements, tables=self._table.ctypes.data, segments=self._segments.ctypes.data,
            num_segments=len(segments), block_size=layout.block_size, element_bytes=layout.dtype.itemsize,
        )  # fmt: skip
        self.step = library.StepArgs(
            blocks=self._blocks.data_ptr(), offsets=self._offsets.data_ptr(), rows=row
        )  # fmt: skip

    def select_layer(self, layer: int, scale: float, first_key: Tensor | None) -> None:
        """Set `args` for a layer. `first_key`: the first position that each row sees, int32 [T]; None: 0."""
        shape = self.storage.layout.by_layer[layer]
        (kv_heads, k_size), (_, v_size) = shape.k_shape, shape.v_shape
        args = self.args
        args.keys, args.values = self.storage.addresses[layer]
        args.kv_heads, args.k_size, args.v_size, args.scale = kv_heads, k_size, v_size, scale
        args.first_key = None if first_key is None else first_key.data_ptr()
        self._first_key = first_key  # until the kernel has read it

    def key_size(self, layer: int) -> int:
        """Return the size of a key head."""
        return self.storage.layout.by_layer[layer].k_shape[1]

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store new K and V, both [1, heads, T, size]."""
        for x, address in zip((key, value), self.storage.addresses[layer], strict=True):
            x = x if x.stride(3) == 1 else x.contiguous()  # noqa: PLW2901
            args = library.WriteArgs(
                x.data_ptr(), x.stride(2), x.stride(1), address, self.args.block_stride, self._blocks.data_ptr(),
                self._offsets.data_ptr(), self.num_rows, x.shape[1], x.shape[3], self.args.block_size,
                self.args.element_bytes,
            )  # fmt: skip
            self.native.write(ctypes.addressof(args))

    def compute_attention(self, query: Tensor, sinks: Tensor | None, softcap: float | None) -> Tensor:
        """Compute the selected layer's attention: query [1, heads, T, size] to [1, T, heads, size of V]."""
        query = query if query.stride(3) == 1 else query.contiguous()
        heads, args = query.shape[1], self.args
        out = torch.empty(1, self.num_rows, heads, args.v_size, dtype=query.dtype)
        weights = None if sinks is None else sinks.detach().float().contiguous()
        args.q, args.q_row_stride, args.q_head_stride = query.data_ptr(), query.stride(2), query.stride(1)
        args.out, args.heads = out.data_ptr(), heads
        args.sinks = None if weights is None else weights.data_ptr()
        args.softcap = softcap or 0.0
        self.native.attention(ctypes.addressof(args))
        return out
