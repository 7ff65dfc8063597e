"""The tiers of this host for people who look: without a model, and without what only a worker needs.

A tier is opened as it lies there, so blocks of all models and pipelines that share it are seen.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from penstock.config.settings import KVSettings
from penstock.errors import DamagedBlock, DependencyMissing, KVStoreError
from penstock.kvstore.block import HEADER_BYTES, RAW, Header
from penstock.kvstore.copying import compute_checksum
from penstock.kvstore.tiers.contract import Tier, TierEntry, TierUsage
from penstock.redis.urls import hide_password

T = TypeVar("T")
CODEC_NAMES = {RAW: "raw", 1: "lossless", 2: "int8"}
"""Named here, as the codecs themselves need packages that a look does not."""
REMOVE_BATCH = 256
"""Blocks that are removed at a time."""


@dataclass(frozen=True)
class TierLocation:
    """A tier and where it is."""

    tier: Tier
    location: str

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def read_usage(self) -> TierUsage:
        """What is there. Raises `KVStoreError` if that cannot be asked."""
        return self._ask_tier(self.tier.read_usage)

    def list_entries(self) -> list[TierEntry]:
        """All blocks, the least recently used first. Raises `KVStoreError` if they cannot be listed."""
        return self._ask_tier(lambda: sorted(self.tier.list_entries(), key=lambda entry: (entry.used_s, entry.key)))

    def read_stored(self, key: bytes) -> bytes | None:
        """A block as it lies there. Raises `KVStoreError` if that cannot be asked."""
        return self._ask_tier(lambda: self.tier.read_stored(key))

    def remove_blocks(self, keys: list[bytes]) -> int:
        """Forget these blocks; how many were there. Raises `KVStoreError` if that cannot be asked."""
        return self._ask_tier(lambda: self.tier.remove_blocks(keys))

    def _ask_tier(self, ask: Callable[[], T]) -> T:
        """A tier raises nothing; a person wants to know that what it says is not all there is."""
        errors = self.tier.counters.errors
        answer = ask()
        if self.tier.counters.errors > errors:
            raise KVStoreError(f"the {self.name} tier at {self.location} does not answer")
        return answer


@dataclass(frozen=True)
class BlockReport:
    """What a look at one stored block showed."""

    key: bytes
    bytes: int
    header: Header | None
    """None if it cannot be read."""
    header_problem: str
    """Empty: nothing is wrong with it."""
    content_problem: str

    @property
    def problem(self) -> str:
        """What is wrong with the block; empty: nothing."""
        return self.header_problem or self.content_problem


def examine_block(key: bytes, stored: bytes) -> BlockReport:
    """Check a stored block all through: header, key, length and checksum of the content."""
    try:
        header = Header.unpack(stored)
    except DamagedBlock as damage:
        return BlockReport(key, len(stored), None, str(damage), "")
    content = memoryview(stored)[HEADER_BYTES:]
    of_header = "" if header.key.hash == key else f"it is another block, {header.key.hash.hex()[:16]}…"
    of_content = ""
    if len(content) != header.content_bytes:
        of_content = f"{len(content):,} bytes of content, {header.content_bytes:,} were written"
    elif compute_checksum(content) != header.checksum:
        of_content = "the content's checksum is wrong"
    return BlockReport(key, len(stored), header, of_header, of_content)


def codec_name(number: int) -> str:
    """What the codec of that number in headers is called."""
    return CODEC_NAMES.get(number, f"unknown, number {number}")


def inspect_block(place: TierLocation, key: bytes) -> BlockReport | None:
    """Examine a block where it lies; None if it is not there.

    Workers go on meanwhile: one that seems damaged is read again, as it may just have been replaced.
    """
    for _ in range(2):
        stored = place.read_stored(key)
        if stored is None:
            return None
        finding = examine_block(key, stored)
        if not finding.problem:
            break
    return finding


def remove_in_batches(place: TierLocation, entries: Sequence[TierEntry]) -> Iterator[tuple[int, int]]:
    """Remove blocks, a batch at a time: how many of each batch were there, and its bytes as they were listed."""
    for start in range(0, len(entries), REMOVE_BATCH):
        batch = entries[start : start + REMOVE_BATCH]
        yield place.remove_blocks([entry.key for entry in batch]), sum(entry.bytes for entry in batch)


def open_tiers(
    settings: KVSettings, urls: Sequence[str], stack: ExitStack, only: str | None, tell: Callable[[str], None]
) -> list[TierLocation]:
    """Every tier there is (or the `only` one), in the order in which workers read them; the stack closes them.

    Shared memory and disk count if they are there, whoever made them; Redis if the settings give it a budget. What is
    there and cannot be opened is left out, and the reason told. With `only` it is raised: `KVStoreError`, or
    `DependencyMissing`; but one arena among several is told in any case.
    """
    openers: dict[str, Callable[[], Iterator[TierLocation]]] = {
        "shared": lambda: _open_shared_tiers(settings.shared_dir, tell),
        "disk": lambda: _open_disk_tier(settings),
        "redis": lambda: _open_redis_tier(urls if settings.redis_mb else ()),
    }
    found: list[TierLocation] = []
    for name, opener in openers.items():
        if only not in (None, name):
            continue
        try:
            for place in opener():
                stack.callback(place.tier.close)
                found.append(place)
        except (ImportError, KVStoreError) as error:
            missing = DependencyMissing(f"the {name} tier needs pip install 'penstock[worker]' ({error})")
            reason = missing if isinstance(error, ImportError) else error
            if only is not None:
                raise reason from None
            tell(f"left out: {reason}")
    return found


def _open_shared_tiers(directory: str, tell: Callable[[str], None]) -> Iterator[TierLocation]:
    from penstock.kvstore.arena.file import find_arenas
    from penstock.kvstore.tiers.shared import SharedTier

    for arena in find_arenas(directory):
        try:
            tier = SharedTier.attach(arena.path)
        except KVStoreError as error:  # half made, as its maker died, or of another version
            tell(f"left out: {error}")
            continue
        used = "" if arena.is_in_use else ", in no process"
        yield TierLocation(tier, f"{arena.path}{used}")


def _open_disk_tier(settings: KVSettings) -> Iterator[TierLocation]:
    from penstock.kvstore.tiers.disk import DiskTier

    if settings.disk_path.is_dir():
        yield TierLocation(DiskTier.attach(settings.disk_path), str(settings.disk_path))


def _open_redis_tier(urls: Sequence[str]) -> Iterator[TierLocation]:
    from penstock.kvstore.tiers.redis import RedisTier

    if urls:
        yield TierLocation(RedisTier.attach(urls), ", ".join(map(hide_password, urls)))
