"""The lossy codec: each row as 8-bit integers and one scale (its largest magnitude becomes 127).

The content is the scales of all rows (float32), then the integers, in the payload's order. Tokens may change, so blocks
that were written this way count as another model's. A block with an infinity or a NaN is stored raw.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.kvstore.block import RAW
from penstock.kvstore.codec.contract import INT8, Element, PayloadShape

Floats = NDArray[np.float32]

_MAX_INT8 = 127
_MAX_FINITE: dict[Element, float] = {
    "float32": float(np.finfo(np.float32).max),
    "bfloat16": float(np.array(0x7F7F0000, np.uint32).view(np.float32)),
    "float16": float(np.finfo(np.float16).max),
}


class Int8Codec:
    """8 bits a number, symmetric, with one scale for each token and head."""

    name = "int8"

    def __init__(self, shape: PayloadShape) -> None:
        self._shape = shape
        self._num_rows = sum(count for count, _ in shape.rows)
        self._content_bytes = 4 * self._num_rows + sum(count * size for count, size in shape.rows)

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Implement `Codec.encode_payload`."""
        if len(payload) != self._shape.payload_bytes:
            return RAW, payload
        values = to_float32(payload, self._shape.element)
        if not np.isfinite(values).all():
            return RAW, payload
        content = bytearray(self._content_bytes)
        scales, integers = self._split_content(memoryview(content))
        row = start = 0
        for count, size in self._shape.rows:
            part = values[start : start + count * size].reshape(count, size)
            # Rows too small for a scale have scale 0 and become 0.
            scale = np.abs(part).max(axis=1, initial=0) / np.float32(_MAX_INT8)
            whole = np.rint(part / np.where(scale > 0, scale, np.float32(1))[:, None])
            integers[start : start + count * size] = np.clip(whole, -_MAX_INT8, _MAX_INT8).astype(np.int8).reshape(-1)
            scales[row : row + count] = scale
            row, start = row + count, start + count * size
        return INT8, memoryview(content)

    def decode_payload(self, content: memoryview, into: memoryview) -> bool:
        """Implement `Codec.decode_payload`."""
        if len(content) != self._content_bytes or len(into) != self._shape.payload_bytes:
            return False
        scales, integers = self._split_content(content)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            return False
        values = np.empty(integers.size, np.float32)
        row = start = 0
        for count, size in self._shape.rows:
            part = integers[start : start + count * size].reshape(count, size)
            with np.errstate(over="ignore"):
                values[start : start + count * size] = (part * scales[row : row + count, None]).reshape(-1)
            row, start = row + count, start + count * size
        largest = _MAX_FINITE[self._shape.element]  # rounding may exceed it
        _write_rounded(np.clip(values, -largest, largest), self._shape.element, into)
        return True

    def _split_content(self, content: memoryview) -> tuple[Floats, NDArray[np.int8]]:
        """Return views of the scales and the integers in a content."""
        end = 4 * self._num_rows
        return np.frombuffer(content[:end], "<f4"), np.frombuffer(content[end:], np.int8)


def to_float32(payload: memoryview, element: Element) -> Floats:
    """Return the payload's numbers as float32."""
    if element == "bfloat16":
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(payload, "<f4" if element == "float32" else "<f2").astype(np.float32, copy=False)


def _write_rounded(values: Floats, element: Element, into: memoryview) -> None:
    """Write finite numbers in the payload's type, rounded to nearest, ties to even."""
    if element == "bfloat16":
        bits = values.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        np.frombuffer(into, "<u2")[:] = rounded >> np.uint32(16)
    else:
        np.frombuffer(into, "<f4" if element == "float32" else "<f2")[:] = values
