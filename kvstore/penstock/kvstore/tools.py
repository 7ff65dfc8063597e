"""The tiers of this host for `penstock kv`: without a model, and without packages that only a worker needs.

An existing tier is opened as it is, so blocks of all models and pipelines that share it are seen.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from penstock.config.settings import KVSettings
from penstock.errors import DependencyMissing, KVStoreError
from penstock.kvstore.tiers.contract import Tier, TierEntry, TierUsage
from penstock.redis.urls import hide_password

T = TypeVar("T")
REMOVE_BATCH = 256
"""Blocks that are removed in one call."""


@dataclass(frozen=True)
class TierLocation:
    """A tier and its location."""

    tier: Tier
    location: str

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def read_usage(self) -> TierUsage:
        """Return the tier's usage. Raise `KVStoreError` if the tier fails."""
        return self._ask_tier(self.tier.read_usage)

    def list_entries(self) -> list[TierEntry]:
        """Return all blocks, the least recently used first. Raise `KVStoreError` if the tier fails."""
        return self._ask_tier(lambda: sorted(self.tier.list_entries(), key=lambda entry: (entry.used_s, entry.key)))

    def remove_blocks(self, keys: list[bytes]) -> int:
        """Remove blocks. Return how many were there. Raise `KVStoreError` if the tier fails."""
        return self._ask_tier(lambda: self.tier.remove_blocks(keys))

    def _ask_tier(self, ask: Callable[[], T]) -> T:
        """Return the tier's answer. Raise `KVStoreError` if it counted an error, as tiers themselves raise nothing."""
        errors = self.tier.counters.errors
        answer = ask()
        if self.tier.counters.errors > errors:
            raise KVStoreError(f"the {self.name} tier at {self.location} does not answer")
        return answer


def remove_in_batches(place: TierLocation, entries: Sequence[TierEntry]) -> Iterator[tuple[int, int]]:
    """Remove blocks in batches. Yield for each batch how many were there, and its bytes as they were listed."""
    for start in range(0, len(entries), REMOVE_BATCH):
        batch = entries[start : start + REMOVE_BATCH]
        yield place.remove_blocks([entry.key for entry in batch]), sum(entry.bytes for entry in batch)


def open_tiers(
    settings: KVSettings, urls: Sequence[str], stack: ExitStack, only: str | None, tell: Callable[[str], None]
) -> list[TierLocation]:
    """Open every tier there is (or the `only` one), in the order in which workers read them; the stack closes them.

    Shared memory and disk are opened if they exist, and Redis if the settings give it a budget. A tier that cannot be
    opened is left out, and the reason is passed to `tell`. With `only` it is raised: `KVStoreError`, or
    `DependencyMissing`; but for one arena among several the reason is passed to `tell` in any case.
    """
    openers: dict[str, Callable[[], Iterator[TierLocation]]] = {
        "shared": lambda: _open_shared_tiers(settings.shared_dir, tell),
        "disk": lambda: _open_disk_tiers(settings, tell),
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
    from penstock.kvstore.arena.arena import Arena
    from penstock.kvstore.arena.file import find_arenas
    from penstock.kvstore.tiers.host import HostTier

    for arena in find_arenas(directory):
        try:
            tier = HostTier(Arena.attach(arena.path))
        except KVStoreError as error:  # incomplete, because its process died, or of another version
            tell(f"left out: {error}")
            continue
        used = "" if arena.is_in_use else ", in no process"
        yield TierLocation(tier, f"{arena.path}{used}")


def _open_disk_tiers(settings: KVSettings, tell: Callable[[str], None]) -> Iterator[TierLocation]:
    from penstock.kvstore.arena.arena import Arena
    from penstock.kvstore.arena.directory import find_slot_files
    from penstock.kvstore.tiers.host import HostTier

    for path in find_slot_files(settings.disk_path):
        try:
            yield TierLocation(HostTier(Arena.attach_on_disk(path, settings.shared_dir)), str(path))
        except KVStoreError as error:  # no worker has opened it since the host's boot, or it is another user's
            tell(f"left out: {error}")


def _open_redis_tier(urls: Sequence[str]) -> Iterator[TierLocation]:
    from penstock.kvstore.tiers.redis import RedisTier

    if urls:
        yield TierLocation(RedisTier.attach(urls), ", ".join(map(hide_password, urls)))
