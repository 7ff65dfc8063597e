"""Fetch or compute again: decided by what both were measured to take, so that a hit is never slower than a miss."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

SHARE_OF_NEWEST = 0.3
"""Weight of the latest measurement in a running mean."""
FIRST_LOOK = 2
"""Blocks that are read of a tier whose speed is not known yet, or was too low when it was last measured."""
LOOK_AGAIN_S = 10.0
"""How often a tier that was too slow is measured again."""


@dataclass
class Speed:
    """What reading from one tier takes."""

    latency_s: float = 0.0
    """Of a question for keys: what a batch costs before its first byte."""
    block_s: float | None = None
    """For each block read, beyond that."""
    measured_at: float = 0.0

    def asked(self, seconds: float) -> None:
        """A question took this long."""
        self.latency_s += SHARE_OF_NEWEST * (seconds - self.latency_s)

    def read(self, num_blocks: int, seconds: float) -> None:
        """So many blocks took this long."""
        block_s = max(0.0, seconds - self.latency_s) / num_blocks
        self.block_s = block_s if self.block_s is None else self.block_s + SHARE_OF_NEWEST * (block_s - self.block_s)
        self.measured_at = time.monotonic()


class CostModel:
    """The speeds of a store's tiers against the engine's.

    `tokens_per_s` says how fast the engine computes prompts, None while that is not known: then everything is fetched.
    """

    def __init__(self, block_size: int, tokens_per_s: Callable[[], float | None] = lambda: None) -> None:
        self.tokens_per_s = tokens_per_s
        self._block_size = block_size
        self._speeds: dict[str, Speed] = {}
        self._lock = threading.Lock()

    def speed(self, tier: str) -> Speed:
        """The measured speed of a tier."""
        with self._lock:
            return self._speeds.setdefault(tier, Speed())

    def worth(self, tier: str, num_blocks: int) -> int:
        """How many of `num_blocks` consecutive blocks to read from a tier before asking again; 0: compute them."""
        speed, tokens_per_s = self.speed(tier), self.tokens_per_s()
        if speed.block_s is None:
            return min(FIRST_LOOK, num_blocks)
        if tokens_per_s is None:
            return num_blocks
        compute_s = num_blocks * self._block_size / tokens_per_s
        if speed.latency_s + num_blocks * speed.block_s <= compute_s:
            return num_blocks
        return min(FIRST_LOOK, num_blocks) if time.monotonic() > speed.measured_at + LOOK_AGAIN_S else 0
