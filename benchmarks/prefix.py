"""What the KV store saves: time to first token with a shared prefix, and how many tokens of many requests it finds.

python -m benchmarks.prefix [--quick | --smoke] [--json FILE]

**Time to first token.** The 0.6B shape in bf16 with random weights, two threads, a worker's engine over a store in
shared memory, on disk and in a real Valkey. In each round a new prefix of 2,000 tokens is asked for once cold, then
with its blocks in the pool, and then in one tier only: those above have lost them. The order of the tiers turns from
round to round. Whether to fetch or to compute is the store's own decision, by the speeds it has measured.

**Hit rate.** Two prefill and two decode workers as processes on the demo model; tenants that share a set of prefixes,
drawn by zipf, each request with an end of its own. Tokens that were found, against what an infinite cache with the same
block size would have found: every full block of a prompt but the one with its last token that any request of the tenant
had which prefill took earlier, also one that was still being computed. No request may find anything before its tenant
had asked for it.
"""

import contextlib
import itertools
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.comparison import Rounds, compute_ratios, draw_boxes, print_table
from benchmarks.peers.shapes import SHAPES
from benchmarks.systems import (
    DEMO_ENVIRONMENT,
    answer_prompt,
    answer_requests,
    draw_tokens,
    make_request,
    open_shape,
    open_stack,
)
from penstock.client.sync import Client
from penstock.config.settings import KVSettings
from penstock.engine.engine import Engine
from penstock.engine.opening import open_serving_engine
from penstock.engine.serving import ServingEngine
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from penstock.messages import Timings

PREFIX_TOKENS, OWN = 2000, 24
"""Tokens that requests share, and tokens of their own."""
COLD_SIDE, TIERS = "cold", ("pool", "shm", "disk", "redis")
_STORE_NAMES = {"shm": "shared"}
BLOCK_TOKENS, NUM_TENANTS, NUM_PREFIXES, PREFIX_BLOCKS = 16, 8, 40, (3, 12)
OWN_TOKENS = (8, 40)
"""Tokens that a request of a tenant does not share."""
MAX_OPEN_REQUESTS, ANSWER_TOKENS = 8, 2


@contextlib.contextmanager
def open_engine_over_tiers(shape: str, tier_mb: int) -> Iterator[ServingEngine]:
    """Open an engine over tiers of its own, of so many MB each."""
    engine = open_shape(shape, threads=2, pool_mb=tier_mb, max_step_tokens=512)
    engine.pool_mapping.wait_until_done()
    with contextlib.ExitStack() as exits:
        memory = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-prefix-", dir=SHM))
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-prefix-")))
        server = exits.enter_context(ValkeyServer(directory / "valkey", appendonly=False))
        kv = KVSettings(shared_mb=tier_mb, shared_dir=memory, disk_mb=tier_mb, disk_dir=str(directory / "blocks"),
                        redis_mb=tier_mb)  # fmt: skip
        yield exits.enter_context(open_serving_engine(engine, kv, server.url, "benchmark"))


def keep_only_in(serving: ServingEngine, tier: str, keys: list[bytes]) -> None:
    """Remove the prefix from the tiers above this one. Raises `RuntimeError` if this one lacks it."""
    assert isinstance(serving.core, Engine)
    pool, tiers = serving.core.pool, serving.store.tiers
    if tier != "pool":
        pool.free_blocks(pool.allocate_blocks(pool.num_free_blocks))  # what was cached is not kept
    for one in tiers:
        if one.name == _STORE_NAMES.get(tier, tier) and not all(one.has_blocks(keys)):
            raise RuntimeError(f"not all of the prefix is in {tier}")
    for above in tiers[: max(0, TIERS.index(tier) - 1)]:
        above.remove_blocks(keys)


def measure_first(rounds: int, shape: str, tier_mb: int) -> dict[str, list[float]]:
    """Measure cold, then a hit in each tier, in every round, after a shorter round to warm up."""
    measured: dict[str, list[float]] = {side: [] for side in (COLD_SIDE, *TIERS)}
    vocabulary = range(300, SHAPES[shape].vocabulary)
    with open_engine_over_tiers(shape, tier_mb) as serving:
        for number in track(range(rounds + 1), "first tokens", transient=True):
            prefix = draw_tokens(random.Random(f"prefix {number}"), PREFIX_TOKENS if number else 500, vocabulary)
            keys = [key.hash for key in serving.hash_prompt("bench", prefix).hasher.hash_full_blocks(prefix)]
            at = number % len(TIERS)
            for side in (COLD_SIDE, *TIERS[at:], *TIERS[:at]):
                if side != COLD_SIDE:
                    keep_only_in(serving, side, keys)
                own = draw_tokens(random.Random(f"{number} {side}"), OWN, vocabulary)
                seconds, _, num_found = answer_prompt(serving, prefix + own, f"{number} {side}")
                print(f"{side}: {num_found} of {len(prefix) + OWN} tokens found in {seconds * 1000:.0f} ms")
                if number:
                    measured[side].append(seconds)
            for tier in serving.store.tiers:
                tier.remove_blocks(keys)
    return measured


@dataclass(frozen=True)
class SentPrompt:
    """The prompt of one request."""

    tenant: str
    prefix: int
    token_ids: list[int]


@dataclass(frozen=True)
class AnsweredPrompt:
    """A request and what was found for it."""

    asked: SentPrompt
    cached_tokens: int
    timings: Timings


@dataclass(frozen=True)
class Hits:
    """Tokens found, in the run and by an infinite cache."""

    seen: Sequence[AnsweredPrompt]
    """In the order in which prefill took them."""
    infinite_hits: Sequence[int]
    """For each request, the tokens that an infinite cache has that learns a prompt when prefill takes it."""

    @property
    def hit_rate(self) -> float:
        """The share of all prompt tokens that was found."""
        return self._compute_share([one.cached_tokens for one in self.seen])

    @property
    def infinite_hit_rate(self) -> float:
        """The share that the infinite cache would have found."""
        return self._compute_share(self.infinite_hits)

    @property
    def num_foreign_hits(self) -> int:
        """Requests that found something although no other request of their tenant had begun with that prefix."""
        groups: dict[tuple[str, int], list[AnsweredPrompt]] = {}
        for one in self.seen:
            groups.setdefault((one.asked.tenant, one.asked.prefix), []).append(one)
        return sum(
            one.cached_tokens > 0
            and not any(other.timings.prefill_started < one.timings.first_token for other in group if other is not one)
            for group in groups.values()
            for one in group
        )

    def _compute_share(self, tokens: Sequence[int]) -> float:
        return sum(tokens) / sum(len(one.asked.token_ids) for one in self.seen)


class InfiniteCache:
    """Every block that every tenant ever had, by all tokens up to its end."""

    def __init__(self) -> None:
        self._blocks: set[tuple[str, tuple[int, ...]]] = set()

    def count_cached_tokens(self, asked: SentPrompt) -> int:
        """Return how many tokens of the prompt it has; the last one is never among them."""
        keys = itertools.takewhile(self._blocks.__contains__, self._make_keys(asked, len(asked.token_ids) - 1))
        return sum(1 for _ in keys) * BLOCK_TOKENS

    def add_prompt(self, asked: SentPrompt) -> None:
        """Add the prompt's full blocks."""
        self._blocks |= {*self._make_keys(asked, len(asked.token_ids))}

    @staticmethod
    def _make_keys(asked: SentPrompt, length: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield what names each full block of so many tokens."""
        for end in range(BLOCK_TOKENS, length + 1, BLOCK_TOKENS):
            yield asked.tenant, tuple(asked.token_ids[:end])


def compare_with_infinite_cache(seen: Sequence[AnsweredPrompt]) -> Hits:
    """Return what was found, beside what an infinite cache would have found."""
    taken, cache, found = sorted(seen, key=lambda one: one.timings.prefill_started), InfiniteCache(), []
    for one in taken:
        found.append(cache.count_cached_tokens(one.asked))
        cache.add_prompt(one.asked)
    return Hits(taken, found)


def generate_prompts(count: int) -> Iterator[SentPrompt]:
    """Yield prompts of random tenants, with prefixes by zipf: the second is half as frequent as the first."""
    chance = random.Random(7)
    lengths = chance.choices(range(*PREFIX_BLOCKS), k=NUM_PREFIXES)
    prefixes = [draw_tokens(chance, blocks * BLOCK_TOKENS) for blocks in lengths]
    weights = [1 / rank for rank in range(1, NUM_PREFIXES + 1)]
    for _ in range(count):
        (prefix,) = chance.choices(range(NUM_PREFIXES), weights)
        own = draw_tokens(chance, chance.randint(*OWN_TOKENS))
        yield SentPrompt(f"tenant-{chance.randrange(NUM_TENANTS)}", prefix, prefixes[prefix] + own)


def measure_hits(how: type[Stack], count: int) -> Hits:
    """Measure with two workers a stage, as processes; a few requests are under way at a time."""
    environment = DEMO_ENVIRONMENT | {"PENSTOCK_ENGINE_BLOCK_SIZE": str(BLOCK_TOKENS)}
    work = list(generate_prompts(count))
    requests = [make_request(one.token_ids, ANSWER_TOKENS, tenant=one.tenant) for one in work]
    with (
        open_stack(how, environment, pipeline="hits", prefill=2, decode=2) as stack,
        Client(stack.addresses) as client,
    ):
        answers = track(answer_requests(client, requests, MAX_OPEN_REQUESTS), "hit rate", count, transient=True)
        return compare_with_infinite_cache([
            AnsweredPrompt(asked, answer.usage.cached_tokens, answer.timings)
            for asked, (_, answer) in zip(work, answers, strict=True)
        ])  # fmt: skip


def compute_speedups(seconds: Rounds) -> dict[str, float]:
    """Return cold to hit, within a round; the median of the rounds, and the smallest."""
    figures: dict[str, float] = {}
    for tier in TIERS:
        ratios = compute_ratios(seconds, COLD_SIDE, tier)
        figures |= {f"ttft_speedup_{tier}": statistics.median(ratios), f"ttft_speedup_{tier}_min": min(ratios)}
    return figures


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    seconds = measure_first(*given.choose_size((8, "q06", 1024), (1, "q06", 1024), (1, "smoke", 64)))
    print_table(seconds, "ms to the first token; 0.6B shape, bf16", 1000)
    hits = measure_hits(given.choose_stack(), given.choose_size(2000, 200, 10))
    if given.is_full:
        milliseconds = {side: [one * 1000 for one in found] for side, found in seconds.items()}
        draw_boxes("prefix", {"first token, shared prefix of 2,000 tokens, ms": milliseconds}, xscale="log")
    return compute_speedups(seconds) | {
        "hit_rate": hits.hit_rate,
        "hit_rate_infinite": hits.infinite_hit_rate,
        "hit_rate_gap_points": 100 * (hits.infinite_hit_rate - hits.hit_rate),
        "cross_tenant_hits": hits.num_foreign_hits,
    }


if __name__ == "__main__":
    run_benchmark(__doc__, run)
