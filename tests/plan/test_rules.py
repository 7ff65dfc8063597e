"""Each rule against an example that is worked out by hand from where it was published."""

import hashlib

import pytest

from penstock.bus.placement import Link, PromptChain, choose_by_hash
from penstock.engine.cost import StepCost
from penstock.plan.placing import Beat, OwnLoad, PlacedRequest, RoundRobin, Rule, Tier, View, WorkerSpec
from sim.placement.rules import CacheAware, Dynamo, Hash, LeastWorkLeft, LlmD, Mooncake, Placed

SPEC = WorkerSpec(
    StepCost(fixed_s=0.0, row_s=0.0, context_s=0.0, chunk_s=0.0, token_s=0.001), num_blocks=1000, max_step_tokens=1000
)
"""A thousand prompt tokens a second."""
CHAIN = PromptChain("interactive", b"chat", (Link(b"a", 64), Link(b"b", 128)), 160, is_tokens=True)
PROMPT = PlacedRequest("r", 0.0, 160, 10, chain=CHAIN)
"""Ten blocks."""


def make_view(
    hits: list[int], own: list[OwnLoad] | None = None, waiting: list[int] | None = None, tier: Tier | None = None
) -> View:
    view = View(len(hits), SPEC, tier, memory_s=60.0)
    view.hits, view.own = hits, own or view.own
    view.beats = [Beat(0.0, tokens) for tokens in waiting or [0] * len(hits)]
    return view


def test_round_robin_takes_each_in_turn() -> None:
    rule = RoundRobin()
    assert [rule.choose_worker(PROMPT, make_view([0] * 3)) for _ in range(4)] == [0, 1, 2, 0]


def test_hash_gives_a_hot_beginning_more_workers_in_turn() -> None:
    rule, first = Hash(), choose_by_hash(b"a", range(4))
    second = choose_by_hash(b"a", [one for one in range(4) if one != first])
    view = make_view([0] * 4)
    assert [rule.choose_worker(PROMPT, view) for _ in range(15)] == [first] * 15, "the only chat is not hot"
    assert {rule.choose_worker(PROMPT, view) for _ in range(8)} == {first, second}
    assert {rule.choose_worker(PROMPT, view) for _ in range(32)} == {0, 1, 2, 3}
    named = PlacedRequest("s", 0.0, 160, 10, session="s", chain=CHAIN)
    assert rule.choose_worker(named, view) == choose_by_hash(b"chat", range(4)), "a session counts more"
    view.now_s = 100.0
    assert rule.choose_worker(PROMPT, view) == first


def test_dynamo_adds_blocks_to_compute_and_blocks_of_requests() -> None:
    # Its page "Routing Concepts": 2, 5 and 8 blocks cached of ten, 10, 5 and 9 to decode. 18, 10 and 11: the second.
    own = [OwnLoad(num_blocks=blocks) for blocks in (10, 5, 9)]
    assert Dynamo().choose_worker(PROMPT, make_view([32, 80, 128], own)) == 1
    own[1].prompt_tokens = 32  # two blocks more wait there: 12
    assert Dynamo().choose_worker(PROMPT, make_view([32, 80, 128], own)) == 2


def test_llm_d_leaves_who_has_the_prompt_for_eighteen_seconds_alone() -> None:
    # 128 of 160 are the threshold of 0.8. A thousand tokens a second: 18,000 are the penalty of 18 s.
    assert LlmD().choose_worker(PROMPT, make_view([0, 128], [OwnLoad(), OwnLoad(prompt_tokens=18_000)])) == 1
    assert LlmD().choose_worker(PROMPT, make_view([0, 128], [OwnLoad(), OwnLoad(prompt_tokens=18_001)])) == 0
    assert LlmD().choose_worker(PROMPT, make_view([0, 127], [OwnLoad(), OwnLoad(prompt_tokens=1)])) == 0


@pytest.mark.parametrize(
    ("hits", "loads", "chosen"),
    [
        ([49, 0], (64, 0), 0),  # 49 of 160 are more than 0.3, and 64 requests are not too far apart
        ([49, 0], (65, 0), 1),
        ([49, 0], (195, 130), 0),  # 65 more, but not more than 1.5 times
        ([49, 0], (196, 130), 1),
        ([48, 0], (1, 0), 1),  # no match, as 48 of 160 are not more than 0.3
    ],
)
def test_cache_aware_balances_what_is_far_apart(hits: list[int], loads: tuple[int, int], chosen: int) -> None:
    assert CacheAware().choose_worker(PROMPT, make_view(hits, [OwnLoad(number) for number in loads])) == chosen


def test_least_work_left_adds_what_is_uncached() -> None:
    own = [OwnLoad(prompt_tokens=100), OwnLoad(prompt_tokens=20)]
    assert LeastWorkLeft().choose_worker(PROMPT, make_view([96, 0], own)) == 0, "100 + 64 against 20 + 160"
    assert LeastWorkLeft().choose_worker(PROMPT, make_view([64, 0], own)) == 1, "100 + 96 against 20 + 160"
    own = [OwnLoad(2, prompt_tokens=64), OwnLoad(1)]
    assert LeastWorkLeft().choose_worker(PROMPT, make_view([64, 0], own)) == 1, "the same work, fewer requests"


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        # By the paper's algorithm 1, with ten milliseconds a block by transfer and 16 to compute one. The best match is
        # eight blocks. The first worker has it: its queue + 32 ms. The second has five, less than twice fewer: it
        # computes, its queue + 80 ms. The third has none: it fetches eight, its queue + 80 + 32 ms.
        ([0, 0, 0], 0),
        ([49, 0, 0], 1),  # 81, 80, 112 ms
        ([90, 40, 0], 2),  # 122, 120, 112 ms
        ([90, 30, 0], 1),  # 122, 110, 112 ms
    ],
)
def test_mooncake_fetches_where_the_match_is_much_shorter(waiting: list[int], chosen: int) -> None:
    tier = Tier(bytes_per_s=100.0, fixed_s=0.0, block_bytes=1, num_blocks=0)
    assert Mooncake().choose_worker(PROMPT, make_view([128, 80, 0], waiting=waiting, tier=tier)) == chosen


def test_ours_is_that_of_the_product() -> None:
    """What is cached it knows by itself, and what waits by heartbeats."""
    rule, view = Placed(), make_view([0] * 4)
    home = rule.choose_worker(PROMPT, view)
    assert home == min(range(4), key=lambda one: hashlib.sha256(b"chat" + str(one).encode()).digest())
    view.now_s = 1.0
    view.beats = [Beat(1.0, 607 if one == home else 0) for one in range(4)]
    assert rule.choose_worker(PROMPT, view) == home, "607 + 32 - 480 are less than 160"
    view.beats = [Beat(1.0, 609 if one == home else 0) for one in range(4)]
    assert rule.choose_worker(PROMPT, view) != home
    view.now_s = 4.1
    assert rule.choose_worker(PROMPT, view) == choose_by_hash(b"chat", range(4)), "its heartbeats are too old"


@pytest.mark.parametrize("rule", [Dynamo(), LlmD(), CacheAware(), LeastWorkLeft(), Mooncake()])
def test_all_go_to_an_idle_worker_that_has_the_prompt(rule: Rule) -> None:
    assert rule.choose_worker(PROMPT, make_view([0, 144, 0])) == 1
