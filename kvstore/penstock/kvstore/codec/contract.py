"""The contract of a codec, and the types of the numbers that it is given."""

from typing import Literal, Protocol

Element = Literal["float32", "bfloat16", "float16", "int8"]
ELEMENT_BYTES: dict[Element, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}

LOSSLESS = 1
"""A codec's number in headers, beside `RAW`. 2 was a lossy codec: such a block is a miss."""


class Codec(Protocol):
    """One way to encode a payload."""

    name: str

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Return the number of the codec and the content to store: `RAW` and the payload, if it cannot be encoded."""

    def decode_payload(self, content: memoryview, into: memoryview) -> bool:
        """Decode a content to `into`, which has the payload's length.

        Return False, with anything in `into`, if `encode_payload` did not make the content; never raise for that.
        """
