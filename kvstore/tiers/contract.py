"""What a tier is: batches of reads, batches of writes, and its own counters. One test suite holds all tiers to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass
class Counters:
    """What one tier saw since it was opened."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Of the misses: something was there, but not the whole block asked for."""
    errors: int = 0
    """Batches that the tier could not be asked, or did not take."""
    bytes_read: int = 0
    bytes_written: int = 0


class Tier(Protocol):
    """A place for stored blocks. It is a cache: it may forget anything at any time, and never raises for its server."""

    name: str
    counters: Counters

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The stored bytes of each key, in order; None where there is nothing."""

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """Store (key, bytes) pairs; the newest write of a key wins."""

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are here; their time starts anew."""
