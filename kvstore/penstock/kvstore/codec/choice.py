"""Compress a block or store it raw: decided by measured times, as a tier's storage may be near or far."""

import threading
import time

from penstock.kvstore.block import RAW
from penstock.kvstore.codec.contract import Codec
from penstock.running_mean import RunningMean

NUM_FIRST_PROBES = 4
"""The first blocks are all encoded, to measure the codec."""
PROBE_INTERVAL_BLOCKS = 256
"""After them, one block in so many is encoded to measure the codec."""
MIN_SAMPLE_BYTES = 64 * 2**10
"""Shorter transfers are not measured, as they show latency rather than bandwidth."""
DECAY = 0.9
"""Weight that earlier measurements keep at each new one."""


class AdaptiveCodec:
    """Compresses a block if the transfer time saved, there and back, exceeds the time to encode and decode it.

    Nothing is compressed until transfers were measured.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lock = threading.Lock()
        self._link_s_per_byte, self._encode_s_per_byte = RunningMean(), RunningMean()
        self._decode_s_per_byte, self._content_bytes_per_byte = RunningMean(), RunningMean()
        self._num_blocks = 0

    def record_transfer(self, num_bytes: int, seconds: float) -> None:
        """Record the time of a transfer in either direction."""
        if num_bytes >= MIN_SAMPLE_BYTES:
            with self._lock:
                self._link_s_per_byte.add(seconds, num_bytes, kept=DECAY)

    @property
    def is_worthwhile(self) -> bool:
        """Whether a compressed block takes less time to write and read."""
        with self._lock:
            link_s, content_bytes = self._link_s_per_byte.value, self._content_bytes_per_byte.value
            if link_s is None or content_bytes is None:
                return False
            spared_s = 2 * (1 - content_bytes) * link_s
            return spared_s > (self._encode_s_per_byte.value or 0.0) + (self._decode_s_per_byte.value or 0.0)

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Return the number of a codec, and the content to store."""
        with self._lock:
            is_probe = self._num_blocks < NUM_FIRST_PROBES or self._num_blocks % PROBE_INTERVAL_BLOCKS == 0
            self._num_blocks += 1
        if is_probe:
            return self._probe_codec(payload)
        return self._codec.encode_payload(payload) if self.is_worthwhile else (RAW, payload)

    def _probe_codec(self, payload: memoryview) -> tuple[int, memoryview]:
        started_s = time.perf_counter()
        number, content = self._codec.encode_payload(payload)
        encoded_s = time.perf_counter()
        if number != RAW:
            self._codec.decode_payload(content, memoryview(bytearray(len(payload))))
        decoded_s = time.perf_counter()
        with self._lock:
            self._content_bytes_per_byte.add(len(content), len(payload), kept=DECAY)
            self._encode_s_per_byte.add(encoded_s - started_s, len(payload), kept=DECAY)
            self._decode_s_per_byte.add(decoded_s - encoded_s, len(payload), kept=DECAY)
        return (number, content) if self.is_worthwhile else (RAW, payload)
