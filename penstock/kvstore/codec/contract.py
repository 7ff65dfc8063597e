"""What a codec is, and what it may know of the bytes it is given."""

from dataclasses import dataclass
from typing import Literal, Protocol

Element = Literal["float32", "bfloat16", "float16"]
ELEMENT_BYTES: dict[Element, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

LOSSLESS, INT8 = 1, 2
"""Numbers in headers, beside `RAW`."""


@dataclass(frozen=True)
class PayloadShape:
    """What the numbers of a payload are, and the rows they come in: one row is what one head caches of one token."""

    element: Element
    rows: tuple[tuple[int, int], ...]
    """(Number of rows, numbers in a row) of each K and V, in the order of the payload."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of a payload."""
        return sum(count * size for count, size in self.rows) * ELEMENT_BYTES[self.element]


class Codec(Protocol):
    """One way to write a payload."""

    name: str

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """What to store for the payload, and the number of the codec that reads it: `RAW`, and the payload itself, if
        it cannot be written this way.
        """

    def decode_payload(self, content: memoryview, into: memoryview) -> bool:
        """Write the payload to `into`, which has its length; False, and anything in it, if `content` is none that
        `encode` made. Never raises for that.
        """
