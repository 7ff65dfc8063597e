"""The shared memory tier: an arena that all workers of a host map, so that a hand-off is one copy in and one out.

A put:

1. A slot is allocated under the lock: a free one, or that of the least recently used block. It gets a new generation.
2. The payload is copied to the slot, and its checksum is computed on the way.
3. The page tag is checked: whether the memory that was copied still held the block.
4. The header is written in front of the payload.
5. The block is published under the lock, if the slot is still ours. From now on it is found.

After a crash before 5 the block is not found, and the slot is reclaimed when space is needed. After 5 it is stored.

A get:

1. The slot is looked up under the lock, and its generation noted. Readers do not keep slots from being reused.
2. The payload is copied to the target, and its checksum is computed on the way.
3. The header must be, byte for byte, that of the block asked for with this checksum, and the generation unchanged. If
   not, it is a miss; and unless the slot was given to another block meanwhile, the block is damaged, and is removed.

A reader that crashes leaves nothing behind.
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
"""A batch of this size is allocated and published together; at most a quarter of the arena."""


class SharedTier:
    """A tier whose blocks are in an arena."""

    name, clock = "shared", staticmethod(time.thread_time)

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.counters = TierCounters()
        self._form = arena.form
        self._batch = min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // arena.geometry.slot_bytes)
        self._counting = threading.Lock()

    @classmethod
    def open(cls, form: BlockFormat, pipeline: str, budget_bytes: int, directory: str = "") -> "SharedTier":
        """Open the host's arena for the pipeline, or make it; its memory is allocated in the background.

        The budget covers the whole file. Raise `KVStoreError` if it does not fit, or the directory cannot be used.
        """
        return cls(Arena.open(form, pipeline, budget_bytes, directory))

    @classmethod
    def attach(cls, path: Path) -> "SharedTier":
        """Open an existing arena of any format, for tools. Raise `KVStoreError` if it cannot be opened."""
        return cls(Arena.attach(path))

    def get(self, requests: Sequence[ReadRequest]) -> list[bool]:
        """Implement `Tier.get`, in the steps of the module docstring."""
        refs = self.arena.find_slots([request.key.hash for request in requests])
        failpoint("shared.get.1")
        whole = [ref is not None and self._read_slot(ref, request) for ref, request in zip(refs, requests, strict=True)]
        suspects = [ref for ref, is_whole in zip(refs, whole, strict=True) if ref and not is_whole]
        num_damaged = self.arena.drop_slots(suspects) if suspects else 0
        with self._counting:
            self.counters.hits += sum(whole)
            self.counters.misses += len(whole) - sum(whole)
            self.counters.damaged += num_damaged
            self.counters.bytes_read += sum(whole) * self._form.payload_bytes
        return whole

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Implement `Tier.put`, in the steps of the module docstring."""
        stored: list[bool] = []
        size = max(1, min(self._batch, self.arena.num_usable_slots // 4))
        for start in range(0, len(blocks), size):
            stored += self._put_batch(blocks[start : start + size])
        return stored

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """Implement `Tier.has_blocks`."""
        return [ref is not None for ref in self.arena.find_slots(keys)]

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Implement `Tier.lease_blocks`."""
        self.arena.lease_blocks(owner, keys, seconds)

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """Implement `Tier.release_leases`."""
        self.arena.release_leases(owner, keys)

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Implement `Tier.remove_blocks`."""
        return self.arena.remove_blocks(keys)

    def read_usage(self) -> TierUsage:
        """Implement `Tier.read_usage`. The arena's tables count as used."""
        num_blocks, num_leased = self.arena.count_blocks()
        geometry = self.arena.geometry
        used = geometry.metadata_bytes + num_blocks * geometry.slot_bytes
        return TierUsage(num_blocks, used, geometry.total_bytes, num_leased)

    def list_entries(self) -> Iterator[TierEntry]:
        """Implement `Tier.list_entries`."""
        began = time.time() - time.monotonic()
        for key, used_ns, num_leases in self.arena.list_blocks():
            yield TierEntry(key, self.arena.geometry.slot_bytes, began + used_ns / 1e9, num_leases)

    def read_stored(self, key: bytes) -> bytes | None:
        """Implement `Tier.read_stored`."""
        ref = self.arena.peek_slot(key)
        if ref is None:
            return None
        found = bytes(self.arena.tables.slot_memory(ref.slot))
        return found if self.arena.is_current(ref) else None

    def close(self) -> None:
        """Implement `Tier.close`."""
        self.arena.close()

    def _read_slot(self, ref: SlotRef, request: ReadRequest) -> bool:
        """Do steps 2 and 3 of a get. Return whether the block is whole."""
        stored = self.arena.tables.slot_memory(ref.slot)
        checksum = copy_and_hash(request.target, stored[HEADER_BYTES:])
        failpoint("shared.get.2")
        is_whole = stored[:HEADER_BYTES] == self._form.make_header(request.key, checksum).pack()
        failpoint("shared.get.3")
        return is_whole and self.arena.is_current(ref)

    def _put_batch(self, blocks: Sequence[Block]) -> list[bool]:
        refs = self.arena.allocate_slots([block.key.hash for block in blocks])
        failpoint("shared.put.1")
        mine = [
            (ref, block)
            for ref, block in zip(refs, blocks, strict=True)
            if ref is not None and ref is not ALREADY_STORED
        ]
        written: list[tuple[SlotRef, bytes, bool]] = []
        try:
            for ref, block in mine:
                written.append((ref, block.key.hash, self._write_slot(ref, block)))
        finally:  # if a block could not be written, its slot is freed, and the error goes to the caller
            written += [(ref, block.key.hash, False) for ref, block in mine[len(written) :]]
            published = iter(self.arena.publish_slots(written) if written else ())
            failpoint("shared.put.5")
        stored = [ref is ALREADY_STORED or (ref is not None and next(published)) for ref in refs]
        with self._counting:
            self.counters.refused += sum(ref is None for ref in refs)
            self.counters.evictions = self.arena.num_evicted
            taken = sum(stored) - sum(ref is ALREADY_STORED for ref in refs)
            self.counters.bytes_written += taken * self._form.payload_bytes
        return stored

    def _write_slot(self, ref: SlotRef, block: Block) -> bool:
        """Do steps 2 to 4 of a put. Return whether the block is whole."""
        into = self.arena.tables.slot_memory(ref.slot)
        checksum = copy_and_hash(into[HEADER_BYTES:], block.payload)
        failpoint("shared.put.2")
        is_valid = block.is_valid()
        failpoint("shared.put.3")
        if is_valid:
            into[:HEADER_BYTES] = self._form.make_header(block.key, checksum).pack()
        failpoint("shared.put.4")
        return is_valid
