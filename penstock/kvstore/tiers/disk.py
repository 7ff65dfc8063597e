"""The disk tier: a directory that all workers of a host share, whatever their models, and that outlives them.

A put, in batches:

1. Under the lock (`ledger.py`), space is reserved for the blocks that are not here, and made by eviction.
2. Each block is written to a file in this process's folder, with its checksum.
3. The page tag is checked: whether the memory that was written still held the block.
4. Under the lock, the files are renamed to where they are found, and the reservation ends.

If the disk is full before the budget is, blocks are evicted as if it were the budget, and the write is tried once more.

After a crash in 1 to 3 the blocks are not found; the dead process's folder and its reservation are removed as soon as
another process opens the directory or needs space. After a crash within 4 the files that were renamed are blocks, and
the next holder of the lock counts the usage anew.

A get: 1. the file is opened; 2. it is read, and its header must be that of the block asked for; 3. the content is
copied to the target, and its checksum must be the header's; this counts as a use. Readers hold no lock, and one that
crashes leaves nothing behind; a file that is removed meanwhile can be read to its end.

Leases (`leases.py`): 1. a link to each block is made in the owner's folder; 2. all links are made. After a crash
between them, some blocks are leased. A release removes the links in the same way. A removal: 1. the leases of the block
are removed; 2. the block is.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from penstock.errors import KVStoreError
from penstock.failpoints import failpoint
from penstock.kvstore.block import HEADER_BYTES, Block, BlockFormat, ReadOutcome, ReadRequest
from penstock.kvstore.copying import compute_checksum
from penstock.kvstore.directory import leases
from penstock.kvstore.directory.check import check_directory
from penstock.kvstore.directory.directory import DISK_FULL_ERRORS, Directory, Draft
from penstock.kvstore.directory.files import BlockFiles
from penstock.kvstore.directory.layout import round_to_pages
from penstock.kvstore.tiers.contract import TierCounters, TierEntry, TierUsage

if TYPE_CHECKING:
    from penstock.kvstore.codec import TierCodecs

T = TypeVar("T")

MAX_BATCH_BLOCKS, MAX_BATCH_BYTES = 32, 8 * 2**20
"""Blocks that are reserved and written at a time, about."""
SETTING = "PENSTOCK_KV_STORE_DISK"
WRITE_PAUSE_S = 1.0
"""How long nothing is written after the disk failed."""


class DiskTier:
    """A tier whose blocks are files in a directory."""

    name, clock = "disk", staticmethod(time.perf_counter)

    def __init__(self, directory: Directory, form: BlockFormat, codec: "TierCodecs | None") -> None:
        self.counters = TierCounters()
        self._directory, self._form = directory, form
        self._files = BlockFiles(form, codec)
        self._counting = threading.Lock()
        self._paused_until_s = 0.0
        size = HEADER_BYTES + form.payload_bytes
        self._batch = max(1, min(MAX_BATCH_BLOCKS, MAX_BATCH_BYTES // size, directory.budget // 4 // size))

    @classmethod
    def open(cls, form: BlockFormat, directory: Path, budget_bytes: int, codec: "TierCodecs | None" = None) -> Self:
        """Open the blocks in a directory, or make it. Raise `KVStoreError` if it cannot be used.

        A full disk raises nothing: its blocks are read, and new ones are written as soon as it has space.
        """
        size = round_to_pages(HEADER_BYTES + form.payload_bytes)
        if budget_bytes < size:
            raise KVStoreError(f"{SETTING}_MB: {budget_bytes} bytes hold no block of {size} bytes")
        try:
            return cls(Directory(directory, budget_bytes, writes=True), form, codec)
        except OSError as error:
            raise KVStoreError(f"{SETTING}_DIR: {directory} cannot hold KV blocks: {error}") from error

    @classmethod
    def attach(cls, directory: Path) -> Self:
        """Open an existing directory for tools: no block can be read or written, and no file is made.

        Raise `KVStoreError` if there is none.
        """
        try:
            return cls(Directory(directory, 0, writes=False), BlockFormat(bytes(32), bytes(16), 0), None)
        except OSError as error:
            raise KVStoreError(f"{directory}: no directory with KV blocks: {error}") from error

    def get(self, requests: Sequence[ReadRequest]) -> list[bool]:
        """Implement `Tier.get`, in the steps of the module docstring."""
        found, suspects, failed = list[ReadOutcome](), dict[bytes, int | None](), False
        for request in requests:
            try:
                outcome, number = self._files.read_block(self._block_path(request.key.hash), request)
            except OSError:
                outcome, number, failed = ReadOutcome.MISSING, 0, True
            found.append(outcome)
            if outcome is ReadOutcome.DAMAGED:
                suspects[request.key.hash] = number
        if suspects:
            self._try_call(lambda: self._directory.drop_blocks(suspects), 0)
        with self._counting:
            hits = found.count(ReadOutcome.WHOLE)
            self.counters.hits += hits
            self.counters.misses += len(found) - hits
            self.counters.damaged += found.count(ReadOutcome.DAMAGED)
            self.counters.errors += failed
            self.counters.bytes_read += hits * self._form.payload_bytes
        return [outcome is ReadOutcome.WHOLE for outcome in found]

    def put(self, blocks: Sequence[Block]) -> list[bool]:
        """Implement `Tier.put`, in the steps of the module docstring."""
        here = self.has_blocks([block.key.hash for block in blocks])
        stored = {block.key.hash for block, is_here in zip(blocks, here, strict=True) if is_here}
        new = list({block.key.hash: block for block in blocks if block.key.hash not in stored}.values())
        for start in range(0, len(new), self._batch):
            if not self._directory.is_writable or time.monotonic() < self._paused_until_s:
                break
            stored |= self._put_batch(new[start : start + self._batch])
        return [block.key.hash in stored for block in blocks]

    def has_blocks(self, keys: Sequence[bytes]) -> list[bool]:
        """Implement `Tier.has_blocks`."""
        return [self._touch_block(key) for key in keys]

    def lease_blocks(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """Implement `Tier.lease_blocks`. Leases end by the host's clock."""
        if keys:
            self._try_call(lambda: self._directory.lease_blocks(owner, keys, seconds), None)

    def release_leases(self, owner: str, keys: Sequence[bytes]) -> None:
        """Implement `Tier.release_leases`."""
        if keys:
            self._try_call(lambda: self._directory.release_leases(owner, keys), None)

    def remove_blocks(self, keys: Sequence[bytes]) -> int:
        """Implement `Tier.remove_blocks`."""
        return self._try_call(lambda: self._directory.drop_blocks(dict.fromkeys(keys)), 0) if keys else 0

    def read_usage(self) -> TierUsage:
        """Implement `Tier.read_usage`. Files count in whole pages, and reserved space counts too."""

        def read() -> TierUsage:
            record = self._directory.ledger.read_usage()
            num_leased = len(set(leases.list_leased_keys(self._directory.layout)))
            return TierUsage(record.num_blocks, record.used_bytes, record.budget_bytes, num_leased)

        return self._try_call(read, TierUsage(0, 0, self._directory.budget, 0))

    def list_entries(self) -> Iterator[TierEntry]:
        """Implement `Tier.list_entries`."""

        def read() -> list[TierEntry]:
            running = Counter(leases.list_leased_keys(self._directory.layout))
            return [
                TierEntry(key, round_to_pages(stat.st_size), stat.st_mtime_ns / 1e9, running[key])
                for key, stat in self._directory.layout.list_blocks()
            ]

        return iter(self._try_call(read, list[TierEntry]()))

    def read_stored(self, key: bytes) -> bytes | None:
        """Implement `Tier.read_stored`."""
        try:
            return Path(self._block_path(key)).read_bytes()
        except OSError:
            return None

    def check_integrity(self) -> list[str]:
        """Return problems of the directory, and files that would never be removed. Reads no block."""
        return check_directory(self._directory)

    def close(self) -> None:
        """Implement `Tier.close`."""
        self._try_call(self._directory.close, None)

    def _put_batch(self, blocks: Sequence[Block]) -> set[bytes]:
        """Write a batch. Return the keys that others can read now."""
        ready = [(block, *self._files.encode_payload(block.payload)) for block in blocks]
        lengths = [HEADER_BYTES + len(content) for *_, content in ready]
        drafts = self._try_call(lambda: self._directory.reserve_drafts(lengths), list[Draft | None]())
        failpoint("disk.put.1")
        named = dict[Draft, bytes | None].fromkeys(draft for draft in drafts if draft is not None)
        batch_bytes = sum(draft.size for draft in named)
        num_new = 0
        try:
            for draft, made in zip(drafts, ready, strict=False):
                if draft is not None and not self._try_call(
                    partial(self._write_draft, draft, *made, batch_bytes), instead=False
                ):
                    break
                if draft is not None and made[0].is_valid():
                    named[draft] = made[0].key.hash
                failpoint("disk.put.3")
        finally:  # whatever happened, a draft is published or removed
            if named:
                num_new = self._try_call(lambda: self._directory.publish_drafts(named), -1)
            failpoint("disk.put.4")
            with self._counting:
                self.counters.refused += drafts.count(None)
                self.counters.evictions = self._directory.num_evicted
                self.counters.bytes_written += max(0, num_new) * self._form.payload_bytes
        return {key for key in named.values() if key is not None} if num_new >= 0 else set()

    def _write_draft(self, draft: Draft, block: Block, number: int, content: memoryview, batch_bytes: int) -> bool:
        """Do step 2 of a put. If the disk is full, evict as many bytes as the batch has."""
        header = self._form.make_header(block.key, compute_checksum(content), number, len(content))
        try:
            self._files.write_block(draft.path, header.pack(), content)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRORS or not self._directory.free_disk_space(draft, batch_bytes):
                raise
            self._files.write_block(draft.path, header.pack(), content)
        failpoint("disk.put.2")
        return True

    def _block_path(self, key: bytes) -> str:
        return self._directory.layout.block_path(key)

    def _touch_block(self, key: bytes) -> bool:
        now = time.time_ns()
        try:
            os.utime(self._block_path(key), ns=(now, now))
        except FileNotFoundError:
            return False
        except OSError:  # blocks on a read-only disk can still be read
            return os.path.exists(self._block_path(key))
        return True

    def _try_call(self, call: Callable[[], T], instead: T) -> T:
        """Return what `call` returns. If the directory fails, count it, pause writing and return `instead`."""
        try:
            return call()
        except OSError:
            with self._counting:
                self.counters.errors += 1
            self._paused_until_s = time.monotonic() + WRITE_PAUSE_S
            return instead
