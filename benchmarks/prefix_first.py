"""Time to first token through a prefill worker, with the prefix in one tier or another: `benchmarks.prefix`."""

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis
from rich.progress import track

from benchmarks.common import SHM, TIMEOUT_S
from benchmarks.peers.shapes import SHAPES
from benchmarks.systems import open_shape
from penstock.bus.connect import connect_bus
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, KVSettings, RecordSettings
from penstock.engine.engine import Engine
from penstock.engine.serving import open_serving_engine
from penstock.local.valkey import ValkeyServer
from penstock.messages import Job, decode_message
from penstock.names import Pipeline
from penstock.prefill_worker.role import PrefillRole
from penstock.record import Record
from penstock.worker.worker import Worker

PREFIX_TOKENS, OWN = 2000, 24
"""Tokens that requests share, and tokens of their own."""
TIERS = ("pool", "shm", "disk", "redis")
_SHORT_NAMES = {"shared": "shm"}


@dataclass(frozen=True)
class FirstToken:
    """The first token of one request."""

    seconds: float
    """From before its submission until it was in the log."""
    prompt_tokens: int
    cached_tokens: int
    decision: str
    """What the store fetched, and what it considered not worth fetching."""


class PrefillSide:
    """A prefill worker in this process. It ends with `exits`."""

    def __init__(self, exits: contextlib.ExitStack, addresses: Addresses, engine: Engine, kv: KVSettings) -> None:
        self._pipeline = Pipeline(addresses.pipeline)
        self._bus = connect_bus(addresses, BusSettings())
        self._bus.create_topics()
        self.engine = engine
        engine.pool_mapping.wait_until_done()
        serving = exits.enter_context(open_serving_engine(engine, kv, addresses.stream_url, addresses.pipeline))
        self.store = serving.store
        record = Record(
            exits.enter_context(redis.Redis.from_url(addresses.stream_url)), self._pipeline, RecordSettings()
        )
        self._client = exits.enter_context(Client(addresses))
        member = self._bus.join_group("prefill", "prefill-0")
        self._worker = Worker(PrefillRole(self._pipeline, serving), self._pipeline, "prefill-0", record, member)
        exits.callback(self._worker.close)

    def measure_first_token(self, token_ids: list[int]) -> FirstToken:
        """Submit a prompt, and run the worker until the request is handed off."""
        skipped = self.store.stats.not_worth
        read = {tier.name: tier.counters.hits for tier in self.store.tiers}
        begun_s = time.time()
        request_id = self._client.submit(token_ids=token_ids, max_tokens=2, temperature=0.0, ignore_eos=True)
        job = self._run_until_handed_off(request_id)
        fetched = {tier.name: tier.counters.hits - read[tier.name] for tier in self.store.tiers}
        parts = [f"{count} blocks from {_SHORT_NAMES.get(name, name)}" for name, count in fetched.items() if count]
        parts += [f"{count} not worth fetching" for count in (self.store.stats.not_worth - skipped,) if count]
        taken_s = job.timings.first_token - begun_s
        return FirstToken(taken_s, len(token_ids), job.cached_tokens, ", ".join(parts) or "nothing fetched")

    def _run_until_handed_off(self, request_id: str) -> Job:
        """Run the worker until the request's job is published and all its blocks are written."""
        worker, end_s, begun = self._worker, time.monotonic() + TIMEOUT_S, False
        while not begun or worker.running or not worker.is_settled():
            worker.run_once()
            begun = begun or request_id in worker.running
            if time.monotonic() > end_s:
                raise TimeoutError(f"{request_id} was not handed off")
        messages = self._bus.read_all(self._pipeline.job_topic("interactive"))
        jobs = (decode_message(Job, message.value) for message in messages)
        return next(job for job in jobs if job.id == request_id)

    def keep_only_in(self, tier: str, token_ids: list[int]) -> None:
        """Remove the prefix from the tiers above this one. Raises `RuntimeError` if this one lacks it."""
        keys = self._list_keys(token_ids)
        if tier != "pool":
            pool = self.engine.pool
            pool.free_blocks(pool.allocate_blocks(pool.num_free_blocks))  # what was cached is not kept
        for one in self.store.tiers:
            if _SHORT_NAMES.get(one.name, one.name) == tier and not all(one.has_blocks(keys)):
                raise RuntimeError(f"not all of the prefix is in {tier}")
        for above in self.store.tiers[: max(0, TIERS.index(tier) - 1)]:
            above.remove_blocks(keys)

    def remove_prefix(self, token_ids: list[int]) -> None:
        """Remove a prefix from all tiers below the pool."""
        for tier in self.store.tiers:
            tier.remove_blocks(self._list_keys(token_ids))

    def _list_keys(self, token_ids: list[int]) -> list[bytes]:
        return [name.hash for name in self.store.make_hasher("default").hash_full_blocks(token_ids)]

    def describe_costs(self) -> str:
        """Return the costs that the store has measured for its tiers and the engine, as text."""
        compute_s = self.store.layout.block_size / (self.engine.prefill_tokens_per_s() or float("inf"))
        speeds = {tier.name: self.store.cost.tier_speed(tier.name).block_s or 0.0 for tier in self.store.tiers}
        told = ", ".join(f"{_SHORT_NAMES.get(name, name)} {block_s * 1000:.2f}" for name, block_s in speeds.items())
        return f"ms a block: {told}; computed {compute_s * 1000:.1f}"


@contextlib.contextmanager
def open_prefill_side(shape: str, tier_mb: int) -> Iterator[PrefillSide]:
    """Start a worker on tiers of its own, of so many MB each, warmed up."""
    engine = open_shape(shape, threads=2, pool_mb=tier_mb, max_step_tokens=512)
    with contextlib.ExitStack() as exits:
        memory = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-prefix-", dir=SHM))
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-prefix-")))
        server = exits.enter_context(ValkeyServer(directory / "valkey", appendonly=False))
        kv = KVSettings(shared_mb=tier_mb, shared_dir=memory, disk_mb=tier_mb, disk_dir=str(directory / "blocks"),
                        redis_mb=tier_mb)  # fmt: skip
        yield PrefillSide(exits, Addresses(pipeline="benchmark", stream_url=server.url), engine, kv)


def measure_first(rounds: int, shape: str, tier_mb: int) -> dict[str, list[FirstToken]]:
    """Measure cold, then a hit in each tier, in every round, after a shorter round to warm up."""
    measured: dict[str, list[FirstToken]] = {side: [] for side in ("cold", *TIERS)}
    with open_prefill_side(shape, tier_mb) as worker:
        vocabulary = SHAPES[shape].vocabulary

        def tokens(name: str, count: int) -> list[int]:
            chance = random.Random(name)
            return [chance.randrange(300, vocabulary) for _ in range(count)]

        for number in track(range(rounds + 1), "first tokens", transient=True):
            prefix = tokens(f"prefix {number}", PREFIX_TOKENS if number else PREFIX_TOKENS // 4)
            found = {"cold": worker.measure_first_token(prefix + tokens(f"{number} cold", OWN))}
            for tier in (*TIERS[number % len(TIERS) :], *TIERS[: number % len(TIERS)]):
                worker.keep_only_in(tier, prefix)
                found[tier] = worker.measure_first_token(prefix + tokens(f"{number} {tier}", OWN))
            worker.remove_prefix(prefix)
            for side, one in found.items() if number else ():
                measured[side].append(one)
        print(worker.describe_costs())
    return measured
