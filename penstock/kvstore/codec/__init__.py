"""Codecs: how a payload is written below the pool.

A tier has one object of `Codecs`, which writes one way and reads all that its setting allows; the header says which it
was.
"""

from penstock.config.settings import CodecChoice
from penstock.kvstore.block import RAW
from penstock.kvstore.codec.choice import Choice
from penstock.kvstore.codec.contract import INT8, LOSSLESS, Codec, Element, PayloadShape
from penstock.kvstore.codec.int8 import Int8
from penstock.kvstore.codec.lossless import Lossless

__all__ = ["INT8", "LOSSLESS", "Codec", "Codecs", "Element", "PayloadShape", "codec_for"]


class Codecs:
    """What one tier writes with, and all it reads. Any thread may call it."""

    def __init__(self, readers: dict[int, Codec], writer: Codec | Choice | None) -> None:
        self._readers, self._writer = readers, writer

    def encode(self, payload: memoryview) -> tuple[int, memoryview]:
        """What to store for the payload, and the number of the codec that reads it (`RAW`: it is the payload)."""
        return (RAW, payload) if self._writer is None else self._writer.encode(payload)

    def knows(self, number: int) -> bool:
        """Whether contents of that number, which is not `RAW`, can be read."""
        return number in self._readers

    def decode_into(self, number: int, content: memoryview, into: memoryview) -> bool:
        """Write the payload to `into`, which has its length; False if that cannot be read."""
        codec = self._readers.get(number)
        return codec is not None and codec.decode_into(content, into)

    def moved(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went to or came from where the tier keeps its blocks."""
        if isinstance(self._writer, Choice):
            self._writer.moved(num_bytes, seconds)


def codec_for(choice: CodecChoice, shape: PayloadShape) -> Codecs:
    """The codecs of a tier for payloads of that shape.

    8-bit blocks are read only where they are written: without that setting a model's blocks are exact.
    """
    lossless = Lossless(shape.element)
    if choice == "int8":
        int8 = Int8(shape)
        return Codecs({LOSSLESS: lossless, INT8: int8}, int8)
    writers = {"raw": None, "lossless": lossless, "auto": Choice(lossless)}
    return Codecs({LOSSLESS: lossless}, writers[choice])
