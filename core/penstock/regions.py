"""Names of regions, and which of them is the home of a request.

A region is one Kafka and one Redis, with workers and gateways of its own. `docs/regions.md` has the promise: a request
has one home, whose servers decide about it, and an id that a gateway makes ends with its home's name.
"""

import hashlib
import re
from collections.abc import Iterable

REGION_HEADER = "x-penstock-region"
"""The header of an answer that says where it was computed, and why there."""
HOPS_HEADER = "x-penstock-hops"
"""The header of a request that gateways send on: the regions that it came through, with commas between them."""
PEER_HEADER = "x-penstock-peer"
"""The header by which gateways of other regions prove that they are: `PENSTOCK_REGION_SECRET`."""
MAX_HOPS = 2
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
CHOICE = re.compile(r"\.\d+$")
"""The end of the id of one choice of several."""


def is_region_name(text: str) -> bool:
    """Return whether `text` can name a region: 1 to 32 of `a-z 0-9 -`, first a letter."""
    return _NAME.fullmatch(text) is not None


def parse_peers(text: str) -> dict[str, str]:
    """Return the addresses of peers by name, from `us=https://gateway.us.example:8080, asia=http://…`.

    Raises `ValueError` for what names no region or is no HTTP address, and for a name that stands twice.
    """
    found = dict[str, str]()
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, _, url = one.partition("=")
        if not is_region_name(name) or re.fullmatch(r"https?://[^/?#\s]+/?", url) is None:
            raise ValueError(f"{one!r} is not NAME=URL, as in us=https://gateway.us.example:8080")
        if name in found:
            raise ValueError(f"the region {name!r} stands twice")
        found[name] = url.rstrip("/")
    return found


def add_home(name: str, region: str) -> str:
    """Return an id that tells its home; the same id where there are no regions."""
    return f"{name}-{region}" if region else name


def find_home(request_id: str, regions: Iterable[str]) -> str | None:
    """Return which of `regions` an id names as its home, or None. The id may be that of one choice of several."""
    whole = CHOICE.sub("", request_id)
    ends = [region for region in regions if whole.endswith(f"-{region}")]
    return max(ends, key=len, default=None)


def choose_home(tenant: str, key: str, regions: Iterable[str]) -> str:
    """Return which of `regions` decides about a key that a tenant's client chose. It is the same at all gateways.

    Rendezvous hashing: a region that is added takes its part of the keys, and all others stay where they are.
    """
    return min(regions, key=lambda region: hashlib.sha256(f"{tenant}\n{key}\n{region}".encode()).digest())
