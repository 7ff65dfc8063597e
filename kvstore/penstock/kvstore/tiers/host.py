"""The tiers of a host, in shared memory and on disk: an arena that all its workers use.

In shared memory a hand-off is one copy in and one out. On disk blocks outlive the workers and the host.

A put:

1. A slot is allocated under the lock: a free one, or that of the least recently used block. It gets a new generation.
2. The payload is written to the slot, on disk after an erased header, and its checksum is computed.
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

An error of the disk is counted, and nothing is written for a while. If the disk is full, blocks are evicted as within
the budget, and space is asked for again later.
"""

import threading
import time
from collections.abc import Iterator, Sequence

from penstock.failpoints import tier_failpoint
from penstock.kvstore.arena.arena import ALREADY_STORED, Arena, SlotRef
from penstock.kvstore.arena.check import check_integrity
from penstock.kvstore.block import Block, ReadRequest
from penstock.kvstore.tiers.contract import TierCounters, TierEntry, TierUsage

MAX_BATCH_BLOCKS, MAX_BATCH_BYTES = 32, 8 * 2**20
"""A batch of this size is allocated and published together; at most a quarter of the arena."""
WRITE_PAUSE_S = 1.0
"""Seconds for which nothing is written after the disk failed."""


class HostTier:
    """A tier whose blocks are in an arena: `shared` in memory, `disk` in a file."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.name = arena, arena.tables.tier
        self.clock = time.perf_counter if arena.geometry.on_disk else time.thread_time
        self.counters = TierCounters()
        self._form, self._medium = arena.form, arena.medium
        self._batch = min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // arena.geometry.slot_bytes)
        self._counting = threading.Lock()
        self._paused_until_s = 0.0

    def get(self, requests: Sequence[ReadRequest]) -> list[bool]:
        """Implement `Tier.get`, in the steps of the module docstring."""
        refs = self.arena.find_slots([request.key.hash for request in requests])
        tier_failpoint(self.name, "get.1")
        whole, suspects, num_failed = list[bool](), list[SlotRef](), 0
        for ref, request in zip(refs, requests, strict=True):
            try:
                whole.append(ref is not None and self._read_slot(ref, request))
                if ref is not None and not whole[-1]:
                    suspects.append(ref)
            except OSError:
                whole.append(False)
                num_failed += 1
        num_damaged = self.arena.drop_slots(suspects) if suspects else 0
        with self._counting:
            self.counters.hits += sum(whole)
            self.counters.misses += len(whole) - sum(whole)
            self.counters.damaged += num_damaged
            self.counters.errors += num_failed
            self.counters.bytes_read += sum(whole) * self._form.payload_bytes
        return whole

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Implement `Tier.put`, in the steps of the module docstring."""
        stored: list[bool] = []
        size = max(1, min(self._batch, self.arena.num_usable_slots // 4))
        for start in range(0, len(blocks), size):
            if time.monotonic() < self._paused_until_s:
                return stored + self.has_blocks([block.key.hash for block in blocks[start:]])
            stored += self._put_batch(blocks[start : start + size])
        return stored

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """Implement `Tier.has_blocks`."""
        return [ref is not None for ref in self.arena.find_slots(keys)]

    def lacks_block(self, key: bytes) -> bool:
        """Implement `Tier.lacks_block`."""
        return self.arena.lacks_block(key)

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Implement `Tier.lease_blocks`."""
        self.arena.lease_blocks(owner, keys, seconds)

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """Implement `Tier.release_leases`."""
        self.arena.release_leases(owner, keys)

    def retain_blocks(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Implement `Tier.retain_blocks`."""
        return self.arena.retain_blocks(keys, seconds)

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Implement `Tier.remove_blocks`."""
        failed = self._medium.num_failed
        num_removed = self.arena.remove_blocks(keys)
        if self._medium.num_failed > failed:  # their blocks may come back when the tables are built again
            self._count_error()
        return num_removed

    def read_usage(self) -> TierUsage:
        """Implement `Tier.read_usage`. The bytes before the slots count as used."""
        num_blocks, num_leased, num_retained = self.arena.count_blocks()
        geometry = self.arena.geometry
        used = geometry.slots_at + num_blocks * geometry.slot_bytes
        return TierUsage(num_blocks, used, geometry.total_bytes, num_leased, num_retained)

    def list_entries(self) -> Iterator[TierEntry]:
        """Implement `Tier.list_entries`."""
        began = time.time() - time.monotonic()
        for key, used_ns, num_leases in self.arena.list_blocks():
            yield TierEntry(key, self.arena.geometry.slot_bytes, began + used_ns / 1e9, num_leases)

    def check_integrity(self) -> list[str]:
        """Return the problems of the tables, in words. Reads no block."""
        self.arena.reclaim_stale()
        return check_integrity(self.arena)

    def close(self) -> None:
        """Implement `Tier.close`."""
        self.arena.close()

    def _read_slot(self, ref: SlotRef, request: ReadRequest) -> bool:
        """Do steps 2 and 3 of a get. Return whether the block is whole. Raise `OSError`."""
        header, checksum = self._medium.read_slot(ref.slot, request.target)
        tier_failpoint(self.name, "get.2")
        is_whole = header == self._form.make_header(request.key, checksum).pack()
        tier_failpoint(self.name, "get.3")
        return is_whole and self.arena.is_current(ref)

    def _put_batch(self, blocks: Sequence[Block]) -> list[bool]:
        try:
            refs = self.arena.allocate_slots([block.key.hash for block in blocks])
        except OSError:  # no slot at all has space
            self._pause_writes()
            return [False] * len(blocks)
        tier_failpoint(self.name, "put.1")
        mine = [
            (ref, block)
            for ref, block in zip(refs, blocks, strict=True)
            if ref is not None and ref is not ALREADY_STORED
        ]
        written: list[tuple[SlotRef, bytes, bool]] = []
        try:
            for ref, block in mine:
                written.append((ref, block.key.hash, self._write_slot(ref, block)))
        except OSError:
            self._pause_writes()
        finally:  # if a block could not be written, its slot is freed, and an error of the caller goes to the caller
            written += [(ref, block.key.hash, False) for ref, block in mine[len(written) :]]
            published = iter(self.arena.publish_slots(written) if written else ())
            tier_failpoint(self.name, "put.5")
        stored = [ref is ALREADY_STORED or (ref is not None and next(published)) for ref in refs]
        with self._counting:
            self.counters.refused += sum(ref is None for ref in refs)
            self.counters.evictions = self.arena.num_evicted
            taken = sum(stored) - sum(ref is ALREADY_STORED for ref in refs)
            self.counters.bytes_written += taken * self._form.payload_bytes
        return stored

    def _write_slot(self, ref: SlotRef, block: Block) -> bool:
        """Do steps 2 to 4 of a put. Return whether the block is whole. Raise `OSError`."""
        checksum = self._medium.write_payload(ref.slot, block.payload)
        tier_failpoint(self.name, "put.2")
        is_valid = block.is_valid()
        tier_failpoint(self.name, "put.3")
        if is_valid:
            self._medium.write_header(ref.slot, self._form.make_header(block.key, checksum).pack())
        tier_failpoint(self.name, "put.4")
        return is_valid

    def _pause_writes(self) -> None:
        self._paused_until_s = time.monotonic() + WRITE_PAUSE_S
        self._count_error()

    def _count_error(self) -> None:
        with self._counting:
            self.counters.errors += 1
