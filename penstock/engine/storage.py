"""The memory of the KV blocks: one tensor with a row per block, so that a block's bytes of all layers are contiguous.

Within a row the layers follow each other, K before V; within K and V the heads, and within a head the block's tokens.
Each layer sees its part through a strided view, so nothing is copied between the form the model writes and the form
that travels.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock.engine.cuda.copies import to_device
from penstock.engine.kernels.memory import map_zeros
from penstock.engine.sequence import Payload


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches for one token: `k_shape` and `v_shape` are (heads, head size)."""

    layer: int
    k_shape: tuple[int, int]
    v_shape: tuple[int, int]


@dataclass(frozen=True)
class KVLayout:
    """The layout of a block, which follows from the model, the dtype and the block size."""

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: torch.dtype

    @cached_property
    def by_layer(self) -> dict[int, LayerShape]:
        """The layers by their index."""
        return {shape.layer: shape for shape in self.layers}

    @property
    def vector_shapes(self) -> tuple[tuple[int, int], ...]:
        """(Number of vectors, numbers per vector) of each K and V, in the order of a block's bytes.

        There are heads * block size vectors of the size of a head.
        """
        shapes = (part for shape in self.layers for part in (shape.k_shape, shape.v_shape))
        return tuple((heads * self.block_size, size) for heads, size in shapes)

    @property
    def element_type(self) -> Literal["float32", "bfloat16", "float16"]:
        """The name of the dtype."""
        names: dict[torch.dtype, Literal["float32", "bfloat16", "float16"]] = {
            torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
        }  # fmt: skip
        return names[self.dtype]

    @property
    def block_elements(self) -> int:
        """How many numbers a block has."""
        per_token = sum(h * d for shape in self.layers for h, d in (shape.k_shape, shape.v_shape))
        return per_token * self.block_size

    @property
    def block_bytes(self) -> int:
        """How many bytes a block has."""
        return self.block_elements * self.dtype.itemsize

    def __str__(self) -> str:
        layers = ";".join(f"{s.layer}:{s.k_shape}:{s.v_shape}" for s in self.layers)
        return f"{self.dtype}|{self.block_size}|{layers}"


class KVStorage:
    """`num_blocks` blocks of one layout, zero at first."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        flat = (map_zeros(num_blocks * layout.block_elements, layout.dtype) if device.type == "cpu"
                else torch.zeros(num_blocks * layout.block_elements, dtype=layout.dtype, device=device))  # fmt: skip
        self.data = flat.view(num_blocks, layout.block_elements)
        self._bytes = self.data.view(torch.uint8).numpy() if device.type == "cpu" else np.empty((0, 0), np.uint8)
        self._parts: list[tuple[int, int, int]] = []  # (offset, heads, size of a head) of each K and V in a row
        self.keys: dict[int, Tensor] = {}
        """By layer: [num_blocks, block_size, heads, size]."""
        self.values: dict[int, Tensor] = {}
        offset = 0
        for shape in layout.layers:
            for views, (heads, size) in ((self.keys, shape.k_shape), (self.values, shape.v_shape)):
                strides = (layout.block_elements, size, layout.block_size * size, 1)
                start = self.data.storage_offset() + offset
                views[shape.layer] = self.data.as_strided((num_blocks, layout.block_size, heads, size), strides, start)
                self._parts.append((offset, heads, size))
                offset += heads * size * layout.block_size
        self.addresses = {layer: (k.data_ptr(), self.values[layer].data_ptr()) for layer, k in self.keys.items()}
        """By layer: the addresses of its K and its V in block 0."""

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero the blocks, so that no values of a previous owner are read, not even behind a mask."""
        self.data.index_fill_(0, to_device(blocks, self.data.device, torch.int64), 0)

    def write_block(self, block: int, payload: Payload) -> None:
        """Fill a block from `block_bytes` bytes."""
        self._bytes[block][:] = np.frombuffer(payload, dtype=np.uint8)

    def allocate_views(self, blocks: list[int]) -> tuple[list[memoryview], Tensor | None]:
        """Return a writable view of each block, and the tensor that is to be committed, [len(blocks), block elements].

        Here the views are the blocks themselves, and the tensor is None.
        """
        return [memoryview(self._bytes[block]) for block in blocks], None

    def commit_views(self, blocks: list[int], staged: Tensor | None) -> None:
        """Make what was written to the first views the content of these blocks, from the next step on."""

    def view_block(self, block: int) -> memoryview | None:
        """Return a read-only view of a block's own bytes, or None if they are not in host memory."""
        return memoryview(self._bytes[block]).toreadonly()

    def read_block(self, block: int) -> Tensor:
        """Return a copy of a block in host memory: [block elements]."""
        return self.data[block].clone()

    def copy_block(self, block: int, num_rows: int) -> memoryview:
        """Return a copy of a block's bytes in which the rows (tokens) from `num_rows` on are zero."""
        copy = self.read_block(block)
        if num_rows < self.layout.block_size:
            for offset, heads, size in self._parts:
                part = copy[offset : offset + heads * self.layout.block_size * size]
                part.view(heads, self.layout.block_size, size)[:, num_rows:] = 0
        return memoryview(copy.view(torch.uint8).numpy())  # type: ignore[arg-type, unused-ignore]
