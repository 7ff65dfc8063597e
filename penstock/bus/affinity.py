"""Affinity: which requests belong together, and where on Kafka they go.

A worker's pool holds the KV of what it computed last. Requests that begin alike should find the worker that holds their
beginning, so a producer puts them in one partition, and that partition's worker has them all. It is a matter of speed
only: wherever a request lands, the record of its id in Redis decides who answers it, and a prefix that is in no pool is
found in the tiers below, or computed. So a request that comes again under its id, from a
producer that counts otherwise, may land elsewhere.
"""

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from penstock.messages import Request

AFFINITY_TOKENS = 64
"""How much of a prompt's beginning counts: four KV blocks of 16. Prompts that agree in less share little that could be
found again. Were it much more, prompts with one long beginning and different ends would be torn apart."""
AFFINITY_CHARS = 4 * AFFINITY_TOKENS
"""The same of a text, at about four characters a token: a producer has no tokenizer."""

HALF_LIFE_S = 10.0
REQUESTS_PER_PARTITION = 8
"""Recent requests for each partition that a key gets: one client's only chat is all of its traffic and not hot."""
SHARE_TOLERANCE = 0.5
"""How much more than its fair share a partition may carry before a key is spread further."""
MAX_COUNTED_KEYS = 4096
"""Keys that are counted at once; who was not seen for longest is forgotten, and is cold then."""


def compute_affinity(request: Request) -> str:
    """What a request has in common with those that should find the same worker (32 hex digits).

    Its session where it has one, else the beginning of its prompt; of its tenant in both cases, as tenants share no KV.
    """
    digest = hashlib.sha256(b"penstock affinity 1")
    for part in (request.tenant, *_affinity_parts(request)):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.hexdigest()[:32]


def _affinity_parts(request: Request) -> Iterator[str]:
    if request.session is not None:
        yield from ("session", request.session)
    elif request.token_ids is not None:
        yield from ("tokens", " ".join(map(str, request.token_ids[:AFFINITY_TOKENS])))
    elif request.prompt is not None:
        yield from ("text", request.prompt[:AFFINITY_CHARS])
    else:
        left = AFFINITY_CHARS
        for message in request.messages or ():
            yield from (message.role, message.content[:left])
            left -= len(message.content)
            if left <= 0:
                return


@lru_cache(maxsize=MAX_COUNTED_KEYS)
def rank_partitions(affinity: str, num_partitions: int) -> tuple[int, ...]:
    """All partitions in the order in which a key uses them, the same in every process.

    By rendezvous hashing: a partition that is added takes its part of the keys, and all others stay where they are.
    """
    start = hashlib.sha256(affinity.encode())

    def score(partition: int) -> bytes:
        scored = start.copy()
        scored.update(partition.to_bytes(4, "big"))
        return scored.digest()

    return tuple(sorted(range(num_partitions), key=score))


@dataclass(slots=True)
class _DecayingCount:
    """A count that loses half of itself every `HALF_LIFE_S`."""

    at_s: float
    count: float = 0.0

    def add_request(self, now_s: float) -> float:
        """Count one more; how much there is now."""
        passed_s = max(0.0, now_s - self.at_s)
        self.at_s += passed_s
        self.count = self.count * 0.5 ** (passed_s / HALF_LIFE_S) + 1.0
        return self.count


@dataclass(slots=True)
class _Key:
    recent: _DecayingCount
    turn: int = 0


class AffinityPartitioner:
    """Chooses the partitions of one topic, one request after the other. Thread-safe.

    A key has one partition. As its share of this producer's recent requests grows beyond what one partition should
    carry it gets 2, 4, … in turn, the first one always among them, and fewer when it cools down. The same calls give
    the same partitions. What other producers send is not known here; a key that is hot for all is hot for each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        self._all = _DecayingCount(0.0)

    def choose_partition(self, affinity: str, num_partitions: int, now_s: float) -> int:
        """The partition of the next request with this affinity; `now_s` is any clock that does not go back."""
        with self._lock:
            key = self._keys.setdefault(affinity, _Key(_DecayingCount(now_s)))
            self._keys.move_to_end(affinity)
            if len(self._keys) > MAX_COUNTED_KEYS:
                self._keys.popitem(last=False)
            width = self._count_partitions(key.recent.add_request(now_s), self._all.add_request(now_s), num_partitions)
            turn, key.turn = key.turn, key.turn + 1
        return rank_partitions(affinity, num_partitions)[turn % width]

    @staticmethod
    def _count_partitions(of_key: float, of_all: float, num_partitions: int) -> int:
        """How many partitions a key with so many recent requests of all gets: a power of two, or all there are."""
        by_share = math.ceil(of_key / of_all * num_partitions - SHARE_TOLERANCE)
        wanted = max(1, min(by_share, int(of_key / REQUESTS_PER_PARTITION)))
        return min(num_partitions, 1 << (wanted - 1).bit_length())
