"""Codecs: how payloads are encoded in the tiers.

A tier has one `TierCodecs`, which writes with one codec and reads with all that its setting allows. A block's header
has the number of its codec.
"""

from penstock.config.settings import CodecChoice
from penstock.errors import KVStoreError
from penstock.kvstore.block import RAW
from penstock.kvstore.codec.choice import AdaptiveCodec
from penstock.kvstore.codec.contract import INT8, LOSSLESS, Codec, Element, PayloadShape
from penstock.kvstore.codec.int8 import Int8Codec
from penstock.kvstore.codec.lossless import LosslessCodec

__all__ = ["INT8", "LOSSLESS", "Codec", "Codecs", "Element", "PayloadShape", "codec_for"]


class TierCodecs:
    """The codecs of one tier: one that writes, and all that read. Any thread may call it."""

    def __init__(self, readers: dict[int, Codec], writer: Codec | AdaptiveCodec | None) -> None:
        self._readers, self._writer = readers, writer

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Return the number of a codec, and the content to store (`RAW`: the payload itself)."""
        return (RAW, payload) if self._writer is None else self._writer.encode_payload(payload)

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


def make_codecs(choice: CodecChoice, shape: PayloadShape) -> TierCodecs:
    """Return the codecs of a tier for payloads of that shape.

    8-bit blocks are read only with the setting that writes them: without it a model's blocks are exact. Raises
    `KVStoreError` where they have 8 bits already.
    """
    lossless = LosslessCodec(shape.element)
    if choice == "int8" and shape.element == "int8":
        raise KVStoreError("blocks are int8 already (PENSTOCK_ENGINE_KV_DTYPE): set PENSTOCK_KV_STORE_REDIS_CODEC=auto")
    if choice == "int8":
        int8 = Int8Codec(shape)
        return TierCodecs({LOSSLESS: lossless, INT8: int8}, int8)
    writers = {"raw": None, "lossless": lossless, "auto": AdaptiveCodec(lossless)}
    return TierCodecs({LOSSLESS: lossless}, writers[choice])
