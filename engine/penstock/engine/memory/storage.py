"""The memory of the KV blocks: one tensor with a row per block, so that a block's bytes of all layers are contiguous.

Within a row the layers follow each other, K before V; within K and V the heads, and within a head the block's tokens.
Each layer sees its part through a strided view, so nothing is copied between the form the model writes and the form
that travels.

K and V may be int8: then each K, and each V, is followed by a scale for each of its vectors (one head of one token),
float32. A vector's numbers are its codes times its scale, and depend on nothing beside the vector.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from penstock.engine.device import to_device
from penstock.engine.kernels.memory import map_zeros
from penstock.engine.memory.states import StateLayout, StateStorage
from penstock.engine.sequence import Payload


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's KV for one token: `k_shape` and `v_shape` are (heads, head size).

    The keys by which a sparse layer finds what it attends to are K of `number_index_keys(layer)`, which has no V.
    """

    layer: int
    k_shape: tuple[int, int]
    v_shape: tuple[int, int]


SCALE_BYTES = 4


def number_index_keys(layer: int) -> int:
    """Return the number under which a layer's index keys are cached, below 0 as no layer's."""
    return -1 - layer


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a block, which follows from the model, the dtype and the block size."""

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: torch.dtype
    """The model's."""
    is_int8: bool = False
    """Whether K and V are stored as int8, and not in the model's dtype."""
    states: StateLayout | None = None
    """The layout of recurrent state. None if the model has no recurrent layers."""
    attends_internally: bool = False
    """Whether the model attends to what is cached by itself, and so reads one sequence at a time."""

    @cached_property
    def by_layer(self) -> dict[int, LayerShape]:
        """The layers by their index."""
        return {shape.layer: shape for shape in self.layers}

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of a block's elements."""
        return torch.int8 if self.is_int8 else self.dtype

    @cached_property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(First element, heads, elements per head and token) of each K, V and their scales, in a block's order.

        Scales lie at multiples of their bytes.
        """
        parts: list[tuple[int, int, int]] = []
        end = 0
        for shape in self.layers:
            for heads, size in (shape.k_shape, shape.v_shape):
                for width in (size, SCALE_BYTES) if self.is_int8 else (size,):
                    parts.append((end, heads, width))
                    end += heads * width * self.block_size
                    if self.is_int8:
                        end += -end % SCALE_BYTES
        return tuple(parts)

    @property
    def element_type(self) -> Literal["float32", "bfloat16", "float16", "int8"]:
        """The name of the dtype of a block's elements."""
        names: dict[torch.dtype, Literal["float32", "bfloat16", "float16", "int8"]] = {
            torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int8: "int8",
        }  # fmt: skip
        return names[self.stored_dtype]

    @cached_property
    def block_elements(self) -> int:
        """How many elements a block has."""
        first, heads, size = self.parts[-1] if self.parts else (0, 0, 0)
        return first + heads * size * self.block_size

    @property
    def block_bytes(self) -> int:
        """How many bytes a block has."""
        return self.block_elements * self.stored_dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's recurrent state; 0 if there are no recurrent layers."""
        return 0 if self.states is None else self.states.row_bytes

    @property
    def scan_chunk_tokens(self) -> int:
        """How many tokens of a prompt a layer with a state reads at once; 0 if no layer has one."""
        return 0 if self.states is None else self.states.scan_chunk_tokens

    def __str__(self) -> str:
        layers = ";".join(f"{s.layer}:{s.k_shape}:{s.v_shape}" for s in self.layers)
        states = "" if self.states is None else f"|{self.states}"
        return f"{self.dtype}{' as int8' if self.is_int8 else ''}|{self.block_size}|{layers}{states}"


class KVStorage:
    """`num_blocks` blocks of one layout, zero at first, and `num_states` rows of recurrent state."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device, num_states: int = 1) -> None:
        self.layout = layout
        self.is_host_memory = device.type == "cpu"
        self.states = None if layout.states is None else StateStorage(layout.states, num_states)
        num_elements, dtype = num_blocks * layout.block_elements, layout.stored_dtype
        flat = (map_zeros(num_elements, dtype) if device.type == "cpu"
                else torch.zeros(num_elements, dtype=dtype, device=device))  # fmt: skip
        self.data = flat.view(num_blocks, layout.block_elements)
        self._bytes = self.data.view(torch.uint8).numpy() if device.type == "cpu" else np.empty((0, 0), np.uint8)
        self.keys: dict[int, Tensor] = {}
        """By layer: [num_blocks, block_size, heads, size]. For int8: the quantised values, without scales."""
        self.values: dict[int, Tensor] = {}
        self.addresses: dict[int, tuple[int, int]] = {}
        """By layer: the addresses of its K and its V in block 0."""
        self.scale_addresses: dict[int, tuple[int | None, int | None]] = {}
        """By layer: those of the scales of K and V; None where K and V have none."""
        parts = iter(layout.parts)
        for shape in layout.layers:
            scales: list[int | None] = []
            for views in (self.keys, self.values):
                offset, heads, size = next(parts)
                strides = (layout.block_elements, size, layout.block_size * size, 1)
                start = self.data.storage_offset() + offset
                views[shape.layer] = self.data.as_strided((num_blocks, layout.block_size, heads, size), strides, start)
                scales.append(self.data.data_ptr() + next(parts)[0] if layout.is_int8 else None)
            self.addresses[shape.layer] = (self.keys[shape.layer].data_ptr(), self.values[shape.layer].data_ptr())
            self.scale_addresses[shape.layer] = (scales[0], scales[1])

    def list_host_memory(self) -> list[Tensor]:
        """Return the tensors of blocks and states that are in host memory, where each is used from its start on."""
        tensors = [self.data] if self.states is None else [self.data, self.states.data]
        return [tensor for tensor in tensors if tensor.device.type == "cpu"]

    def zero_blocks(self, blocks: list[int]) -> None:
        """Zero the blocks, so that no values of a previous owner are read, not even behind a mask."""
        self.data.index_fill_(0, to_device(blocks, self.data.device, torch.int64), 0)

    def write_block(self, block: int, payload: Payload) -> None:
        """Fill a block from `block_bytes` bytes."""
        content = np.frombuffer(payload, dtype=np.uint8)
        if self.is_host_memory:
            self._bytes[block][:] = content
        else:
            self.data[block].view(torch.uint8).copy_(torch.from_numpy(content.copy()))

    def allocate_views(self, blocks: list[int]) -> tuple[list[memoryview], list[Tensor]]:
        """Return a writable view of each block, and what `commit_views` needs.

        On a CPU the views are the blocks themselves, and nothing is needed.
        """
        if self.is_host_memory:
            return [memoryview(self._bytes[block]) for block in blocks], []
        staged = [torch.empty_like(self.data[block], device="cpu") for block in blocks]
        return [_view_bytes(row) for row in staged], staged

    def commit_views(self, blocks: list[int], staged: list[Tensor]) -> None:
        """Make what was written to the first views the content of these blocks, from the next step on."""
        for block, row in zip(blocks, staged, strict=False):
            self.data[block].copy_(row)

    def view_block(self, block: int) -> memoryview | None:
        """Return a read-only view of a block's own bytes, or None if they are not in host memory."""
        return memoryview(self._bytes[block]).toreadonly() if self.is_host_memory else None

    def copy_block(self, block: int, num_rows: int) -> memoryview:
        """Return a copy of a block's bytes in which the rows (tokens) from `num_rows` on are zero."""
        copy = self.data[block].to("cpu", copy=True)
        self.zero_rows(copy, num_rows)
        return _view_bytes(copy).toreadonly()

    def zero_rows(self, content: Tensor, num_rows: int) -> None:
        """Zero the rows (tokens) from `num_rows` on in a block's content in host memory, [block elements]."""
        if num_rows < self.layout.block_size:
            for offset, heads, size in self.layout.parts:
                part = content[offset : offset + heads * self.layout.block_size * size]
                part.view(heads, self.layout.block_size, size)[:, num_rows:] = 0


def _view_bytes(row: Tensor) -> memoryview:
    """Return the bytes of a row in host memory."""
    return memoryview(row.view(torch.uint8).numpy())  # type: ignore[arg-type, unused-ignore]
