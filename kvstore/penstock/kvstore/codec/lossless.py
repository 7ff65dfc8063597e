"""The lossless codec: the bytes of all numbers grouped into planes by their position in the number, then zstd.

The high bytes of K and V (sign and exponent) have few values and compress to about a third; the low bytes hardly do.
The content is the stored length of each plane (u32), the planes, and the bytes of an incomplete number at the end. A
plane that zstd does not make shorter is stored as it is, which its length shows.
"""

import struct
import threading

import numpy as np
import zstandard

from penstock.kvstore.block import RAW
from penstock.kvstore.codec.contract import ELEMENT_BYTES, LOSSLESS, Element

ZSTD_LEVEL = 1
"""Higher levels are slower and do not make exponents shorter."""


class _PerThread(threading.local):
    """zstd contexts of one thread, as a context may be used by one thread at a time."""

    def __init__(self) -> None:
        self.encoder = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=False, write_content_size=True)
        self.decoder = zstandard.ZstdDecompressor()


class LosslessCodec:
    """Byte planes and zstd for numbers of one type."""

    name = "lossless"

    def __init__(self, element: Element) -> None:
        self._planes = ELEMENT_BYTES[element]
        self._lengths = struct.Struct(f"<{self._planes}I")
        self._zstd = _PerThread()

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Implement `Codec.encode_payload`. A payload that would not get shorter stays raw."""
        taken = np.frombuffer(payload, np.uint8)
        num_whole = taken.size - taken.size % self._planes
        planes = np.ascontiguousarray(taken[:num_whole].reshape(-1, self._planes).T)
        parts = [self._compress_plane(plane.data) for plane in planes]
        lengths = self._lengths.pack(*(len(part) for part in parts))
        content = b"".join((lengths, *parts, taken[num_whole:].data))
        return (LOSSLESS, memoryview(content)) if len(content) < taken.size else (RAW, payload)

    def decode_payload(self, content: memoryview, into: memoryview) -> bool:
        """Implement `Codec.decode_payload`."""
        if len(content) < self._lengths.size:
            return False
        lengths = self._lengths.unpack(content[: self._lengths.size])
        num_rows, num_left = divmod(len(into), self._planes)
        if sum(lengths) + self._lengths.size + num_left != len(content):
            return False
        numbers = np.frombuffer(into, np.uint8)[: num_rows * self._planes].reshape(num_rows, self._planes)
        start = self._lengths.size
        for place, length in enumerate(lengths):
            plane = self._decompress_plane(content[start : start + length], num_rows)
            if plane is None:
                return False
            numbers[:, place] = np.frombuffer(plane, np.uint8)
            start += length
        into[num_rows * self._planes :] = content[start:]
        return True

    def _compress_plane(self, plane: memoryview) -> memoryview | bytes:
        packed: bytes = self._zstd.encoder.compress(plane)
        return packed if len(packed) < len(plane) else plane

    def _decompress_plane(self, part: memoryview, size: int) -> memoryview | bytes | None:
        """Return the `size` bytes of a plane; None if the stored part is not such a plane."""
        if len(part) == size:
            return part
        try:
            if zstandard.frame_content_size(part) != size:
                return None
            plane: bytes = self._zstd.decoder.decompress(part, max_output_size=size, allow_extra_data=False)
        except (zstandard.ZstdError, MemoryError):
            return None
        return plane if len(plane) == size else None
