"""Which of several servers holds a block: the one that its key, hashed with the server's address, likes best.

Every process that is given the same addresses, in any order, finds the same server. One address more takes its share
from all others and moves nothing else; one less leaves its share to all others.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

import xxhash


def url_identity(url: str) -> str:
    """What stays of a url when its password changes: kind, host and port or path, database."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, parts.query, ""))


class KeySpread:
    """Deals keys out to addresses."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._seeds = [xxhash.xxh3_64_intdigest(url_identity(url).encode()) for url in urls]

    def find_server(self, key: bytes) -> int:
        """The index of the address that holds `key`."""
        if len(self._seeds) == 1:
            return 0
        weights = [xxhash.xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return weights.index(max(weights))

    def group_by_server(self, keys: Sequence[bytes]) -> dict[int, list[int]]:
        """The indices of `keys` by the address that holds them."""
        dealt: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            dealt.setdefault(self.find_server(key), []).append(index)
        return dealt
