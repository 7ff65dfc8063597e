"""Copying and checking in one go: the checksum is of the bytes that were stored, as they were stored.

Natively each byte is loaded once, stored and added to the checksum; where the library was not built, pieces are copied
and then hashed in the copy while they are in the caches. Both give XXH3 (64 bits, seed 0), and both release the
interpreter's lock.
"""

import xxhash

from penstock.kvstore.native import library

PIECE_BYTES = 512 * 2**10
HASH_UNIT_BYTES = 1024
"""Bytes that are hashed together."""


def copy_and_hash(into: memoryview, source: memoryview) -> int:
    """Copy `source` over `into`, of the same number of bytes; the xxh3 (64 bits) of what `into` holds then.

    Others may write into `source` meanwhile. Raises `ValueError` if the lengths differ.
    """
    native = library.load_library()
    return native.copy_and_hash(into, source) if native is not None else copy_and_hash_in_pieces(into, source)


def copy_and_hash_in_pieces(into: memoryview, source: memoryview) -> int:
    """The same without the library."""
    into, source = into.cast("B"), source.cast("B")
    if len(into) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit over {len(into)}")
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), PIECE_BYTES):
        piece = into[start : start + PIECE_BYTES]
        piece[:] = source[start : start + PIECE_BYTES]
        digest.update(piece)
    return digest.intdigest()


class HashingCopy:
    """A copy whose source comes in pieces: `into` is filled from its start, and hashed on the way."""

    def __init__(self, into: memoryview) -> None:
        self._into = into.cast("B")
        self._native, self._sums, self._digest = library.load_library(), library.HashState(), xxhash.xxh3_64()
        self._start, self._checksum = 0, compute_checksum(b"")

    def add_piece(self, piece: memoryview) -> None:
        """The next bytes: a multiple of `UNIT` of them, or all that are left. Raises `ValueError` for other numbers.

        An empty piece, also after the last one, changes nothing.
        """
        end = self._start + len(piece)
        if end > len(self._into) or (end < len(self._into) and len(piece) % HASH_UNIT_BYTES):
            raise ValueError(f"no piece of {len(piece)} bytes at {self._start} of {len(self._into)}")
        if not len(piece):
            return
        if self._native is None:
            self._into[self._start : end] = piece
            self._digest.update(self._into[self._start : end])
        else:
            self._checksum = self._native.copy_piece(self._sums, self._into, piece, self._start)
        self._start = end

    def finish_checksum(self) -> int:
        """The xxh3 (64 bits) of `into`. Raises `ValueError` before all pieces are there."""
        if self._start < len(self._into):
            raise ValueError(f"only {self._start} of {len(self._into)} bytes were copied")
        return self._digest.intdigest() if self._native is None else self._checksum


def compute_checksum(content: bytes | memoryview) -> int:
    """The xxh3 (64 bits) of the content."""
    return xxhash.xxh3_64_intdigest(content)
