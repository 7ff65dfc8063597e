"""The contract of a codec, and the shape of the payloads that it is given."""

from dataclasses import dataclass
from typing import Literal, Protocol

Element = Literal["float32", "bfloat16", "float16", "int8"]
ELEMENT_BYTES: dict[Element, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

LOSSLESS, INT8 = 1, 2
"""Codec numbers in headers, beside `RAW`."""


@dataclass(frozen=True)
class PayloadShape:
    """Type and rows of a payload's numbers. One row is what one head caches of one token."""

    element: Element
    rows: tuple[tuple[int, int], ...]
    """(Number of rows, numbers in a row) of each K and V, in the order of the payload."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of a payload."""
        return sum(count * size for count, size in self.rows) * ELEMENT_BYTES[self.element]


class Codec(Protocol):
    """One way to encode a payload."""

    name: str

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Return the number of the codec and the content to store: `RAW` and the payload, if it cannot be encoded."""

    def decode_payload(self, content: memoryview, into: memoryview) -> bool:
        """Decode a content to `into`, which has the payload's length.

        Return False, with anything in `into`, if `encode_payload` did not make the content; never raise for that.
        """
