"""Copying and checking in one go: the checksum is taken over what has just been copied, while it is in the caches."""

import xxhash

PIECE = 512 * 2**10


def copy_hashed(into: memoryview, source: memoryview) -> int:
    """Copy `source` (bytes) over `into`, of the same length; the xxh3 (64 bits) of what `into` holds then."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), PIECE):
        piece = into[start : start + PIECE]
        piece[:] = source[start : start + PIECE]
        digest.update(piece)
    return digest.intdigest()


def hashed(content: bytes | memoryview) -> int:
    """The xxh3 (64 bits) of the content."""
    return xxhash.xxh3_64_intdigest(content)
