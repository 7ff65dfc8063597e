"""Raw or compressed: decided by what was measured, for a tier whose link may be a bus, a disk or a long wire."""

import threading
import time
from dataclasses import dataclass

from penstock.kvstore.block import RAW
from penstock.kvstore.codec.contract import Codec

NUM_FIRST_PROBES = 4
"""The first blocks are all tried with the codec."""
PROBE_INTERVAL_BLOCKS = 256
"""After them, one block in so many is tried."""
MIN_SAMPLE_BYTES = 64 * 2**10
"""Shorter transfers say more of the latency than of the link."""
DECAY = 0.9
"""What is left of what was measured before, with each new measurement."""


@dataclass
class DecayingRate:
    """Bytes in a second, of late."""

    num_bytes: float = 0.0
    seconds: float = 0.0

    def add_sample(self, num_bytes: float, seconds: float) -> None:
        """One more measurement."""
        self.num_bytes = DECAY * self.num_bytes + num_bytes
        self.seconds = DECAY * self.seconds + seconds

    @property
    def seconds_per_byte(self) -> float:
        """0 until something was measured."""
        return self.seconds / self.num_bytes if self.num_bytes else 0.0


class AdaptiveCodec:
    """Says for each block whether it pays to compress it: what the link is spared, there and back, against the time to
    encode and to decode. Until the link has been seen at work nothing is compressed.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._link, self._encoding, self._decoding = DecayingRate(), DecayingRate(), DecayingRate()
        self._kept = DecayingRate()  # "seconds" are the bytes of content: what a byte of payload becomes
        self._num_blocks = 0

    def record_transfer(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went over the link, one way or the other."""
        if num_bytes >= MIN_SAMPLE_BYTES:
            with self._lock:
                self._link.add_sample(num_bytes, seconds)

    @property
    def is_worthwhile(self) -> bool:
        """Whether a compressed block is written and read in less time."""
        with self._lock:
            if not (self._link.num_bytes and self._kept.num_bytes):
                return False
            spared = 2 * (1 - self._kept.seconds_per_byte) * self._link.seconds_per_byte
            return spared > self._encoding.seconds_per_byte + self._decoding.seconds_per_byte

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """What to store for the payload, and the number of the codec that reads it."""
        with self._lock:
            is_probe = self._num_blocks < NUM_FIRST_PROBES or self._num_blocks % PROBE_INTERVAL_BLOCKS == 0
            self._num_blocks += 1
        if is_probe:
            return self._probe_codec(payload)
        return self._codec.encode_payload(payload) if self.is_worthwhile else (RAW, payload)

    def _probe_codec(self, payload: memoryview) -> tuple[int, memoryview]:
        begun = time.perf_counter()
        number, content = self._codec.encode_payload(payload)
        encoded = time.perf_counter()
        if number != RAW:
            self._codec.decode_payload(content, memoryview(bytearray(len(payload))))
        decoded = time.perf_counter()
        with self._lock:
            self._kept.add_sample(len(payload), len(content))
            self._encoding.add_sample(len(payload), encoded - begun)
            self._decoding.add_sample(len(payload), decoded - encoded)
        return (number, content) if self.is_worthwhile else (RAW, payload)
