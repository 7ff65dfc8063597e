"""Chooses Kafka partitions so that requests which begin alike go to the same worker.

A worker's pool holds the KV of what it computed last. Requests that begin alike should go to the worker that holds
their beginning, so a producer puts them in one partition, whose worker gets them all. This changes only the speed: in
whatever partition a request is, its record in Redis decides which worker answers it, and a prefix that is in no pool is
found in the tiers below, or computed. So a request that is sent again under its id, by a producer that has counted
other requests, may go to another partition.
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
"""How many of a prompt's first tokens count: four KV blocks of 16. Prompts that agree in fewer share little KV. If many
more counted, prompts with a common beginning and different ends would go to different partitions."""
AFFINITY_CHARS = 4 * AFFINITY_TOKENS
"""How many of a text's first characters count, at about four a token: a producer has no tokenizer."""

HALF_LIFE_S = 10.0
REQUESTS_PER_PARTITION = 8
"""How many recent requests of a key justify each of its partitions. Without this, a client's only chat would count as
hot, as it is all of the client's traffic."""
SHARE_TOLERANCE = 0.5
"""By what part a partition may exceed its fair share of requests before its key gets more partitions."""
MAX_COUNTED_KEYS = 4096
"""How many keys are counted. Beyond that, the key that was not used for longest is forgotten."""


def compute_affinity(request: Request) -> str:
    """Return the key of a request's affinity (32 hex digits). Requests with one key should go to the same worker.

    It is a hash of the request's session, or of the beginning of its prompt where it has none, and of its tenant, as
    tenants share no KV.
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
    """Return all partitions in the order in which a key uses them. It is the same in every process.

    The order comes from rendezvous hashing: a partition that is added takes its part of the keys, and all other keys
    stay where they are.
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
        """Count a request. Return the count."""
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

    A key begins with one partition. As its share of this producer's recent requests grows beyond what one partition
    should carry, its requests go to 2, 4, … partitions in turn, the first one always among them, and to fewer when the
    share shrinks. The same calls give the same partitions. What other producers send is not known here, but a key that
    is hot for all of them is hot for each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, _Key] = OrderedDict()
        self._all = _DecayingCount(0.0)

    def choose_partition(self, affinity: str, num_partitions: int, now_s: float) -> int:
        """Return the partition of the next request with this affinity. `now_s` is any clock that does not go back."""
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
        """Return the number of partitions of a key: a power of two, or `num_partitions`.

        `of_key` and `of_all` are the recent requests with this key, and all recent requests.
        """
        by_share = math.ceil(of_key / of_all * num_partitions - SHARE_TOLERANCE)
        wanted = max(1, min(by_share, int(of_key / REQUESTS_PER_PARTITION)))
        return min(num_partitions, 1 << (wanted - 1).bit_length())
