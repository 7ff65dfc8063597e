"""Where tiers of each kind keep their blocks in tests, and how to damage one there behind the tier's back.

Tiers opened at the same place for the same form share their blocks, as workers do.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import redis

from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.arena.directory import find_slot_files
from penstock.kvstore.arena.file import find_arenas
from penstock.kvstore.arena.layout import Geometry
from penstock.kvstore.arena.medium import SlotMemory
from penstock.kvstore.block import HEADER_BYTES, BlockFormat
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.host import HostTier
from penstock.kvstore.tiers.redis import RedisTier
from penstock.names import kv_key

Change = Callable[[bytes], bytes]


def open_host(which: str, directory: Path, form: BlockFormat, num_slots: int) -> HostTier:
    """Open the tier of the host in memory ("shared") or on disk, with room for so many blocks."""
    budget = Geometry(form.payload_bytes, num_slots, on_disk=which == "disk").total_bytes
    if which == "disk":
        return HostTier(Arena.open_on_disk(form, directory / "kv", budget, str(directory)))
    return HostTier(Arena.open(form, "demo", budget, str(directory)))


def peek_slot(tier: HostTier, key: bytes) -> int | None:
    """Return the slot of a block, without counting it as a use; None if the block is not there."""
    with tier.arena._guard:
        (slot,) = tier.arena._look_up([key])
    return slot if slot >= 0 else None


def overwrite_block(tier: HostTier, key: bytes, change: Change) -> bool:
    """Change a stored block behind its tier's back: what is cut off becomes zeros. Returns False if it is not there."""
    slot = peek_slot(tier, key)
    if slot is None:
        return False
    stored = read_slot(tier, slot)
    overwrite_slot(tier, slot, change(stored)[: len(stored)].ljust(len(stored), b"\0"))
    return True


def read_slot(tier: HostTier, slot: int) -> bytes:
    """Return header and payload of a slot as they are stored."""
    medium, geometry = tier.arena.medium, tier.arena.geometry
    if isinstance(medium, SlotMemory):
        return bytes(medium.slot_memory(slot))
    return os.pread(medium.fd, HEADER_BYTES + geometry.payload_bytes, geometry.slot_offset(slot))


def overwrite_slot(tier: HostTier, slot: int, stored: bytes) -> None:
    """Replace header and payload of a slot behind its tier's back."""
    medium = tier.arena.medium
    if isinstance(medium, SlotMemory):
        medium.slot_memory(slot)[:] = stored
    else:
        medium._write(slot, [memoryview(stored)])


def wait_until_mapped(tier: HostTier, timeout_s: float) -> bool:
    """Wait until all slots have memory that is mapped here. Return whether they have."""
    thread = tier.arena.allocator._thread
    thread.join(timeout_s)
    return not thread.is_alive()


class Place(Protocol):
    """A place that is empty at first."""

    def open(self, form: BlockFormat, budget_bytes: int) -> Tier:
        """Another tier there."""

    def attach(self) -> Tier:
        """What tools open, that do not know the form of the blocks."""

    def damage(self, tier: Tier, key: bytes, change: Change) -> None:
        """Replace what is stored under `key` (header and content) by what `change` makes of it."""


def read_stored(place: Place, tier: Tier, key: bytes) -> bytes:
    """Return header and content of a block as they are stored."""
    found = []

    def keep(stored: bytes) -> bytes:
        found.append(stored)
        return stored

    place.damage(tier, key, keep)
    return found[0]


class SharedPlace:
    """Arenas in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def open(self, form: BlockFormat, budget_bytes: int) -> Tier:
        """See `Place.open`."""
        return HostTier(Arena.open(form, "demo", budget_bytes, str(self._directory)))

    def attach(self) -> Tier:
        """See `Place.attach`."""
        return HostTier(Arena.attach(find_arenas(str(self._directory))[0].path))

    def damage(self, tier: Tier, key: bytes, change: Change) -> None:
        """See `Place.damage`. A slot has a fixed size: what is cut off is zeros."""
        assert isinstance(tier, HostTier)
        assert overwrite_block(tier, key, change)


class DiskPlace(SharedPlace):
    """Slot files in a directory, and their tables in another one."""

    def __init__(self, directory: Path, tables: Path) -> None:
        super().__init__(directory)
        self._tables = tables

    def open(self, form: BlockFormat, budget_bytes: int) -> Tier:
        """See `Place.open`."""
        return HostTier(Arena.open_on_disk(form, self._directory, budget_bytes, str(self._tables)))

    def attach(self) -> Tier:
        """See `Place.attach`."""
        return HostTier(Arena.attach_on_disk(next(iter(find_slot_files(self._directory))), str(self._tables)))


class RedisPlace:
    """A server that no other test uses meanwhile."""

    def __init__(self, url: str) -> None:
        self._url = url
        with redis.Redis.from_url(url) as client:
            client.flushall()

    def open(self, form: BlockFormat, budget_bytes: int) -> Tier:
        """See `Place.open`."""
        return RedisTier.open(form, [self._url], budget_bytes, keep_s=600.0)

    def attach(self) -> Tier:
        """See `Place.attach`."""
        return RedisTier.attach([self._url])

    def damage(self, tier: Tier, key: bytes, change: Change) -> None:
        """See `Place.damage`."""
        with redis.Redis.from_url(self._url) as client:
            stored = client.get(kv_key(key))
            assert isinstance(stored, bytes)
            client.set(kv_key(key), change(stored), keepttl=True)
