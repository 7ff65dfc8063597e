"""Load or compute again: decided by the measured time of both, so that a hit is never slower than a miss."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EWMA_WEIGHT = 0.3
"""Weight of the newest measurement in a running mean."""
NUM_PROBE_BLOCKS = 2
"""Blocks that are read from a tier whose speed is not known yet, or that is probed again."""
PROBE_INTERVAL_S = 10.0
"""A tier that seems too slow is probed again at most this often."""


@dataclass
class TierSpeed:
    """Measured time of reads from one tier."""

    clock: Callable[[], float] = time.monotonic
    latency_s: float = 0.0
    """Time of a lookup of keys: what a batch costs before its first byte."""
    block_s: float | None = None
    """Time of each block read, beyond the latency."""
    probed_at_s: float = -math.inf
    """The time of the last probe of a tier that seemed too slow, in seconds."""
    _is_probing: bool = False
    _last_lookup_s: float = math.inf

    def record_lookup(self, seconds: float) -> None:
        """Record the time of a lookup. The minimum of the last two filters out a single stall."""
        self.latency_s, self._last_lookup_s = min(seconds, self._last_lookup_s), seconds

    def record_read(self, num_blocks: int, seconds: float) -> None:
        """Record the time of a read. A probe replaces the mean, which one stall may have spoiled."""
        block_s = max(0.0, seconds - self.latency_s) / num_blocks
        if self.block_s is None or self._is_probing:
            self.block_s = block_s
        else:
            self.block_s += EWMA_WEIGHT * (block_s - self.block_s)
        if self._is_probing:
            self._is_probing, self.probed_at_s = False, self.clock()

    def begin_probe(self) -> bool:
        """Return whether a tier that seems too slow is to be probed now, and if so, take the next read as the probe.

        The first probe comes at once, so one stall costs little; later ones wait for `PROBE_INTERVAL_S`.
        """
        self._is_probing = self.clock() >= self.probed_at_s + PROBE_INTERVAL_S
        return self._is_probing


class CostModel:
    """Compares the speed of a store's tiers with the engine's.

    `tokens_per_s` returns how fast the engine computes prompts. While that is None, everything found is read.
    """

    def __init__(
        self,
        block_size: int,
        tokens_per_s: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokens_per_s = tokens_per_s
        self._block_size, self._clock = block_size, clock
        self._speeds: dict[str, TierSpeed] = {}
        self._lock = threading.Lock()

    def tier_speed(self, tier: str) -> TierSpeed:
        """Return the measured speed of a tier."""
        with self._lock:
            return self._speeds.setdefault(tier, TierSpeed(self._clock))

    def count_blocks_to_read(self, tier: str, num_blocks: int) -> int:
        """Return how many of `num_blocks` consecutive blocks to read before asking again; 0: compute them."""
        speed, tokens_per_s = self.tier_speed(tier), self.tokens_per_s()
        if speed.block_s is None:
            return min(NUM_PROBE_BLOCKS, num_blocks)
        if tokens_per_s is None:
            return num_blocks
        compute_s = num_blocks * self._block_size / tokens_per_s
        if speed.latency_s + num_blocks * speed.block_s <= compute_s:
            return num_blocks
        return min(NUM_PROBE_BLOCKS, num_blocks) if speed.begin_probe() else 0
