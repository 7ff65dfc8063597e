"""The parts of a model that the native kernels compute, and its steps: their attention reads K and V in the block
pool.
"""

import ctypes
from array import array
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.kernels import library
from penstock.engine.kernels.library import Library
from penstock.engine.memory.storage import KVStorage
from penstock.engine.steps.attention import LayerAttention
from penstock.engine.steps.masks import Visibility, find_first_visible
from penstock.engine.steps.step import Step
from penstock.engine.steps.step_batch import StepBatch


class NativeStep(Step):
    """The step's batch as the kernels read it: block tables, segments, and where new K and V go.

    The kernels compute the attention of `layers`. Sequences lie in the flat batch in the order of the plan.
    """

    def __init__(self, batch: StepBatch, storage: KVStorage, native: Library, layers: frozenset[int]) -> None:
        super().__init__(batch, storage)
        self.native, self._layers = native, layers
        self._first_keys: dict[Visibility, Tensor] = {}
        layout = storage.layout
        segments: list[int] = []
        table: list[int] = []
        row = 0
        for seq, num in batch.plan:
            segments += (row, num, seq.num_computed_tokens, len(table))
            table += seq.block_table[: -(-(seq.num_computed_tokens + num) // layout.block_size)]
            row += num
        self.num_rows = row
        self._segments, self._table = array("i", segments), array("i", table)
        first = address_of(batch.row_values)
        self.row_addresses = [first + part * row * 8 for part in range(4)]
        """Where the numbers of the new tokens are: ids, positions, blocks, and rows in the blocks."""
        self.step_args = library.StepArgs(
            blocks=self.row_addresses[2], offsets=self.row_addresses[3], rows=row, tables=address_of(self._table),
            segments=address_of(self._segments), num_segments=len(batch.plan),
        )  # fmt: skip

    def key_size(self, layer: int) -> int:
        """Return the size of a key head."""
        return self.storage.layout.by_layer[layer].k_shape[1]

    def find_first_keys(self, visible: Visibility | None) -> Tensor | None:
        """Return the first position that each row sees in a kind of layer, int32 [T]; None if that is 0 for all."""
        if visible is not None and visible not in self._first_keys:
            self._first_keys[visible] = find_first_visible(visible, self.batch.places)
        return None if visible is None else self._first_keys[visible]

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new K and V, both [1, heads, T, size]; return them if the kernels compute the layer's attention."""
        if layer not in self._layers:
            return super().write_kv(layer, key, value)
        layout = self.storage.layout
        places = zip(self.storage.addresses[layer], self.storage.scale_addresses[layer], strict=True)
        for x, (address, scales) in zip((key, value), places, strict=True):
            x = x if x.stride(3) == 1 else x.contiguous()  # noqa: PLW2901
            args = library.WriteArgs(
                x.data_ptr(), x.stride(2), x.stride(1), address, scales, layout.block_elements, self.step_args.blocks,
                self.step_args.offsets, self.num_rows, x.shape[1], x.shape[3], layout.block_size,
                layout.dtype.itemsize,
            )  # fmt: skip
            self.native.write(ctypes.addressof(args))
        return self.keep_kv(layer, key, value)

    def compute_attention(self, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        """Compute a layer's attention: query [1, heads, T, size] to [1, T, heads, size of V]."""
        layer = self.find_layer(key, value)
        if layer is None or layer not in self._layers:
            return super().compute_attention(query, key, value, how)
        query = query if query.stride(3) == 1 else query.contiguous()
        args = describe_attention(self.storage, layer, query.shape[1], how.scale)
        out = torch.empty(1, self.num_rows, args.heads, args.v_size, dtype=query.dtype)
        first_key = self.find_first_keys(how.visible)
        weights = None if how.sinks is None else how.sinks.detach().float().contiguous()
        args.q, args.q_row_stride, args.q_head_stride = query.data_ptr(), query.stride(2), query.stride(1)
        args.tables, args.segments = self.step_args.tables, self.step_args.segments
        args.num_segments, args.out = self.step_args.num_segments, out.data_ptr()
        args.first_key = None if first_key is None else first_key.data_ptr()
        args.sinks = None if weights is None else weights.data_ptr()
        args.softcap = how.softcap or 0.0
        self.native.attention(ctypes.addressof(args))
        return out


def address_of(values: "array[int]") -> int:
    """Return where the numbers are. The caller keeps them."""
    return values.buffer_info()[0]


def describe_attention(storage: KVStorage, layer: int, heads: int, scale: float) -> ctypes.Structure:
    """Return what is the same in every step of a layer's attention over a pool, without sinks and bound."""
    layout = storage.layout
    shape, (keys, values) = layout.by_layer[layer], storage.addresses[layer]
    key_scales, value_scales = storage.scale_addresses[layer]
    (kv_heads, k_size), (_, v_size) = shape.k_shape, shape.v_shape
    return library.AttentionArgs(
        keys=keys, values=values, key_scales=key_scales, value_scales=value_scales,
        block_stride=layout.block_elements, heads=heads, kv_heads=kv_heads, k_size=k_size, v_size=v_size,
        block_size=layout.block_size, scale=scale, element_bytes=layout.dtype.itemsize,
    )  # fmt: skip


class Body(Protocol):
    """Computes a whole model over a `NativeStep`, in the place of the module."""

    hidden: Tensor
    """What the head has read in the last step whose batch `keeps_hidden`: [rows, hidden size]."""

    def compute_batch(self, step: NativeStep) -> Tensor:
        """Return the logits that the step's batch keeps: [rows, vocabulary], valid until the next call."""

    def compute_rows(self, step: NativeStep, position_ids: Tensor, kept: Tensor) -> Tensor:
        """The same for tokens at any positions, [1, T], and any rows of logits."""


ROUNDING_VERSIONS = {"amx": " 2"}
"""By instruction set: what counts the changes of how its kernels round; part of the fingerprint."""


@dataclass(frozen=True)
class NativeParts:
    """The parts of a model that the native kernels compute."""

    library: Library
    layers: frozenset[int]
    """Layers whose attention the kernels compute."""
    body: Body | None
    """Computes the whole model in the module's place, if its form allows that."""
    has_experts: bool = False
    """Whether they compute the experts of mixtures, too, which torch rounds otherwise."""
    has_latents: bool = False
    """Whether attention runs on latents that K and V would be made from, which rounds otherwise."""
    has_states: bool = False
    """Whether they read single tokens into the states of layers, which rounds otherwise."""
    keeps_rows_apart: bool = False
    """Whether torch computes no row otherwise because of others, where there is no body."""
    has_uneven_rows: bool = False
    """Whether that takes `RowsApart` around the whole step."""

    @property
    def name(self) -> str:
        """The name of the backend in the fingerprint: the instruction set, and the parts that round otherwise."""
        kinds = {"experts": self.has_experts, "latents": self.has_latents, "states": self.has_states}
        isa = self.library.isa + ROUNDING_VERSIONS.get(self.library.isa, "")
        return " ".join([isa, *(kind for kind, is_there in kinds.items() if is_there)])
