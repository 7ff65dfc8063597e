"""The retentions that one worker gave: whose blocks it let outlive others in the pool and the tiers, and until when.

A retention is a place in the order of eviction: it holds no memory, refuses no write, and ends by itself. The worker
keeps here what it needs to give one: what a prompt goes on with, what a tenant retains all in all, and what that has
saved. A worker that dies loses this; its retentions end at their time.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from penstock.kvstore.block import BlockKey

MAX_NAMES_PER_BLOCK = 4
"""How often a tenant's retentions may name as many blocks as it may retain: prompts that share blocks each name them.
It bounds the memory of the names."""


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
        self._tenants: dict[str, dict[str | int, Retention]] = {}
        """By tenant and request; by a number where the request's own was dropped (`_keep_shared`)."""
        self._numbers = itertools.count()
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
            taken = dict.fromkeys([*older, request_id])
            return num_held, self._replace(tenant, taken, request_id, keys[:num_shared], seconds, num_shared)

    def replace_retention(
        self, tenant: str, request_id: str, keys: Sequence[BlockKey], seconds: float, num_prompt_blocks: int
    ) -> RetentionChange:
        """Let a request retain these blocks for so long, in place of those that it retains; what it had for longer
        keeps that time.

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
        older: Iterable[str | int],
        request_id: str,
        keys: Sequence[BlockKey],
        seconds: float,
        num_prompt_blocks: int,
    ) -> RetentionChange:
        now, requests = self._clock(), self._tenants.setdefault(tenant, {})
        held = self._held.setdefault(tenant, Counter())
        replaced = [one for name in older if (one := self._drop(tenant, name)) is not None]
        dropped = [key for one in replaced for key in one.keys]
        keys = keys[: self.max_blocks] if seconds else ()
        if keys:
            # The pool and the tiers keep the longer time of a block, so a shorter one would go uncounted.
            ends_s = max([now + seconds, *(one.ends_s for one in replaced)])
            seconds, num_prompt_blocks = ends_s - now, min(num_prompt_blocks, len(keys))
            self._add(tenant, request_id, Retention(keys, num_prompt_blocks, seconds, ends_s))
            self._num_retained += len(keys)
        for one in replaced:
            self._keep_shared(tenant, one)
        max_names = MAX_NAMES_PER_BLOCK * self.max_blocks
        while len(held) > self.max_blocks or sum(len(one.keys) for one in requests.values()) > max_names:
            soonest = min(requests.keys() - {request_id}, key=lambda name: requests[name].ends_s)
            if (ended := self._drop(tenant, soonest)) is not None:
                dropped += ended.keys
        released = tuple(key for key in dict.fromkeys(dropped) if key not in held)
        if not requests:
            del self._tenants[tenant], self._held[tenant]
        return RetentionChange(keys, seconds if keys else 0.0, released)

    def _add(self, tenant: str, name: str | int, retention: Retention) -> None:
        self._tenants[tenant][name] = retention
        self._held[tenant].update(retention.keys)

    def _keep_shared(self, tenant: str, dropped: Retention) -> None:
        """Go on counting those blocks of a dropped retention that others retain for a shorter time.

        The pool and the tiers know no owners: there they are retained until its end.
        """
        held = self._held[tenant]
        # A key covers all tokens before it: who has a block has those before it.
        count = next((at for at, key in enumerate(dropped.keys) if key not in held), len(dropped.keys))
        is_counted = not count or any(
            one.ends_s >= dropped.ends_s and len(one.keys) >= count and one.keys[count - 1] == dropped.keys[count - 1]
            for one in self._tenants[tenant].values()
        )
        if not is_counted:
            self._add(tenant, next(self._numbers), dropped._replace(keys=dropped.keys[:count], num_prompt_blocks=0))

    def _drop_ended(self, tenant: str) -> None:
        now, requests = self._clock(), self._tenants.get(tenant, {})
        for name in [name for name, one in requests.items() if one.ends_s <= now]:
            self._drop(tenant, name)
        if not requests and tenant in self._tenants:
            del self._tenants[tenant], self._held[tenant]

    def _drop(self, tenant: str, name: str | int) -> Retention | None:
        """Forget a retention, and return it."""
        retention = self._tenants[tenant].pop(name, None)
        if retention is not None:
            held = self._held[tenant]
            held.subtract(retention.keys)
            for key in retention.keys:
                if not held[key]:
                    del held[key]
        return retention


def _count_shared(older: Sequence[BlockKey], keys: Sequence[BlockKey]) -> int:
    """Return how many leading keys are the same."""
    pairs = zip(older, keys, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(older), len(keys)))
