"""What a tier is: batches of reads, batches of writes, leases, and its own counters.

One test suite holds all tiers to it. A tier is a cache: it may forget anything at any time except what is leased, a
failure of what is behind it is a counted miss, and nothing here raises for it. Only `open` may: for settings that
cannot work. All methods may be called from several threads.

A tier checks what it reads: a block that is not whole, or not exactly the one asked for, is a miss, is counted as
damaged, and is removed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.kvstore.block import Block, ReadRequest


@dataclass
class TierCounters:
    """What one tier saw since it was opened, in blocks and bytes."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Of the misses: something was there, but not the whole block asked for."""
    evictions: int = 0
    """Blocks that this process put out to make room."""
    refused: int = 0
    """Blocks not taken: all the room there is belongs to leased ones, or the block is larger than it."""
    errors: int = 0
    """Batches that the tier could not be asked, or did not take."""
    bytes_read: int = 0
    bytes_written: int = 0
    """Of payload, hits and blocks taken only."""


@dataclass(frozen=True)
class TierUsage:
    """What a tier holds now, whoever put it there."""

    blocks: int
    bytes: int
    """What counts against the budget."""
    budget: int
    leased: int
    """Blocks with at least one lease that has not run out."""


@dataclass(frozen=True)
class TierEntry:
    """One block as `entries` lists it."""

    key: bytes
    bytes: int
    used_s: float
    """When it was last used, seconds since the epoch."""
    leases: int


class Tier(Protocol):
    """A place for stored blocks."""

    name: str
    counters: TierCounters

    clock: Callable[[], float]
    """What its reads are timed by, in seconds. Of a tier that only copies memory it is the calling thread's processor
    time: on a busy host the thread waits for a processor, and computing would wait for one too.
    """

    def get(self, wanted: Sequence[ReadRequest]) -> list[bool]:
        """Read each block to where it is wanted; which of them are whole. Those were used now."""

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Store blocks; which of them others can read now (or could already: a key names one content)."""

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are here, unchecked. Those were used now; counts neither hits nor misses."""

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Keep these blocks (those that are here) until the owner releases them or the time is over.

        Leases of several owners on one block are independent; a second one of the same owner moves the end. In Redis a
        leased block can still go where another writer was just deleting it: a miss, and computed again.
        """

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """End the owner's leases on these blocks. Twice is harmless."""

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Forget these blocks, leased or not; how many were here."""

    def read_usage(self) -> TierUsage:
        """What the tier holds."""

    def list_entries(self) -> Iterator[TierEntry]:
        """What is in it, in no order; what changes meanwhile may be missed."""

    def read_stored(self, key: bytes) -> bytes | None:
        """Header and content of a block as they lie there, unchecked: for people who look."""

    def close(self) -> None:
        """Let go of files and connections. The blocks stay."""
