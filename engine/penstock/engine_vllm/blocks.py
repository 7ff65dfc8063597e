"""The blocks of vLLM's KV, whole: what the ranks of a model have of a block is put together, and taken apart.

With tensor parallelism a rank has some of the heads, with pipeline parallelism some of the layers. A block that leaves
vLLM has all layers and heads in the model's order, so ranks of any number read what ranks of any other number wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelLoadError

ELEMENT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_COPY_BYTES = 8 * 2**20
"""Blocks are copied together up to so many bytes: from 32 MiB on, memory is new for each copy, and its first access
takes as long as the copy.
"""
ElementType = Literal["float32", "bfloat16", "float16"]


class RankKV(NamedTuple):
    """One rank's part of the KV."""

    stage: int
    """Its rank in pipeline parallelism: stages have the layers in order."""
    part: int
    """Its rank in tensor parallelism."""
    num_layers: int
    layer_shapes: frozenset[tuple[int, ...]]
    """The shapes of a block in a layer: (heads, tokens, numbers of K and V together). Latents are those of one head."""
    element_types: frozenset[str]


@dataclass(frozen=True)
class VllmLayout:
    """The layout of a block: for each layer and head the block's tokens, K and V of each side by side."""

    block_size: int
    num_layers: int
    num_heads: int
    vector_size: int
    """Numbers of K and V of a token and head together."""
    element_type: ElementType
    state_bytes: int = 0
    """0, as its layers keep nothing but KV."""
    scan_chunk_tokens: int = 0

    @property
    def byte_shape(self) -> tuple[int, int, int, int]:
        """(Layers, heads, tokens, bytes of K and V of a token and head)."""
        return self.num_layers, self.num_heads, self.block_size, self.vector_size * ELEMENT_SIZES[self.element_type]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return int(np.prod(self.byte_shape))


class RankSlice(NamedTuple):
    """Where a whole block has what a rank has of it: from and to which layer, and which head."""

    layers: slice
    heads: slice


@dataclass
class RankBlocks:
    """The blocks of all ranks. `executor` is vLLM's, through which each rank is reached."""

    executor: Any
    layout: VllmLayout
    slices: list[RankSlice]
    """By rank."""

    def write_blocks(self, blocks: Sequence[int], payloads: NDArray[np.uint8]) -> None:
        """Make each payload the content of a block. `payloads`: [blocks, bytes of a block]."""
        wholes = payloads.reshape(len(blocks), *self.layout.byte_shape)
        parts = [wholes[:, part.layers, part.heads] for part in self.slices]
        self.executor.collective_rpc("penstock_write_blocks", args=(list(blocks), parts))

    def copy_blocks(self, blocks: Sequence[int], num_rows: Sequence[int]) -> list[memoryview]:
        """Return copies of blocks, each with zeros for the rows (tokens) from its number in `num_rows` on."""
        copies = []
        step = max(1, MAX_COPY_BYTES // self.layout.block_bytes)
        for start in range(0, len(blocks), step):
            for whole, rows in zip(self._gather_blocks(blocks[start : start + step]), num_rows[start:], strict=False):
                whole[:, :, rows:] = 0
                copies.append(memoryview(whole.data).cast("B").toreadonly())
        return copies

    def _gather_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return copies of blocks: [blocks, layers, heads, tokens, bytes]."""
        parts = self.executor.collective_rpc("penstock_copy_blocks", args=(list(blocks),))
        if len(parts) == 1:
            return cast(NDArray[np.uint8], parts[0])
        wholes: NDArray[np.uint8] = np.empty((len(blocks), *self.layout.byte_shape), np.uint8)
        for at, part in zip(self.slices, parts, strict=True):
            wholes[:, at.layers, at.heads] = part
        return wholes


def combine_ranks(ranks: Sequence[RankKV], block_size: int, num_heads: int) -> tuple[VllmLayout, list[RankSlice]]:
    """Return the layout of a whole block, and what each rank has of it. `num_heads`: KV heads of the whole model.

    Raises `ModelLoadError` for KV that is not alike in all layers, or in a form that is not known here.
    """
    shapes = frozenset[tuple[int, ...]]().union(*(rank.layer_shapes for rank in ranks))
    types = frozenset[str]().union(*(rank.element_types for rank in ranks))
    is_known = len(shapes) == len(types) == 1 and types <= ELEMENT_SIZES.keys()
    ((heads, num_tokens, vector_size),) = shapes if is_known and all(len(one) == 3 for one in shapes) else [(0, 0, 0)]
    if num_tokens != block_size:
        raise ModelLoadError(f"vLLM keeps its KV in a form that is not known here: {sorted(shapes)}, {sorted(types)}")
    num_parts = 1 + max(rank.part for rank in ranks)
    by_stage = {rank.stage: rank.num_layers for rank in ranks}
    starts = {stage: sum(by_stage[earlier] for earlier in range(stage)) for stage in by_stage}
    slices = []
    for rank in ranks:
        head = rank.part * num_heads // num_parts  # with more ranks than heads, some have the same one
        start = starts[rank.stage]
        slices.append(RankSlice(slice(start, start + rank.num_layers), slice(head, head + heads)))
    if {head for at in slices for head in range(at.heads.start, at.heads.stop)} != set(range(num_heads)):
        raise ModelLoadError(f"{num_heads} KV heads cannot be shared among {num_parts} ranks with {heads} each")
    (element_type,) = types
    return VllmLayout(
        block_size, sum(by_stage.values()), num_heads, vector_size, cast(ElementType, element_type)
    ), slices
