"""The tensors of a GGUF file, mapped into memory, and the numbers that its blocks stand for.

A block has one or two scales in float16 and whole numbers of a few bits; in a "K" block of 256, each 16 or 32 numbers
have a scale of their own in 6 or 8 bits, which those in float16 multiply. A value is scale * number - minimum. The
product is exact in float32, whatever the order in which it is computed: it has at most 11 + 8 + 5 bits, or 17 + 5 with
a minimum. So a minimum costs one rounding, and the engine's dtype one more.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.gguf.gguf_file import BLOCKS, FLOAT_KINDS, GgufTensor, read_gguf_header
from penstock.errors import ModelLoadError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 2**18  # numbers that are unpacked at a time: few enough to stay in the processor's cache


@dataclass(frozen=True)
class GgufSlice:
    """A tensor of a mapped file, as safetensors has its slices."""

    _content: Tensor
    _tensor: GgufTensor

    def get_shape(self) -> list[int]:
        """Return the shape of its values."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return GGUF's name of its type, which for floats is safetensors' own."""
        return self._tensor.kind

    def __getitem__(self, key: object) -> Tensor:
        """Return a view of the file: floats as they are, blocks as bytes with one row for each row of values."""
        tensor = self._tensor
        content = self._content[tensor.offset : tensor.offset + tensor.num_bytes]
        return content.view(_DTYPES.get(tensor.kind, torch.uint8)).view(*tensor.shape[:-1], -1)


def map_gguf_tensors(path: Path) -> dict[str, GgufSlice]:
    """Return the tensors of a file by its own names. Raises `ModelLoadError` if the file is damaged."""
    header = read_gguf_header(path)
    # A private mapping, as safetensors has it: what somebody writes to a tensor does not go to the file.
    content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    return {name: GgufSlice(content, tensor) for name, tensor in header.tensors.items()}


@dataclass(frozen=True)
class GgufMatrix:
    """A matrix [rows, columns] in a mapped file."""

    part: GgufSlice
    name: str = ""
    """The matrix's name in messages."""
    rotary_heads: int = 0
    """The rows of each of so many heads are in another order: their two halves lie pair by pair."""

    @property
    def kind(self) -> str:
        """GGUF's name of its type."""
        return self.part.get_dtype()

    def find_rows(self) -> Tensor:
        """Return by row, in the order that transformers has, its number in the file.

        Raises `ValueError` if there are not as many as heads have.
        """
        rows = self.part.get_shape()[0]
        places = torch.arange(rows)
        if not self.rotary_heads:
            return places
        if rows % (2 * self.rotary_heads):
            raise ValueError(f"its {rows} rows are not those of {self.rotary_heads} heads")
        return places.view(self.rotary_heads, -1, 2).transpose(1, 2).reshape(-1)

    def read_rows(self, places: Tensor) -> Tensor:
        """Return what is stored of some rows, of consecutive ones without a copy."""
        stored, first = self.part[...], int(places[0])
        is_slice = int(places[-1]) == first + len(places) - 1 and not self.rotary_heads
        return stored[first : first + len(places)] if is_slice else stored[places]

    def fill_weight(self, out: Tensor, *_stored: Tensor, rows: Tensor | None = None) -> None:
        """Fill a weight, or some of its rows, with the values. Raises `ModelLoadError` if one is not finite."""
        columns, num_threads = out.shape[1], torch.get_num_threads()
        step = max(1, _CHUNK // columns)
        # Operators this short are slower on several threads, and far slower where others use the cores too.
        torch.set_num_threads(1)
        try:
            places = self.find_rows() if rows is None else self.find_rows()[rows]
            for first in range(0, len(places), step):
                some = slice(first, first + step)
                chosen = some if rows is None else rows[some]
                out[chosen] = _read_rows(self.read_rows(places[some]), self.kind, columns, out.dtype)
        except ValueError as error:
            raise ModelLoadError(f"{self.name} cannot be unpacked: {error}") from error
        finally:
            torch.set_num_threads(num_threads)


def _read_rows(stored: Tensor, kind: str, columns: int, dtype: torch.dtype) -> Tensor:
    if kind in FLOAT_KINDS:
        return stored.to(dtype)
    values = unpack_blocks(stored, kind).view(len(stored), columns).to(dtype)
    if not bool(values.isfinite().all()):
        raise ValueError("it has values that are not finite, so its scales are damaged")
    return values


def unpack_blocks(stored: Tensor, kind: str) -> Tensor:
    """Return the values of blocks in float32, [blocks, values], of bytes whose number is that of whole blocks."""
    parts = split_blocks(stored, kind)
    halves, numbers = parts.halves.float(), parts.numbers.float() - parts.offset
    if parts.scales is None:
        values = numbers * halves[:, :1]
        return values if halves.shape[1] == 1 else values + halves[:, 1:]
    values = numbers.view(*parts.scales.shape, -1) * (parts.scales * halves[:, :1]).unsqueeze(-1)
    if parts.minimums is not None:
        values -= (parts.minimums * halves[:, 1:]).unsqueeze(-1)
    return values.flatten(1)


@dataclass(frozen=True)
class BlockParts:
    """Blocks whose numbers and scales are apart."""

    numbers: Tensor
    """uint8, [blocks, values]."""
    offset: int
    """The number that is subtracted from each value."""
    halves: Tensor
    """float16, [blocks, 1 or 2]: the scale, and what there is of a minimum."""
    scales: Tensor | None = None
    """8 bits, [blocks, groups]: by which the scale is multiplied."""
    minimums: Tensor | None = None
    """uint8, [blocks, groups]."""


def split_blocks(stored: Tensor, kind: str) -> BlockParts:
    """Return the parts of blocks, of bytes whose number is that of whole blocks."""
    blocks = stored.reshape(-1, BLOCKS[kind][1])
    match kind:
        case "Q8_0":
            return BlockParts(blocks[:, 2:] ^ 0x80, 128, _read_halves(blocks, 0))
        case "Q4_K" | "Q5_K":
            return _split_with_minimums(blocks)
        case "Q6_K":
            return _split_q6_k(blocks)
        case _:
            return _split_small(blocks, kind)


def _split_small(blocks: Tensor, kind: str) -> BlockParts:
    """Q4_0 to Q5_1: a scale, a minimum (_1) or half the range (_0), fifth bits (Q5), and 16 bytes of two numbers."""
    numbers = torch.cat([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], dim=1)
    if kind.startswith("Q5"):
        bits = blocks[:, -20:-16, None] >> torch.arange(8, dtype=torch.uint8) & 1
        numbers |= bits.flatten(1) << 4
    if kind.endswith("_1"):
        return BlockParts(numbers, 0, _read_halves(blocks, 0, 2))
    return BlockParts(numbers, 16 if kind.startswith("Q5") else 8, _read_halves(blocks, 0))


def _split_with_minimums(blocks: Tensor) -> BlockParts:
    """Q4_K and Q5_K: for 8 groups of 32 a scale and a minimum of 6 bits each in 12 bytes; fifth bits; 128 bytes."""
    packed = blocks[:, 4:16]
    upper = packed[:, :8] >> 6 << 4
    scales = torch.cat([packed[:, :4] & 63, packed[:, 8:] & 15 | upper[:, :4]], dim=1)
    minimums = torch.cat([packed[:, 4:8] & 63, packed[:, 8:] >> 4 | upper[:, 4:]], dim=1)
    pairs = blocks[:, -128:].view(-1, 4, 1, 32)
    numbers = torch.cat([pairs & 15, pairs >> 4], dim=2).view(-1, 8, 32)
    if blocks.shape[1] > 144:
        numbers |= (blocks[:, 16:48].view(-1, 1, 32) >> torch.arange(8, dtype=torch.uint8)[:, None] & 1) << 4
    return BlockParts(numbers.flatten(1), 0, _read_halves(blocks, 0, 2), scales, minimums)


def _split_q6_k(blocks: Tensor) -> BlockParts:
    """Q6_K: two halves of 64 bytes with the lower 4 bits, 32 bytes with the upper 2; 16 scales of 8 bits; the scale."""
    lower = blocks[:, :128].view(-1, 2, 64)
    upper = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    numbers = torch.cat([lower & 15, lower >> 4], dim=2) | upper.flatten(2) << 4
    return BlockParts(numbers.flatten(1), 32, _read_halves(blocks, 208), blocks[:, 192:208].view(torch.int8))


def _read_halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """Return the float16 from a place of each block on: [blocks, count]."""
    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16)
