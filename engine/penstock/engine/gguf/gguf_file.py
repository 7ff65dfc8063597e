"""The header of a GGUF file: what it says of the model, and where its tensors are.

    "GGUF", version, numbers of tensors and keys ─▶ keys with values ─▶ tensors: name, shape, type, offset ─▶ data

A file comes from anywhere, so nothing in it is believed: each length is compared with what is left of the file before
anything is read, and the number of values is bounded. Nothing here needs numpy, torch or transformers.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, build_damage_error

FLOAT_KINDS = ("F32", "F16", "BF16")
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""By the name of a type that can be read: how many values a block of it has, and how many bytes."""
_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""By its number in the file: the name of a tensor's type."""
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""By its number in the file: the type of a key's value."""
_UINT32, _STRING, _ARRAY, _UINT64 = _SCALARS[4], 8, 9, _SCALARS[10]
_MAX_HEADER_BYTES = 2**28
_MAX_VALUES = 2**23  # the largest vocabularies have some 300,000 tokens, and as many merges


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is in the file, and in what form."""

    kind: str
    """A key of `BLOCKS`."""
    shape: list[int]
    """The slowest dimension first, as torch has it."""
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    metadata: dict[str, Any]
    """Values by key: numbers, strings, and lists of either."""
    tensors: dict[str, GgufTensor]
    """By the names that the file has, in the order of their offsets."""
    content: bytes
    """The bytes of the header itself."""

    def read_value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the value of a key. Raises `ModelLoadError` if it is of another kind, or is missing without a default.

        A whole number is a float, too; True is no number.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise build_damage_error(f"the GGUF file has no {key}")
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise build_damage_error(f"the GGUF file has {key} {str(value)[:60]!r}, which is no {kind.__name__}")
        return value


def read_gguf_header(path: Path) -> GgufHeader:
    """Return a file's header. Raises `ModelLoadError` if it is damaged, or has a form that cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise build_damage_error(f"{path.name} is damaged or cut off: it has {size} bytes")
            with mmap.mmap(file.fileno(), min(size, _MAX_HEADER_BYTES), access=mmap.ACCESS_READ) as content:
                return _HeaderReader(content, path.name, size).read_header()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    """Reads a header from its start."""

    def __init__(self, content: mmap.mmap, name: str, file_bytes: int) -> None:
        self._content, self._name, self._file_bytes = content, name, file_bytes
        self._place = self._num_values = 0

    def read_header(self) -> GgufHeader:
        """Return the header. Raises `ModelLoadError`."""
        if self._take(4) != b"GGUF":
            raise self._damage("it does not begin with GGUF")
        if (version := self._read_number(_UINT32)) not in (2, 3):
            raise ModelLoadError(f"{self._name} has version {version} of GGUF, little-endian 2 and 3 are read")
        num_tensors, num_keys = self._read_number(_UINT64), self._read_number(_UINT64)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._read_string()
            if key in metadata:
                raise self._damage(f"it has {key[:60]!r} twice")
            metadata[key] = self._read_value(self._read_number(_UINT32))
        stored = [self._read_tensor() for _ in range(self._count(num_tensors))]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment % 8 or alignment > 2**20:
            raise self._damage(f"its alignment is {str(alignment)[:60]!r}")
        tensors: dict[str, GgufTensor] = {}
        end, before = 0, ""
        for name, kind, shape, offset in sorted(stored, key=lambda one: one[3]):
            if name in tensors:
                raise self._damage(f"it has the tensor {name[:60]!r} twice")
            tensors[name] = tensor = self._check_tensor(name, kind, shape, offset, alignment)
            if tensor.offset < end:
                raise self._damage(f"{name[:60]} begins within {before[:60]}")
            end, before = tensor.offset + tensor.num_bytes, name
        return GgufHeader(metadata, tensors, self._content[: self._place])

    def _check_tensor(self, name: str, kind: str, shape: list[int], offset: int, alignment: int) -> GgufTensor:
        """Return the tensor, whose data begin `offset` bytes behind the header. Raises `ModelLoadError`."""
        if kind not in BLOCKS:
            raise ModelLoadError(
                f"{name[:60]} in {self._name} is stored as {kind}, which cannot be unpacked: use a file of the model "
                f"whose tensors are {', '.join(BLOCKS)}, such as Q4_K_M or Q8_0, or the model in safetensors"
            )
        block, block_bytes = BLOCKS[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self._damage(f"{name[:60]} is {shape} in blocks of {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        first = -(-self._place // alignment) * alignment + offset
        if offset % alignment or first + num_bytes > self._file_bytes:
            raise self._damage(f"{name[:60]} is not within its {self._file_bytes:,} bytes")
        return GgufTensor(kind, shape, first, num_bytes)

    def _read_tensor(self) -> tuple[str, str, list[int], int]:
        """Return a tensor's name, type, shape and offset."""
        name = self._read_string()
        num_dimensions = self._read_number(_UINT32)
        if not 1 <= num_dimensions <= 4:
            raise self._damage(f"{name[:60]} has {num_dimensions} dimensions")
        shape = [self._read_number(_UINT64) for _ in range(num_dimensions)][::-1]
        number, offset = self._read_number(_UINT32), self._read_number(_UINT64)
        return name, _KINDS.get(number, f"type {number}"), shape, offset

    def _read_value(self, kind: int) -> Any:
        """Return a key's value of a type."""
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            item_kind, length = self._read_number(_UINT32), self._count(self._read_number(_UINT64))
            if item_kind == _ARRAY:
                raise self._damage("it has a list of lists")
            return [self._read_value(item_kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise self._damage(f"it has a value of type {kind}")
        return self._read_number(_SCALARS[kind])

    def _read_string(self) -> str:
        content = self._take(self._read_number(_UINT64))
        self._count(1)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._damage(f"it has text that is not UTF-8 ({error})") from None

    def _read_number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, length: int) -> bytes:
        self._place += length
        if self._place > len(self._content):
            raise self._damage("its header ends before it is complete")
        return self._content[self._place - length : self._place]

    def _count(self, number: int) -> int:
        """Return the number of values that follow. Raises `ModelLoadError` if a header never has so many."""
        self._num_values += number
        if self._num_values > _MAX_VALUES:
            raise self._damage(f"its header has {self._num_values:,} values")
        return number

    def _damage(self, what: str) -> ModelLoadError:
        return build_damage_error(f"{self._name} is damaged or cut off: {what}")
