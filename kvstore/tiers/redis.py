"""The Redis tier: what prefill and decode workers on different machines share.

A cache role: the server may evict, restart empty or be away. Every failure is counted and is a miss, nothing more.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import redis

from kvstore.tiers.contract import Counters
from penstock.names import kv_key

T = TypeVar("T")
log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
LEFT_ALONE_S = 1.0
"""How long a server that did not answer is not asked again: one that hangs must not hold up every request."""
BATCH_BYTES = 8 * 2**20
"""Reads and writes go in batches of about this size: a long prompt does not hold up the server's other clients."""


class RedisTier:
    """Blocks in a Redis server, each for `keep_s` after it was last written or touched."""

    name = "redis"

    def __init__(self, url: str, keep_s: float) -> None:
        self.counters = Counters()
        self._redis = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self._keep_ms = int(keep_s * 1000)
        self._batch = 64
        self._ask_again_at = 0.0

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See `Tier.get`."""
        found: list[bytes | None] = []
        for start in range(0, len(keys), self._batch):
            names = [kv_key(key) for key in keys[start : start + self._batch]]
            part = self._attempt(lambda names=names: cast(list[bytes | None], self._redis.mget(names)))  # type: ignore[misc]
            self._learn(part or [])
            found += part if part is not None else [None] * len(names)
        return found

    def put(self, blocks: Sequence[tuple[bytes, bytes]]) -> None:
        """See `Tier.put`."""
        self._learn([stored for _, stored in blocks])
        for start in range(0, len(blocks), self._batch):
            part = blocks[start : start + self._batch]
            if self._attempt(lambda part=part: self._write(part)) is not None:  # type: ignore[misc]
                self.counters.bytes_written += sum(len(stored) for _, stored in part)

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.touch`."""
        if not keys:
            return []
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pexpire(kv_key(key), self._keep_ms)
            replies = self._attempt(pipe.execute)
        return [bool(reply) for reply in replies] if replies is not None else [False] * len(keys)

    def _learn(self, blocks: Sequence[bytes | None]) -> None:
        """How many blocks make a batch, from the largest seen."""
        largest = max((len(stored) for stored in blocks if stored), default=0)
        if largest:
            self._batch = max(1, BATCH_BYTES // largest)

    def _write(self, blocks: Sequence[tuple[bytes, bytes]]) -> bool:
        with self._redis.pipeline(transaction=False) as pipe:
            for key, stored in blocks:
                pipe.set(kv_key(key), stored, px=self._keep_ms)
            pipe.execute()
        return True

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """What `call` returns, or None, counted and logged, when the server did not do it."""
        if time.monotonic() < self._ask_again_at:
            self.counters.errors += 1
            return None
        try:
            return call()
        except redis.RedisError as error:
            self.counters.errors += 1
            self._ask_again_at = time.monotonic() + LEFT_ALONE_S
            log.warning("the KV server did not answer, going on without it: %s", error)
            return None
