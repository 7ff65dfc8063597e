"""The slots of an arena: in memory that is mapped, or in a file on disk that is read and written.

A slot begins with the block's header; the payload follows. The content of a slot on disk outlives the tables: its
header says which block it is, and a slot without a valid header is free. So a header is written after its payload and
the page tag's check, and the header of a slot that is freed without being evicted is erased.
"""

import errno
import os
import threading
import weakref
from contextlib import suppress

import numpy as np

from penstock.errors import DamagedBlock
from penstock.failpoints import failpoint
from penstock.kvstore.arena.directory import FULL_DISK_ERRORS, SlotDirectory
from penstock.kvstore.arena.layout import PAGE_BYTES, Geometry
from penstock.kvstore.arena.locks import ByteLocks
from penstock.kvstore.block import HEADER_BYTES, BlockFormat, Header
from penstock.kvstore.copying import HashingCopy, compute_checksum, copy_and_hash
from penstock.pages import populate_pages

READ_CHUNK_BYTES = 2**20
"""Bytes that are read from disk at a time; half of a core's own cache measured best."""
_NO_HEADER = bytes(HEADER_BYTES)


class SlotMemory:
    """Slots after the tables, in the same file."""

    setting, retry_s = "PENSTOCK_KV_STORE_SHARED_MB", float("inf")
    num_present = num_failed = 0

    def __init__(self, fd: int, memory: memoryview, geometry: Geometry) -> None:
        self._fd, self._memory, self._geometry = fd, memory, geometry
        self.num_eager = geometry.num_slots
        self._first, self._slot_bytes = geometry.slots_at, geometry.slot_bytes
        self._stored_bytes = HEADER_BYTES + geometry.payload_bytes

    def reserve_slots(self, first: int, count: int) -> int:
        """Give slots memory. Return how many of them have it now. Raise `OSError`."""
        os.posix_fallocate(self._fd, self._geometry.slot_offset(first), count * self._slot_bytes)
        return count

    def read_keys(self, first: int, count: int) -> list[bytes | None]:
        """Return no key: memory is made with its tables."""
        return [None] * count

    def map_slots(self, first: int, count: int) -> None:
        """Map slots that have memory, so that copies do not stop at page faults."""
        start = self._geometry.slot_offset(first)
        pages = np.frombuffer(self._memory, np.uint8)[start : start + count * self._slot_bytes]
        try:
            populate_pages(pages.ctypes.data, len(pages))
        except OSError:  # an older kernel: reading maps them too
            pages[::PAGE_BYTES].max()

    def slot_memory(self, slot: int) -> memoryview:
        """Return the memory of a slot's header and payload."""
        at = self._first + slot * self._slot_bytes
        return self._memory[at : at + self._stored_bytes]

    def write_payload(self, slot: int, payload: memoryview) -> int:
        """Write a payload, and return its checksum. Raise `ValueError` if it has another length."""
        return copy_and_hash(self.slot_memory(slot)[HEADER_BYTES:], payload)

    def write_header(self, slot: int, header: bytes) -> None:
        """Write the header of the block that the slot holds."""
        self.slot_memory(slot)[:HEADER_BYTES] = header

    def read_slot(self, slot: int, target: memoryview) -> tuple[memoryview, int]:
        """Copy a slot's payload to `target`. Return its header as stored, and the checksum of the copied bytes."""
        stored = self.slot_memory(slot)
        return stored[:HEADER_BYTES], copy_and_hash(target, stored[HEADER_BYTES:])

    def erase_header(self, slot: int) -> None:
        """Do nothing, as slots in memory do not outlive their tables."""

    def close(self) -> None:
        """Do nothing, as the memory is the tables'."""


class _ThreadBuffers(threading.local):
    """Read buffers of one thread."""

    def __init__(self) -> None:
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.chunk = memoryview(bytearray(READ_CHUNK_BYTES))


class SlotFile:
    """Slots in a file on disk. Methods raise `OSError` if the disk fails.

    The file is not mapped: a page that the disk cannot read would kill the process (SIGBUS).
    """

    setting, retry_s = "PENSTOCK_KV_STORE_DISK_MB", 5.0

    def __init__(self, fd: int, geometry: Geometry, form: BlockFormat, directory: SlotDirectory) -> None:
        self.fd, self._geometry, self._form, self._directory = fd, geometry, form, directory
        self.num_failed = 0
        """Headers that could not be erased."""
        self.num_eager = self.num_present
        self._buffers = _ThreadBuffers()
        # A read may still go on when the arena is closed: the file is closed with the last reference.
        weakref.finalize(self, os.close, fd)

    @property
    def num_present(self) -> int:
        """Slots that have space in the file. Those that the tables do not have yet were written before these were."""
        geometry = self._geometry
        return min(geometry.num_slots, (os.fstat(self.fd).st_size - geometry.slots_at) // geometry.slot_bytes)

    def reserve_slots(self, first: int, count: int) -> int:
        """Give slots space, as far as the budget allows. Return how many of them have it now. Raise `OSError`.

        Where space is short, files of other models that no process uses are removed, the oldest first.
        """
        size = self._geometry.slot_bytes
        with self._directory.hold_lock():
            count = min(count, self._directory.make_space(count * size) // size)
            while count:
                try:
                    os.posix_fallocate(self.fd, self._geometry.slot_offset(first), count * size)
                    break
                except OSError as error:
                    if error.errno not in FULL_DISK_ERRORS or not self._directory.remove_oldest_unused():
                        raise
        return count

    def read_keys(self, first: int, count: int) -> list[bytes | None]:
        """Return for each slot the key of the block that its header names, or None if it has no valid header."""
        return [self._read_key(slot) for slot in range(first, first + count)]

    def map_slots(self, first: int, count: int) -> None:
        """Do nothing, as the file is not mapped."""

    def write_payload(self, slot: int, payload: memoryview) -> int:
        """Write a payload after an erased header. Return its checksum. Raise `ValueError` if it has another length."""
        payload = payload.cast("B")
        if len(payload) != self._geometry.payload_bytes:
            raise ValueError(f"a payload of {len(payload)} bytes, {self._geometry.payload_bytes} are needed")
        checksum = compute_checksum(payload)
        self._write(slot, [memoryview(_NO_HEADER), payload])
        return checksum

    def write_header(self, slot: int, header: bytes) -> None:
        """Write the header of the block that the slot holds."""
        self._write(slot, [memoryview(header)])

    def read_slot(self, slot: int, target: memoryview) -> tuple[memoryview, int]:
        """Read a slot's payload to `target`. Return its header as stored, and the checksum of the bytes read.

        It is read in chunks into a buffer that stays in the processor's caches, and copied from there with the
        checksum computed on the way. This is faster than reading to the target and computing it afterwards. A slot
        that is cut off, or that the disk lost, has no header.
        """
        buffers, offset = self._buffers, self._geometry.slot_offset(slot)
        chunks, start, size = HashingCopy(target), 0, self._geometry.payload_bytes
        if len(target.cast("B")) != size:
            raise ValueError(f"a target of {len(target.cast('B'))} bytes, {size} are needed")
        try:
            while not start or start < size:
                chunk = buffers.chunk[: size - start]
                into = [chunk] if start else [buffers.header, chunk]
                wanted = len(chunk) + (0 if start else HEADER_BYTES)
                if os.preadv(self.fd, into, offset + (HEADER_BYTES + start if start else 0)) != wanted:
                    return memoryview(b""), 0
                chunks.add_chunk(chunk)
                start += len(chunk) or 1
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(b""), 0  # it can never be read again
        return buffers.header, chunks.finish_checksum()

    def erase_header(self, slot: int) -> None:
        """Erase a slot's header, so that its block is not found when tables are built again. A failure is counted."""
        try:
            self._write(slot, [memoryview(_NO_HEADER)])
        except OSError:
            self.num_failed += 1

    def close(self) -> None:
        """Release the file's locks. Reads under way end by themselves."""
        with suppress(OSError):
            ByteLocks(self.fd).unlock_all()
        self._directory.close()

    def _write(self, slot: int, parts: list[memoryview]) -> None:
        at = self._geometry.slot_offset(slot)
        while parts:
            written = os.pwritev(self.fd, parts, at)
            failpoint("disk.put.2.1")
            at += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][written:]

    def _read_key(self, slot: int) -> bytes | None:
        with suppress(OSError, DamagedBlock):
            header = Header.unpack(os.pread(self.fd, HEADER_BYTES, self._geometry.slot_offset(slot)))
            if header == self._form.make_header(header.key, header.checksum):
                return header.key.hash
        return None


SlotMedium = SlotMemory | SlotFile
