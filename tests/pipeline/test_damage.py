"""A damaged KV block is a miss, and the answer is right; without the checksum it would not be."""

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import redis

from penstock.config.addresses import Addresses
from penstock.config.settings import KVSettings
from penstock.kvstore.arena import medium
from penstock.kvstore.block import HEADER_BYTES
from penstock.kvstore.store import KVStore
from penstock.kvstore.tiers.contract import Tier, TierCounters
from penstock.kvstore.tiers.host import HostTier
from penstock.local.valkey import ValkeyServer
from penstock.messages import Request, Sampling
from penstock.names import Pipeline, kv_key
from sim.line import InProcessPipeline, serving_engine
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests
from tests.kvstore.places import Change, DiskPlace, Place, RedisPlace, SharedPlace, overwrite_block

WORK = 6
READS = 500
NUM_PROMPTS = 24
PAUSE_S = 0.002
SMALL_POOL = ENGINE_SETTINGS.model_copy(update={"pool_mb": 8})
TIERS = ["shared", "disk", "redis"]


@pytest.fixture
def kv_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server for blocks alone."""
    with ValkeyServer(tmp_path / "valkey", appendonly=False) as server:
        yield server


@pytest.fixture
def line(
    request: pytest.FixtureRequest, make_line: Callable[..., InProcessPipeline], kv_server: ValkeyServer, tmp_path: Path
) -> InProcessPipeline:
    """A pipeline whose workers hand over through one tier."""
    sizes = dict.fromkeys((f"{name}_mb" for name in TIERS), 0) | {f"{request.param}_mb": 64}
    kv = KVSettings(shared_dir=str(tmp_path), disk_dir=str(tmp_path / "disk"), **sizes)
    return make_line(kv_url=kv_server.url, kv=kv)


def place_of(line: InProcessPipeline, directory: Path) -> Place:
    (tier,) = serving_engine(line.decode).store.tiers
    if tier.name == "redis":
        return RedisPlace(line.addresses.kv_url)
    return SharedPlace(directory) if tier.name == "shared" else DiskPlace(directory / "disk", directory)


def work_of(line: InProcessPipeline) -> list[Request]:
    return [
        request.model_copy(update={"sampling": Sampling(temperature=0, max_tokens=24, ignore_eos=True)})
        for request in make_requests(WORK, line.pipeline.name)[1:]
    ]


def flip(stored: bytes) -> bytes:
    """Flip one bit: in the exponent of a number."""
    place = HEADER_BYTES + 4 * 1000 + 3
    return stored[:place] + bytes([stored[place] ^ 0x40]) + stored[place + 1 :]


def run_damaged(line: InProcessPipeline, place: Place) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Tokens got and expected, with a byte flipped in a block of each request between prefill and decode."""
    work = work_of(line)
    line.send_requests(*work)
    line.run_prefill(len(work))
    for request in work:
        chain = serving_engine(line.prefill).store.make_hasher(request.tenant)
        place.damage(
            serving_engine(line.decode).store.tiers[0], chain.hash_full_blocks(request.token_ids or [])[0].hash, flip
        )
    results = line.run_until_results(len(work))
    expected = {request_id: answer.token_ids for request_id, answer in compute_answers(work).items()}
    return {result.id: result.token_ids for result in results}, expected


@pytest.mark.parametrize("line", TIERS, indirect=True)
def test_a_flipped_byte_changes_no_token(line: InProcessPipeline, tmp_path: Path) -> None:
    place = place_of(line, tmp_path)
    got, expected = run_damaged(line, place)
    assert got == expected
    assert serving_engine(line.decode).store.tiers[0].counters.damaged == len(expected)
    assert serving_engine(line.decode).store.stats.recomputed_jobs == len(expected)


@pytest.mark.parametrize("line", ["shared"], indirect=True)
def test_without_the_checksum_it_would(
    line: InProcessPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the equality test can fail."""

    def copied(into: memoryview, source: memoryview) -> int:
        into[:] = source
        return 0

    monkeypatch.setattr(medium, "copy_and_hash", copied)
    got, expected = run_damaged(line, place_of(line, tmp_path))
    assert got.keys() == expected.keys()
    assert got != expected
    assert serving_engine(line.decode).store.tiers[0].counters.damaged == 0


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
        others: list[bytes] = []
        self._write_block(tier, other, lambda stored: others.append(stored) or stored)  # type: ignore[func-returns-value]
        change: Change = {
            "flip": self._flip_byte,
            "cut": self._truncate_block,
            "swap": lambda stored: others[0] if others else stored,
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


def list_counters(line: InProcessPipeline) -> list[TierCounters]:
    """Return what the tiers of both workers have counted."""
    stores = (serving_engine(line.prefill).store, serving_engine(line.decode).store)
    return [tier.counters for store in stores for tier in store.tiers]


@pytest.mark.proof
def test_damage_everywhere_all_the_time_changes_no_token(
    redis_url: str, kv_server: ValkeyServer, pipeline: Pipeline, tmp_path: Path
) -> None:
    """Flipped, cut and swapped blocks in all tiers while the pipeline serves, and a KV server that is restarted empty.

    The pool is small, so that nearly all is read from the tiers.
    """
    addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url, kv_url=kv_server.url)
    # Each tier has little more capacity than the blocks of one round.
    kv = KVSettings(shared_mb=64, shared_dir=str(tmp_path), disk_mb=64, disk_dir=str(tmp_path / "disk"), redis_mb=64)
    work = make_requests(NUM_PROMPTS, pipeline.name)
    right = [answer.token_ids for answer in compute_answers(work).values()]
    expected: dict[str, list[int]] = {}
    with (
        InProcessPipeline(addresses, kv=kv, engine=SMALL_POOL) as line,
        BlockCorrupter(serving_engine(line.decode).store, kv_server.url, seed=1) as corrupter,
    ):
        while sum(one.hits + one.damaged for one in list_counters(line)) < READS:
            again = [request.model_copy(update={"id": f"{request.id}-{len(expected)}"}) for request in work]
            expected |= {copy.id: tokens for copy, tokens in zip(again, right, strict=True)}
            line.send_requests(*again)
            line.run_until_results(len(expected))
            if len(expected) % (2 * NUM_PROMPTS) == 0:
                kv_server.kill()
                kv_server.start()
        assert {result.id: result.token_ids for result in line.read_results()} == expected
        assert sum(one.damaged for one in list_counters(line)) > 0
        assert {strike.split()[0] for strike in corrupter.num_corruptions} == set(TIERS)
        assert all(tier.read_usage().leased == 0 for tier in serving_engine(line.decode).store.tiers)
