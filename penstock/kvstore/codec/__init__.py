"""Codecs: how a payload is written below the pool.

A tier has one object of `Codecs`, which writes one way and reads all that its setting allows; the header says which it
was.
"""

from penstock.config.settings import CodecChoice
from penstock.kvstore.block import RAW
from penstock.kvstore.codec.choice import AdaptiveCodec
from penstock.kvstore.codec.contract import INT8, LOSSLESS, Codec, Element, PayloadShape
from penstock.kvstore.codec.int8 import Int8Codec
from penstock.kvstore.codec.lossless import LosslessCodec

__all__ = ["INT8", "LOSSLESS", "Codec", "Codecs", "Element", "PayloadShape", "codec_for"]


class TierCodecs:
    """What one tier writes with, and all it reads. Any thread may call it."""

    def __init__(self, readers: dict[int, Codec], writer: Codec | AdaptiveCodec | None) -> None:
        self._readers, self._writer = readers, writer

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """What to store for the payload, and the number of the codec that reads it (`RAW`: it is the payload)."""
        return (RAW, payload) if self._writer is None else self._writer.encode_payload(payload)

    def has_decoder(self, number: int) -> bool:
        """Whether contents of that number, which is not `RAW`, can be read."""
        return number in self._readers

    def decode_payload(self, number: int, content: memoryview, into: memoryview) -> bool:
        """Write the payload to `into`, which has its length; False if that cannot be read."""
        codec = self._readers.get(number)
        return codec is not None and codec.decode_payload(content, into)

    def record_transfer(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went to or came from where the tier keeps its blocks."""
        if isinstance(self._writer, AdaptiveCodec):
            self._writer.record_transfer(num_bytes, seconds)


def make_codecs(choice: CodecChoice, shape: PayloadShape) -> TierCodecs:
    """The codecs of a tier for payloads of that shape.

    8-bit blocks are read only where they are written: without that setting a model's blocks are exact.
    """
    lossless = LosslessCodec(shape.element)
    if choice == "int8":
        int8 = Int8Codec(shape)
        return TierCodecs({LOSSLESS: lossless, INT8: int8}, int8)
    writers = {"raw": None, "lossless": lossless, "auto": AdaptiveCodec(lossless)}
    return TierCodecs({LOSSLESS: lossless}, writers[choice])
