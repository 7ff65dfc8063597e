"""Copying memory and computing its checksum in one pass: the checksum is over the bytes that were stored.

The native library loads each byte once, stores it and adds it to the checksum. Where it was not built, chunks are
copied and then hashed while they are in the caches. Both compute XXH3 (64 bits, seed 0), and both release the
interpreter's lock.
"""

import xxhash

from penstock.kvstore.native import library

CHUNK_BYTES = 512 * 2**10
HASH_UNIT_BYTES = 1024
"""Chunks of a copy are multiples of this size, but for the last."""


def copy_and_hash(into: memoryview, source: memoryview) -> int:
    """Copy `source` to `into`, and return the xxh3 (64 bits) of the bytes in `into`.

    Other threads may write to `source` meanwhile. Raise `ValueError` if the lengths differ.
    """
    native = library.load_library()
    return native.copy_and_hash(into, source) if native is not None else copy_and_hash_in_chunks(into, source)


def copy_and_hash_in_chunks(into: memoryview, source: memoryview) -> int:
    """Do what `copy_and_hash` does, without the native library."""
    into, source = into.cast("B"), source.cast("B")
    if len(into) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit over {len(into)}")
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), CHUNK_BYTES):
        chunk = into[start : start + CHUNK_BYTES]
        chunk[:] = source[start : start + CHUNK_BYTES]
        digest.update(chunk)
    return digest.intdigest()


class HashingCopy:
    """A copy whose source comes in chunks. `into` is filled from its start, and hashed on the way."""

    def __init__(self, into: memoryview) -> None:
        self._into = into.cast("B")
        self._native, self._sums, self._digest = library.load_library(), library.HashState(), xxhash.xxh3_64()
        self._start, self._checksum = 0, compute_checksum(b"")

    def add_chunk(self, chunk: memoryview) -> None:
        """Add the next bytes: a multiple of `HASH_UNIT_BYTES`, or all that are left. Raise `ValueError` otherwise.

        An empty chunk changes nothing.
        """
        end = self._start + len(chunk)
        if end > len(self._into) or (end < len(self._into) and len(chunk) % HASH_UNIT_BYTES):
            raise ValueError(f"no chunk of {len(chunk)} bytes at {self._start} of {len(self._into)}")
        if not len(chunk):
            return
        if self._native is None:
            self._into[self._start : end] = chunk
            self._digest.update(self._into[self._start : end])
        else:
            self._checksum = self._native.copy_chunk(self._sums, self._into, chunk, self._start)
        self._start = end

    def finish_checksum(self) -> int:
        """Return the xxh3 (64 bits) of `into`. Raise `ValueError` before all chunks were added."""
        if self._start < len(self._into):
            raise ValueError(f"only {self._start} of {len(self._into)} bytes were copied")
        return self._digest.intdigest() if self._native is None else self._checksum


def compute_checksum(content: bytes | memoryview) -> int:
    """Return the xxh3 (64 bits) of a content."""
    return xxhash.xxh3_64_intdigest(content)
