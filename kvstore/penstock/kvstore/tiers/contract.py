"""The contract of a tier: batches of reads, batches of writes, leases, and its own counters.

One test suite holds all tiers to it. A tier is a cache, and its keys are block hashes. It may forget any block at any
time unless it is leased, those first that were not used for longest. A block with a retention counts as used at its
end, so it goes after all others, and where all have one the soonest to end goes: no write is refused for it. A failure
of its disk or server is a counted miss, and no method raises for it; only `open` raises, for settings that cannot work.
All methods may be called from several threads.

A tier checks what it reads: a block that is damaged, or not exactly the one asked for, is a miss, is counted as
damaged, and is removed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.kvstore.block import Block, ReadRequest


@dataclass
class TierCounters:
    """Counts of one tier since it was opened, in blocks and bytes."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Misses for which something was stored, but not the whole block asked for."""
    evictions: int = 0
    """Blocks that this process evicted."""
    refused: int = 0
    """Blocks not stored: leased blocks fill the budget, or the block is larger than the budget."""
    errors: int = 0
    """Calls that failed."""
    bytes_read: int = 0
    bytes_written: int = 0
    """Bytes of payload of hits, and of blocks that were stored."""


@dataclass(frozen=True)
class TierUsage:
    """The content of a tier now, stored by any process."""

    blocks: int
    bytes: int
    """Bytes that count against the budget."""
    budget: int
    leased: int
    """Blocks with at least one lease that has not run out."""
    retained: int
    """Blocks with a retention that has not ended."""


@dataclass(frozen=True)
class TierEntry:
    """A block as `Tier.list_entries` lists it."""

    key: bytes
    bytes: int
    used_s: float
    """The time of the last use, in seconds since the epoch; that of the retention's end if it is later."""
    leases: int


class Tier(Protocol):
    """A place for stored blocks."""

    name: str
    counters: TierCounters

    clock: Callable[[], float]
    """Clock by which its reads are timed, in seconds."""
    # A tier that only copies memory uses the calling thread's processor time: on a busy host the thread waits for a
    # processor, and computing would wait for one too.

    def get(self, requests: Sequence[ReadRequest]) -> list[bool]:
        """Read each block to its target. Return which are found and whole; it counts as a use of them."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks. Return which of them others can read now, those that were there already included."""

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys are here, without checking the blocks. It counts as a use, but not as a hit or miss."""

    def lacks_block(self, key: bytes) -> bool:
        """Return whether a block is not here, as far as that is known without waiting. While it comes or goes the
        answer may be wrong: that costs looking for it in vain, or computing it again.
        """

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Keep those of these blocks that are here until the owner releases them or the time is over.

        Leases of several owners on one block are independent; a second lease of one owner moves the end. In Redis a
        leased block can still be lost if another writer is just deleting it. It is then a miss, and computed again.
        """

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """End the owner's leases on these blocks. Calling it twice is harmless."""

    def retain_blocks(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Count blocks as used `seconds` from now, the first ones last, unless they count as used later already. 0 ends
        the retention: they count as used now. Return which are here.
        """

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Remove these blocks, leased or not. Return how many were here."""

    def read_usage(self) -> TierUsage:
        """Return what the tier holds."""

    def list_entries(self) -> Iterator[TierEntry]:
        """Yield all blocks in no order. Blocks that come or go meanwhile may be missed."""

    def close(self) -> None:
        """Close files and connections. The blocks stay."""
