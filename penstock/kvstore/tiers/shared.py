"""The shared memory tier: an arena that all workers of a host map, so that a hand-off is one copy in and one out.

A put:

1. A slot is taken, under the lock: a free one, or that of the block used longest ago; it has a new generation.
2. The payload is copied there, and its checksum taken on the way.
3. The page tag is asked: whether what was copied was still the block.
4. The header is written before it.
5. The block is published, under the lock, if the slot is still ours: now it is found.

Dead before 5: nobody finds the block, and the slot is taken back when room is wanted. After 5 it is there.

A get:

1. The slot is looked up, under the lock, and its generation noted. No reader holds on to a slot.
2. The payload is copied to where it is wanted, and its checksum taken on the way.
3. The header must be, byte for byte, that of the block asked for with this checksum, and the generation as it was. If
   not, it is a miss; and unless the slot was given to another block meanwhile, the block is damaged, and is removed.

A dead reader leaves nothing behind.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.failpoints import failpoint
from penstock.kvstore.arena.arena import ALREADY_STORED, Arena, SlotRef
from penstock.kvstore.block import HEADER_BYTES, Block, BlockFormat, ReadRequest
from penstock.kvstore.copying import copy_and_hash
from penstock.kvstore.tiers.contract import TierCounters, TierEntry, TierUsage

MAX_BATCH_BLOCKS, MAX_BATCH_BYTES = 32, 8 * 2**20
"""So many slots are taken at a time, and published together; a quarter of the arena, if that is less."""


class SharedTier:
    """Blocks in an arena."""

    name, clock = "shared", staticmethod(time.thread_time)

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.counters = TierCounters()
        self._form = arena.form
        self._batch = min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // arena.geometry.slot_bytes)
        self._counting = threading.Lock()

    @classmethod
    def open(cls, form: BlockFormat, pipeline: str, budget_bytes: int, directory: str = "") -> "SharedTier":
        """The host's arena for the pipeline, made if there is none; its memory comes in the background.

        The budget is that of the whole file. Raises `KVStoreError` where it has no room, or the directory is no good.
        """
        return cls(Arena.open(form, pipeline, budget_bytes, directory))

    @classmethod
    def attach(cls, path: Path) -> "SharedTier":
        """An arena that is there, whatever its form, for tools. Raises `KVStoreError`."""
        return cls(Arena.attach(path))

    def get(self, wanted: Sequence[ReadRequest]) -> list[bool]:
        """See `Tier.get`, and the steps above."""
        places = self.arena.find_slots([one.key.hash for one in wanted])
        failpoint("shared.get.1")
        whole = [place is not None and self._read_slot(place, one) for place, one in zip(places, wanted, strict=True)]
        suspects = [place for place, is_whole in zip(places, whole, strict=True) if place and not is_whole]
        num_damaged = self.arena.drop_slots(suspects) if suspects else 0
        with self._counting:
            self.counters.hits += sum(whole)
            self.counters.misses += len(whole) - sum(whole)
            self.counters.damaged += num_damaged
            self.counters.bytes_read += sum(whole) * self._form.payload_bytes
        return whole

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """See `Tier.put`, and the steps above."""
        stored: list[bool] = []
        size = max(1, min(self._batch, self.arena.num_usable_slots // 4))
        for start in range(0, len(blocks), size):
            stored += self._put_batch(blocks[start : start + size])
        return stored

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.has`."""
        return [place is not None for place in self.arena.find_slots(keys)]

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """See `Tier.lease`."""
        self.arena.lease_blocks(owner, keys, seconds)

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """See `Tier.release`."""
        self.arena.release_leases(owner, keys)

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """See `Tier.remove`."""
        return self.arena.remove_blocks(keys)

    def read_usage(self) -> TierUsage:
        """See `Tier.usage`. The tables count as used."""
        num_blocks, num_leased = self.arena.count_blocks()
        geometry = self.arena.geometry
        used = geometry.metadata_bytes + num_blocks * geometry.slot_bytes
        return TierUsage(num_blocks, used, geometry.total_bytes, num_leased)

    def list_entries(self) -> Iterator[TierEntry]:
        """See `Tier.entries`."""
        began = time.time() - time.monotonic()
        for key, used_ns, num_leases in self.arena.list_blocks():
            yield TierEntry(key, self.arena.geometry.slot_bytes, began + used_ns / 1e9, num_leases)

    def read_stored(self, key: bytes) -> bytes | None:
        """See `Tier.stored`."""
        place = self.arena.peek_slot(key)
        if place is None:
            return None
        found = bytes(self.arena.tables.slot_memory(place.slot))
        return found if self.arena.is_current(place) else None

    def close(self) -> None:
        """See `Tier.close`."""
        self.arena.close()

    def _read_slot(self, place: SlotRef, wanted: ReadRequest) -> bool:
        """Steps 2 and 3 of a get."""
        stored = self.arena.tables.slot_memory(place.slot)
        checksum = copy_and_hash(wanted.target, stored[HEADER_BYTES:])
        failpoint("shared.get.2")
        is_whole = stored[:HEADER_BYTES] == self._form.make_header(wanted.key, checksum).pack()
        failpoint("shared.get.3")
        return is_whole and self.arena.is_current(place)

    def _put_batch(self, blocks: Sequence[Block]) -> list[bool]:
        places = self.arena.allocate_slots([block.key.hash for block in blocks])
        failpoint("shared.put.1")
        mine = [
            (place, block)
            for place, block in zip(places, blocks, strict=True)
            if place is not None and place is not ALREADY_STORED
        ]
        written: list[tuple[SlotRef, bytes, bool]] = []
        try:
            for place, block in mine:
                written.append((place, block.key.hash, self._write_slot(place, block)))
        finally:  # if one could not be written its slot is free again, and the caller is told why
            written += [(place, block.key.hash, False) for place, block in mine[len(written) :]]
            published = iter(self.arena.publish_slots(written) if written else ())
            failpoint("shared.put.5")
        stored = [place is ALREADY_STORED or (place is not None and next(published)) for place in places]
        with self._counting:
            self.counters.refused += sum(place is None for place in places)
            self.counters.evictions = self.arena.num_evicted
            taken = sum(stored) - sum(place is ALREADY_STORED for place in places)
            self.counters.bytes_written += taken * self._form.payload_bytes
        return stored

    def _write_slot(self, place: SlotRef, block: Block) -> bool:
        """Steps 2 to 4 of a put; whether the block is whole."""
        into = self.arena.tables.slot_memory(place.slot)
        checksum = copy_and_hash(into[HEADER_BYTES:], block.payload)
        failpoint("shared.put.2")
        is_valid = block.is_valid()
        failpoint("shared.put.3")
        if is_valid:
            into[:HEADER_BYTES] = self._form.make_header(block.key, checksum).pack()
        failpoint("shared.put.4")
        return is_valid
