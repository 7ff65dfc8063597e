"""Raw or compressed: decided by what was measured, for a tier whose link may be a bus, a disk or a long wire."""

import threading
import time
from dataclasses import dataclass

from penstock.kvstore.block import RAW
from penstock.kvstore.codec.contract import Codec

FIRST, EVERY = 4, 256
"""So many blocks are tried at first, and then one of so many."""
SAMPLE_BYTES = 64 * 2**10
"""Shorter transfers say more of the latency than of the link."""
FADE = 0.9
"""What is left of what was measured before, with each new measurement."""


@dataclass
class Rate:
    """Bytes in a second, of late."""

    num_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, num_bytes: float, seconds: float) -> None:
        """One more measurement."""
        self.num_bytes = FADE * self.num_bytes + num_bytes
        self.seconds = FADE * self.seconds + seconds

    @property
    def seconds_a_byte(self) -> float:
        """0 until something was measured."""
        return self.seconds / self.num_bytes if self.num_bytes else 0.0


class Choice:
    """Says for each block whether it pays to compress it: what the link is spared, there and back, against the time to
    encode and to decode. Until the link has been seen at work nothing is compressed.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._link, self._encoding, self._decoding = Rate(), Rate(), Rate()
        self._kept = Rate()  # "seconds" are the bytes of content: what a byte of payload becomes
        self._num_blocks = 0

    def moved(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went over the link, one way or the other."""
        if num_bytes >= SAMPLE_BYTES:
            with self._lock:
                self._link.add(num_bytes, seconds)

    @property
    def pays(self) -> bool:
        """Whether a compressed block is written and read in less time."""
        with self._lock:
            if not (self._link.num_bytes and self._kept.num_bytes):
                return False
            spared = 2 * (1 - self._kept.seconds_a_byte) * self._link.seconds_a_byte
            return spared > self._encoding.seconds_a_byte + self._decoding.seconds_a_byte

    def encode(self, payload: memoryview) -> tuple[int, memoryview]:
        """What to store for the payload, and the number of the codec that reads it."""
        with self._lock:
            is_probe = self._num_blocks < FIRST or self._num_blocks % EVERY == 0
            self._num_blocks += 1
        if is_probe:
            return self._probe(payload)
        return self._codec.encode(payload) if self.pays else (RAW, payload)

    def _probe(self, payload: memoryview) -> tuple[int, memoryview]:
        begun = time.perf_counter()
        number, content = self._codec.encode(payload)
        encoded = time.perf_counter()
        if number != RAW:
            self._codec.decode_into(content, memoryview(bytearray(len(payload))))
        decoded = time.perf_counter()
        with self._lock:
            self._kept.add(len(payload), len(content))
            self._encoding.add(len(payload), encoded - begun)
            self._decoding.add(len(payload), decoded - encoded)
        return (number, content) if self.pays else (RAW, payload)
