"""Damages blocks in every tier while a pipeline serves, and checks the answers."""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from penstock.config.settings import KVSettings
from penstock.kvstore.block import HEADER_BYTES
from penstock.kvstore.store import KVStore
from penstock.kvstore.tiers.contract import Tier
from penstock.kvstore.tiers.host import HostTier
from penstock.messages import Request
from penstock.names import kv_key
from sim.line import InProcessPipeline, serving_engine
from sim.workload import compute_answers, make_requests

PAUSE_S = 0.002
NUM_PROMPTS = 24
Change = Callable[[bytes], bytes]


def tight_settings(directory: Path) -> KVSettings:
    """Return settings with all tiers, each of little more capacity than the blocks of one round."""
    return KVSettings(
        shared_mb=64, shared_dir=str(directory), disk_mb=64, disk_dir=str(directory / "disk"), redis_mb=64
    )  # fmt: skip


@dataclass
class BlockCorrupter:
    """Flips bytes in stored blocks, truncates them and swaps them behind the tiers' backs, until it is stopped."""

    store: KVStore
    redis_url: str
    seed: int
    num_corruptions: Counter[str] = field(default_factory=Counter)
    """How many blocks were damaged, by tier and kind."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._client = redis.Redis.from_url(self.redis_url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(PAUSE_S):
            with contextlib.suppress(redis.RedisError, OSError):
                self._corrupt_block()

    def _corrupt_block(self) -> None:
        tier = self._chance.choice(self.store.tiers)
        keys = [entry.key for entry in tier.list_entries()]
        if len(keys) < 2:
            return
        key, other = self._chance.sample(keys, 2)
        what = self._chance.choice(["flip", "cut", "swap"])
        others = tier.read_stored(other) or b""
        change: Change = {
            "flip": self._flip_byte,
            "cut": self._truncate_block,
            "swap": lambda stored: others or stored,
        }[what]
        if self._write_block(tier, key, change):
            self.num_corruptions[f"{tier.name} {what}"] += 1

    def _flip_byte(self, stored: bytes) -> bytes:
        place = self._chance.randrange(self._chance.choice([len(stored), min(HEADER_BYTES, len(stored))]))
        return stored[:place] + bytes([stored[place] ^ self._chance.randrange(1, 256)]) + stored[place + 1 :]

    def _truncate_block(self, stored: bytes) -> bytes:
        return stored[: self._chance.randrange(len(stored))]

    def _write_block(self, tier: Tier, key: bytes, change: Change) -> bool:
        if isinstance(tier, HostTier):
            return overwrite_block(tier, key, change)
        stored = self._client.get(kv_key(key))
        if not isinstance(stored, bytes) or not stored:
            return False
        self._client.set(kv_key(key), change(stored), keepttl=True)
        return True


def overwrite_block(tier: HostTier, key: bytes, change: Change) -> bool:
    """Change a stored block behind its tier's back: what is cut off becomes zeros. Returns False if it is not there."""
    ref = tier.arena.peek_slot(key)
    if ref is None:
        return False
    stored = tier.arena.medium.read_stored(ref.slot)
    tier.arena.medium.overwrite_slot(ref.slot, change(stored)[: len(stored)].ljust(len(stored), b"\0"))
    return True


def count_reads(line: InProcessPipeline) -> int:
    """Return how many blocks the workers have read from tiers, damaged ones included."""
    counters = [
        tier.counters
        for store in (serving_engine(line.prefill).store, serving_engine(line.decode).store)
        for tier in store.tiers
    ]
    return sum(one.hits + one.damaged for one in counters)


def serve_damaged(
    line: InProcessPipeline, enough: Callable[[], bool], after_round: Callable[[int], None]
) -> tuple[int, int]:
    """Serve the same prompts again and again until `enough()`. Returns the numbers of answers, and of wrong answers."""
    work = make_requests(NUM_PROMPTS, line.pipeline.name)
    expected = {
        request.id: answer.token_ids for request, answer in zip(work, compute_answers(work).values(), strict=True)
    }
    sent: dict[str, str] = {}
    number = 0
    while not enough():
        again = [rename_request(request, f"{request.id}-{number}") for request in work]
        sent |= {copy.id: request.id for copy, request in zip(again, work, strict=True)}
        line.send_requests(*again)
        line.run_until_results(len(sent))
        after_round(number)
        number += 1
    results = {result.id: result.token_ids for result in line.read_results()}
    return len(results), sum(results.get(copy) != expected[original] for copy, original in sent.items())


def rename_request(request: Request, request_id: str) -> Request:
    """Return the request under another id."""
    return request.model_copy(update={"id": request_id})
