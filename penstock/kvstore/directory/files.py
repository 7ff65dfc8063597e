"""Writing and reading the files of blocks.

Files are read with `preadv`, not mapped: a file that is truncated under a mapping kills the reader (SIGBUS). They are
read in pieces into one buffer that stays in the processor's caches, and copied from there to the target with the
checksum computed on the way. This is faster than reading into the target and hashing it afterwards.
"""

import contextlib
import errno
import os
import threading
import time
from typing import TYPE_CHECKING

from penstock.errors import DamagedBlock
from penstock.failpoints import failpoint
from penstock.kvstore.block import HEADER_BYTES, RAW, BlockFormat, Header, ReadOutcome, ReadRequest
from penstock.kvstore.copying import HashingCopy

if TYPE_CHECKING:
    from penstock.kvstore.codec import TierCodecs


PIECE_BYTES = 2**20
"""Bytes that are read at a time; half of a core's own cache measured best."""


class _ThreadBuffers(threading.local):
    """Read buffers of one thread."""

    def __init__(self) -> None:
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.piece = memoryview(bytearray(PIECE_BYTES))


class BlockFiles:
    """Reads and writes the blocks of one format."""

    def __init__(self, form: BlockFormat, codec: "TierCodecs | None") -> None:
        self._form, self._codec = form, codec
        self._buffers = _ThreadBuffers()

    def encode_payload(self, payload: memoryview) -> tuple[int, memoryview]:
        """Return the number of a codec, and the content that it makes of a payload."""
        return (RAW, payload) if self._codec is None else self._codec.encode_payload(payload)

    def write_block(self, path: str, header: bytes, content: memoryview) -> None:
        """Write a block to a new file. Raise `OSError` if not all of it could be written."""
        started_s = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            left = [memoryview(header), content.cast("B")]
            while left:
                written = os.writev(fd, left)
                failpoint("disk.put.2.1")
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if left:
                    left[0] = left[0][written:]
            now = time.time_ns()
            os.utime(fd, ns=(now, now))  # finer than the kernel's own time stamps
        finally:
            os.close(fd)
        self._record_transfer(len(content), started_s)

    def read_block(self, path: str, wanted: ReadRequest) -> tuple[ReadOutcome, int]:
        """Do steps 1 to 3 of a get. Return what was found, and the inode number of the file. Raise `OSError`."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return ReadOutcome.MISSING, 0
        try:
            failpoint("disk.get.1")
            stat = os.fstat(fd)
            try:
                is_whole = self._read_content(fd, stat.st_size, wanted)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                is_whole = False  # the disk has lost the file: it can never be read again
            if not is_whole:
                return ReadOutcome.DAMAGED, stat.st_ino
            with contextlib.suppress(OSError):  # blocks on a read-only disk can still be read
                now = time.time_ns()
                os.utime(fd, ns=(now, now))
            failpoint("disk.get.3")
            return ReadOutcome.WHOLE, stat.st_ino
        finally:
            os.close(fd)

    def _read_content(self, fd: int, size: int, wanted: ReadRequest) -> bool:
        """Do steps 2 and 3 of a get for a file of `size` bytes, which may change. Return whether it is whole."""
        length = size - HEADER_BYTES
        if not 0 <= length <= 2 * self._form.payload_bytes:
            return False
        started_s = time.perf_counter()
        piece = self._buffers.piece[:length]
        header = self._read_header(fd, piece)
        if header is None or not self._form.is_header_of(header, wanted.key) or header.content_bytes != length:
            return False
        failpoint("disk.get.2")
        if header.codec == RAW:
            checksum = _copy_content(fd, piece, wanted.target) if length == len(wanted.target) else None
            self._record_transfer(size, started_s)
            return checksum == header.checksum
        if self._codec is None or not self._codec.has_decoder(header.codec):
            return False
        content = memoryview(bytearray(length))
        checksum = _copy_content(fd, piece, content)
        self._record_transfer(size, started_s)
        return checksum == header.checksum and self._codec.decode_payload(header.codec, content, wanted.target)

    def _read_header(self, fd: int, piece: memoryview) -> Header | None:
        """Read the header and the first piece of the content. Return the header, or None if they are not there."""
        start = self._buffers.header
        try:
            is_there = os.preadv(fd, [start, piece], 0) == HEADER_BYTES + len(piece)
            return Header.unpack(start) if is_there else None
        except DamagedBlock:
            return None

    def _record_transfer(self, num_bytes: int, started_s: float) -> None:
        if self._codec is not None:
            self._codec.record_transfer(num_bytes, time.perf_counter() - started_s)


def _copy_content(fd: int, piece: memoryview, into: memoryview) -> int | None:
    """Copy `piece` and the rest of the file to `into`. Return the checksum, or None if the file is too short."""
    pieces, start = HashingCopy(into), 0
    while start < len(into):
        if start:
            piece = piece[: len(into) - start]
            if os.preadv(fd, [piece], HEADER_BYTES + start) != len(piece):
                return None
        pieces.add_piece(piece)
        start += len(piece)
    return pieces.finish_checksum()
