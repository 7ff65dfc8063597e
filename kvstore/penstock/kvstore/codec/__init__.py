"""Codecs: how payloads are encoded in the tiers.

A tier has one `TierCodecs`. A block's header has the number of its codec.
"""

from penstock.kvstore.codec.choice import AdaptiveCodec
from penstock.kvstore.codec.contract import LOSSLESS, Codec, Element
from penstock.kvstore.codec.lossless import LosslessCodec

__all__ = ["LOSSLESS", "Codec", "Element", "TierCodecs", "make_codecs"]


class TierCodecs:
    """The codecs of one tier: one that writes, and all that read. Any thread may call it."""

    def __init__(self, readers: dict[int, Codec], writer: Codec | AdaptiveCodec) -> None:
        self._readers, self._writer = readers, writer

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Return the number of a codec, and the content to store (`RAW`: the payload itself)."""
        return self._writer.encode_payload(payload)

    def has_decoder(self, number: int) -> bool:
        """Return whether contents of that codec, other than `RAW`, can be read."""
        return number in self._readers

    def decode_payload(self, number: int, content: memoryview, into: memoryview) -> bool:
        """Decode a content to `into`, which has the payload's length. Return False if it cannot be decoded."""
        codec = self._readers.get(number)
        return codec is not None and codec.decode_payload(content, into)

    def record_transfer(self, num_bytes: int, seconds: float) -> None:
        """Record how long a transfer to or from the tier's storage took."""
        if isinstance(self._writer, AdaptiveCodec):
            self._writer.record_transfer(num_bytes, seconds)


def make_codecs(element: Element) -> TierCodecs:
    """Return the codecs of a tier for payloads of such numbers: blocks are compressed where that is faster."""
    lossless = LosslessCodec(element)
    return TierCodecs({LOSSLESS: lossless}, AdaptiveCodec(lossless))
