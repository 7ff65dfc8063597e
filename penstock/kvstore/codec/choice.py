"""Raw or compressed: decided by what was measured, for a tier whose link may be a bus, a disk or a long wire."""

import threading
import time

from penstock.kvstore.block import RAW
from penstock.kvstore.codec.contract import Codec
from penstock.running_mean import RunningMean

NUM_FIRST_PROBES = 4
"""The first blocks are all tried with the codec."""
PROBE_INTERVAL_BLOCKS = 256
"""After them, one block in so many is tried."""
MIN_SAMPLE_BYTES = 64 * 2**10
"""Shorter transfers say more of the latency than of the link."""
DECAY = 0.9
"""What is left of what was measured before, with each new measurement."""


class AdaptiveCodec:
    """Says for each block whether it pays to compress it: what the link is spared, there and back, against the time to
    encode and to decode. Until the link has been seen at work nothing is compressed.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._link_s_per_byte, self._encode_s_per_byte = RunningMean(), RunningMean()
        self._decode_s_per_byte, self._content_bytes_per_byte = RunningMean(), RunningMean()
        self._num_blocks = 0

    def record_transfer(self, num_bytes: int, seconds: float) -> None:
        """So many bytes went over the link, one way or the other."""
        if num_bytes >= MIN_SAMPLE_BYTES:
            with self._lock:
                self._link_s_per_byte.add(seconds, num_bytes, kept=DECAY)

    @property
    def is_worthwhile(self) -> bool:
        """Whether a compressed block is written and read in less time."""
        with self._lock:
            link_s, content_bytes = self._link_s_per_byte.value, self._content_bytes_per_byte.value
            if link_s is None or content_bytes is None:
                return False
            spared_s = 2 * (1 - content_bytes) * link_s
            return spared_s > (self._encode_s_per_byte.value or 0.0) + (self._decode_s_per_byte.value or 0.0)

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
            self._content_bytes_per_byte.add(len(content), len(payload), kept=DECAY)
            self._encode_s_per_byte.add(encoded - begun, len(payload), kept=DECAY)
            self._decode_s_per_byte.add(decoded - encoded, len(payload), kept=DECAY)
        return (number, content) if self.is_worthwhile else (RAW, payload)
