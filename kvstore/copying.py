"""Copying and checking in one go: the checksum is of the bytes that were stored, as they were stored.

Natively each byte is loaded once, stored and added to the checksum; where the library was not built, pieces are copied
and then hashed in the copy while they are in the caches. Both give XXH3 (64 bits, seed 0), and both release the
interpreter's lock.
"""

import xxhash

from kvstore.native import library

PIECE = 512 * 2**10


def copy_hashed(into: memoryview, source: memoryview) -> int:
    """Copy `source` over `into`, of the same number of bytes; the xxh3 (64 bits) of what `into` holds then.

    Others may write into `source` meanwhile. Raises `ValueError` if the lengths differ.
    """
    native = library.load()
    return native.copy_hashed(into, source) if native is not None else copy_hashed_in_pieces(into, source)


def copy_hashed_in_pieces(into: memoryview, source: memoryview) -> int:
    """The same without the library."""
    into, source = into.cast("B"), source.cast("B")
    if len(into) != len(source):
        raise ValueError(f"{len(source)} bytes do not fit over {len(into)}")
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), PIECE):
        piece = into[start : start + PIECE]
        piece[:] = source[start : start + PIECE]
        digest.update(piece)
    return digest.intdigest()


def hashed(content: bytes | memoryview) -> int:
    """The xxh3 (64 bits) of the content."""
    return xxhash.xxh3_64_intdigest(content)
