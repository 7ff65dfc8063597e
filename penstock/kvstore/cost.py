"""Fetch or compute again: decided by what both were measured to take, so that a hit is never slower than a miss."""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EWMA_WEIGHT = 0.3
"""Weight of the latest measurement in a running mean."""
NUM_PROBE_BLOCKS = 2
"""Blocks that are read of a tier whose speed is not known yet, or seems too low."""
PROBE_INTERVAL_S = 10.0
"""How often a tier that seems too slow is measured again, at most."""


@dataclass
class TierSpeed:
    """What reading from one tier takes."""

    clock: Callable[[], float] = time.monotonic
    latency_s: float = 0.0
    """Of a question for keys, the quicker of the last two: what a batch costs before its first byte."""
    block_s: float | None = None
    """For each block read, beyond that."""
    probed_at_s: float = -math.inf
    """When a tier that seemed too slow was last measured again."""
    _is_probing: bool = False
    _last_lookup_s: float = math.inf

    def record_lookup(self, seconds: float) -> None:
        """A question took this long. What one that was held up lost shows in the reads after it, if they are too."""
        self.latency_s, self._last_lookup_s = min(seconds, self._last_lookup_s), seconds

    def record_read(self, num_blocks: int, seconds: float) -> None:
        """So many blocks took this long. A look again replaces what was known: that may have been a hiccup."""
        block_s = max(0.0, seconds - self.latency_s) / num_blocks
        if self.block_s is None or self._is_probing:
            self.block_s = block_s
        else:
            self.block_s += EWMA_WEIGHT * (block_s - self.block_s)
        if self._is_probing:
            self._is_probing, self.probed_at_s = False, self.clock()

    def begin_probe(self) -> bool:
        """Whether a tier that seems too slow is to be measured again now.

        At once, unless that was done a short while ago: one hiccup costs a look, and what is slow stays off.
        """
        self._is_probing = self.clock() >= self.probed_at_s + PROBE_INTERVAL_S
        return self._is_probing


class CostModel:
    """The speeds of a store's tiers against the engine's.

    `tokens_per_s` says how fast the engine computes prompts, None while that is not known: then everything is fetched.
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
        """The measured speed of a tier."""
        with self._lock:
            return self._speeds.setdefault(tier, TierSpeed(self._clock))

    def count_blocks_to_read(self, tier: str, num_blocks: int) -> int:
        """How many of `num_blocks` consecutive blocks to read from a tier before asking again; 0: compute them."""
        speed, tokens_per_s = self.tier_speed(tier), self.tokens_per_s()
        if speed.block_s is None:
            return min(NUM_PROBE_BLOCKS, num_blocks)
        if tokens_per_s is None:
            return num_blocks
        compute_s = num_blocks * self._block_size / tokens_per_s
        if speed.latency_s + num_blocks * speed.block_s <= compute_s:
            return num_blocks
        return min(NUM_PROBE_BLOCKS, num_blocks) if speed.begin_probe() else 0
