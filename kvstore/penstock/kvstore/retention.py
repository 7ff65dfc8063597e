"""The retentions that one worker gave: whose blocks it let outlive others in the pool and the tiers, and until when.

A retention is a place in the order of eviction: it holds no memory, refuses no write, and ends by itself. The worker
keeps here what it needs to give one: what a prompt goes on with, what a tenant retains all in all, and what that has
saved. A worker that dies loses this; its retentions end at their time.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.kvstore.block import BlockKey


class Retention(NamedTuple):
    """The blocks that a request retains."""

    keys: Sequence[BlockKey]
    """Those of its prompt, then those of its answer."""
    num_prompt_blocks: int
    seconds: float
    """How long they were retained for when it was given."""
    ends_s: float


class RetentionChange(NamedTuple):
    """What is to change in the order of eviction."""

    retained: Sequence[BlockKey] = ()
    seconds: float = 0.0
    released: Sequence[BlockKey] = ()
    """Blocks that no request of this worker retains any more."""


class Retentions:
    """The retentions of one worker, of at most `max_bytes` of each tenant. Any thread may call its methods."""

    def __init__(self, max_bytes: int, block_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_blocks, self._block_bytes, self._clock = max_bytes // block_bytes, block_bytes, clock
        self._num_retained = self._num_found = 0
        self._tenants: dict[str, dict[str, Retention]] = {}
        """By tenant and request."""
        self._held: dict[str, Counter[BlockKey]] = {}
        """By tenant: each of its retained blocks, and how many of its requests retain it."""
        self._lock = threading.RLock()

    def take_over(
        self, tenant: str, request_id: str, keys: Sequence[BlockKey], num_found: int
    ) -> tuple[int, RetentionChange]:
        """Let a new prompt take over the retentions that it goes on with: those of whose prompts it has all blocks.

        What it has of them is retained anew, for as long; the rest no longer.

        A prompt that only begins alike, as that of another agent or a side question, leaves them as they are. Return
        also how many of the prompt's first `num_found` blocks, which were found, were retained.
        """
        with self._lock:
            self._drop_ended(tenant)
            num_held = sum(key in self._held.get(tenant, ()) for key in keys[:num_found])
            self._num_found += num_held
            older = {
                name: one
                for name, one in self._tenants.get(tenant, {}).items()
                # A key covers all tokens before it.
                if 0 < (count := one.num_prompt_blocks) <= len(keys) and keys[count - 1] == one.keys[count - 1]
            }
            if not older:
                return num_held, RetentionChange()
            num_shared = max(_count_shared(one.keys, keys) for one in older.values())
            seconds = max(one.seconds for one in older.values())
            taken = [*older, request_id]
            return num_held, self._replace(tenant, taken, request_id, keys[:num_shared], seconds, num_shared)

    def replace_retention(
        self, tenant: str, request_id: str, keys: Sequence[BlockKey], seconds: float, num_prompt_blocks: int
    ) -> RetentionChange:
        """Let a request retain these blocks for so long, in place of those that it retains.

        The first ones are its prompt's. Where its tenant would retain too much, other retentions of it end, the soonest
        to end first. Of a prompt that is too long alone the beginning is retained.
        """
        with self._lock:
            self._drop_ended(tenant)
            return self._replace(tenant, [request_id], request_id, keys, seconds, num_prompt_blocks)

    def report_retentions(self) -> dict[str, object]:
        """Return the bytes that each tenant retains now; how many blocks a retention was given to, each time; and how
        many retained blocks prompts have found.
        """
        with self._lock:
            for tenant in list(self._tenants):
                self._drop_ended(tenant)
            sizes = {tenant: len(held) * self._block_bytes for tenant, held in self._held.items()}
            return {"bytes": sizes, "retained": self._num_retained, "found": self._num_found}

    def _replace(
        self,
        tenant: str,
        older: Sequence[str],
        request_id: str,
        keys: Sequence[BlockKey],
        seconds: float,
        num_prompt_blocks: int,
    ) -> RetentionChange:
        dropped = [key for name in older for key in self._drop(tenant, name)]
        keys = keys[: self.max_blocks] if seconds else ()
        if keys:
            requests, held = self._tenants.setdefault(tenant, {}), self._held.setdefault(tenant, Counter())
            num_prompt_blocks = min(num_prompt_blocks, len(keys))
            requests[request_id] = Retention(keys, num_prompt_blocks, seconds, self._clock() + seconds)
            held.update(keys)
            self._num_retained += len(keys)
            others = sorted(requests.keys() - {request_id}, key=lambda name: requests[name].ends_s)
            while len(held) > self.max_blocks:
                dropped += self._drop(tenant, others.pop(0))
        left = self._held.get(tenant, ())
        released = tuple(key for key in dict.fromkeys(dropped) if key not in left)
        return RetentionChange(keys, seconds if keys else 0.0, released)

    def _drop_ended(self, tenant: str) -> None:
        now = self._clock()
        for name in [name for name, one in self._tenants.get(tenant, {}).items() if one.ends_s <= now]:
            self._drop(tenant, name)

    def _drop(self, tenant: str, request_id: str) -> Sequence[BlockKey]:
        """Forget a request's retention. Return its blocks."""
        retention = self._tenants.get(tenant, {}).pop(request_id, None)
        if retention is None:
            return ()
        held = self._held[tenant]
        held.subtract(retention.keys)
        for key in retention.keys:
            if not held[key]:
                del held[key]
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._held[tenant]
        return retention.keys


def _count_shared(older: Sequence[BlockKey], keys: Sequence[BlockKey]) -> int:
    """Return how many leading keys are the same."""
    pairs = zip(older, keys, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(older), len(keys)))
