"""The arithmetic of the KV store's benchmarks: ratios, what an infinite cache finds, and what is a foreign hit."""

from functools import partial

import pytest

from benchmarks.comparison import compute_ratio, compute_ratios, measure_in_turns
from benchmarks.prefix import (
    BLOCK_TOKENS,
    NUM_TENANTS,
    AnsweredPrompt,
    InfiniteCache,
    SentPrompt,
    compare_with_infinite_cache,
    compute_speedups,
    generate_prompts,
)
from penstock.messages import Timings

PREFIX = list(range(100, 100 + 2 * BLOCK_TOKENS))


def seen(
    tenant: str, tokens: list[int], begun: float, first: float, cached: int = 0, prefix: int = 0
) -> AnsweredPrompt:
    return AnsweredPrompt(SentPrompt(tenant, prefix, tokens), cached, Timings(prefill_started=begun, first_token=first))


def test_ratios_are_formed_within_a_round_and_sides_take_turns() -> None:
    order = list[tuple[str, int]]()
    given = {"ours": iter([9.0, 9.0, 1.0, 2.0, 4.0]), "theirs": iter([1.0, 1.0, 2.0, 4.0, 16.0])}

    def side(name: str, number: int) -> float:
        order.append((name, number))
        return next(given[name])

    values = measure_in_turns({name: partial(side, name) for name in given}, 3, num_warm=2)
    assert values == {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 4.0, 16.0]}
    assert compute_ratios(values, "theirs", "ours") == [2.0, 2.0, 4.0]
    assert compute_ratio(values, "theirs", "ours") == 2.0
    assert order[:5] == [("ours", 0), ("theirs", 0), ("theirs", 1), ("ours", 1), ("ours", 2)]


def test_speedups_are_cold_to_hit_of_the_same_round() -> None:
    seconds = {"cold": [8.0, 24.0], "pool": [1.0, 3.0], "shm": [2.0, 6.0], "disk": [4.0, 12.0], "redis": [8.0, 48.0]}
    speedups = compute_speedups(seconds)
    assert (speedups["ttft_speedup_pool"], speedups["ttft_speedup_disk"]) == (8.0, 2.0)
    assert (speedups["ttft_speedup_redis"], speedups["ttft_speedup_redis_min"]) == (0.75, 0.5)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (PREFIX, BLOCK_TOKENS),  # the block with the last token is always computed
        ([*PREFIX, 1], 2 * BLOCK_TOKENS),
        ([*PREFIX[:BLOCK_TOKENS], 1], BLOCK_TOKENS),
        ([*PREFIX[: BLOCK_TOKENS - 1], 1, 1], 0),
        ([1, *PREFIX], 0),
    ],
)
def test_an_infinite_cache_finds_full_blocks_with_the_same_tokens_before_them(tokens: list[int], found: int) -> None:
    cache = InfiniteCache()
    cache.add_prompt(SentPrompt("a", 0, PREFIX))
    assert cache.count_cached_tokens(SentPrompt("a", 0, tokens)) == found
    assert cache.count_cached_tokens(SentPrompt("b", 0, tokens)) == 0


def test_the_infinite_cache_knows_what_was_taken() -> None:
    prompt = [*PREFIX, 1]
    hits = compare_with_infinite_cache([
        seen("a", prompt, 3.0, 4.0, 2 * BLOCK_TOKENS),
        seen("a", prompt, 1.0, 2.0),
        seen("a", prompt, 1.5, 2.5),
        seen("b", prompt, 5.0, 6.0),
    ])  # fmt: skip
    assert [one.timings.prefill_started for one in hits.seen] == [1.0, 1.5, 3.0, 5.0]
    assert hits.infinite_hits == [0, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, 0]
    assert hits.hit_rate == pytest.approx(2 * BLOCK_TOKENS / (4 * len(prompt)))
    assert hits.infinite_hit_rate == 2 * hits.hit_rate
    assert hits.num_foreign_hits == 0


def test_a_hit_before_the_tenant_had_asked_is_foreign() -> None:
    prompt = [*PREFIX, 1]
    mine, other = seen("a", prompt, 1.0, 2.0), seen("b", prompt, 3.0, 4.0, BLOCK_TOKENS)
    assert compare_with_infinite_cache([mine, other]).num_foreign_hits == 1
    assert compare_with_infinite_cache([mine, other, seen("b", prompt, 5.0, 6.0, BLOCK_TOKENS)]).num_foreign_hits == 1
    assert (
        compare_with_infinite_cache([mine, other, seen("b", prompt, 3.5, 6.0)]).num_foreign_hits == 0
    )  # the two shared what they computed


def test_the_workload_shares_prefixes_between_tenants_and_nothing_else() -> None:
    work = list(generate_prompts(500))
    assert work == list(generate_prompts(500))
    assert len({one.tenant for one in work}) == NUM_TENANTS
    by_prefix: dict[int, set[tuple[int, ...]]] = {}
    tenants: dict[int, set[str]] = {}
    for one in work:
        by_prefix.setdefault(one.prefix, set()).add(tuple(one.token_ids[: 2 * BLOCK_TOKENS]))
        tenants.setdefault(one.prefix, set()).add(one.tenant)
    assert all(len(starts) == 1 for starts in by_prefix.values())
    assert len(tenants[0]) == NUM_TENANTS
    assert len({tuple(one.token_ids[-8:]) for one in work}) == len(work)
