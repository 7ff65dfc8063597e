"""Each rule against an example that is worked out by hand from where it was published."""

import hashlib

import pytest

from penstock.bus.placement import Link, PromptChain, choose_by_hash
from penstock.engine.scheduling.cost import StepCost
from penstock.plan.placing import Beat, OwnLoad, PlacedRequest, Rule, Tier, View, WorkerSpec
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


def load(num_requests: int = 0, num_blocks: int = 0, prompt_tokens: int = 0) -> OwnLoad:
    return OwnLoad(num_requests, num_blocks=num_blocks, prompt_tokens=prompt_tokens)


@pytest.mark.parametrize(
    ("rule", "hits", "own", "chosen"),
    [
        # Its page "Routing Concepts": 2, 5 and 8 blocks cached of ten, 10, 5 and 9 to decode. 18, 10 and 11.
        (Dynamo(), [32, 80, 128], [load(0, 10), load(0, 5), load(0, 9)], 1),
        (Dynamo(), [32, 80, 128], [load(0, 10), load(0, 5, 32), load(0, 9)], 2),  # two blocks more wait there: 12
        # 128 of 160 are the threshold of 0.8. A thousand tokens a second: 18,000 are the penalty of 18 s.
        (LlmD(), [0, 128], [load(), load(0, 0, 18_000)], 1), (LlmD(), [0, 128], [load(), load(0, 0, 18_001)], 0),
        (LlmD(), [0, 127], [load(), load(0, 0, 1)], 0),
        (CacheAware(), [49, 0], [load(64), load(0)], 0),  # 49 are more than 0.3, and 64 requests not too far apart
        (CacheAware(), [49, 0], [load(65), load(0)], 1),
        (CacheAware(), [49, 0], [load(195), load(130)], 0),  # 65 more, but not more than 1.5 times
        (CacheAware(), [49, 0], [load(196), load(130)], 1),
        (CacheAware(), [48, 0], [load(1), load(0)], 1),  # no match, as 48 of 160 are not more than 0.3
        (LeastWorkLeft(), [96, 0], [load(0, 0, 100), load(0, 0, 20)], 0),  # 100 + 64 against 20 + 160
        (LeastWorkLeft(), [64, 0], [load(0, 0, 100), load(0, 0, 20)], 1),  # 100 + 96 against 20 + 160
        (LeastWorkLeft(), [64, 0], [load(2, 0, 64), load(1)], 1),  # the same work, fewer requests
        *((one, [0, 144, 0], None, 1) for one in (Dynamo(), LlmD(), CacheAware(), LeastWorkLeft(), Mooncake())),
    ],
)  # fmt: skip
def test_a_rule_chooses_by_what_is_cached_and_its_own_load(
    rule: Rule, hits: list[int], own: list[OwnLoad] | None, chosen: int
) -> None:
    assert rule.choose_worker(PROMPT, make_view(hits, own)) == chosen


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    # By the paper's algorithm 1, with ten milliseconds a block by transfer and 16 to compute one. The best match is
    # eight blocks. The first worker has it: its queue + 32 ms. The second has five, less than twice fewer: it
    # computes, its queue + 80 ms. The third has none: it fetches eight, its queue + 80 + 32 ms.
    [([0, 0, 0], 0), ([49, 0, 0], 1), ([90, 40, 0], 2), ([90, 30, 0], 1)],
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
    speed = SPEC.cost.describe_speed([], SPEC.max_step_tokens)
    view.beats = [Beat(1.0, 607 if one == home else 0, speed=speed) for one in range(4)]
    assert rule.choose_worker(PROMPT, view) == home, "607 + 32 - 480 are less than 160"
    view.beats = [Beat(1.0, 609 if one == home else 0, speed=speed) for one in range(4)]
    assert rule.choose_worker(PROMPT, view) != home
    slow, view.now_s = speed._replace(prompt_token_s=15 * speed.prompt_token_s), 2.0
    view.beats = [Beat(2.0, 0, speed=slow if one == home else speed) for one in range(4)]
    assert rule.choose_worker(PROMPT, view) == home, "15 * 32 - 480 are less than 32"
    view.now_s = 3.0
    view.beats = [Beat(3.0, 3, speed=slow if one == home else speed) for one in range(4)]
    assert rule.choose_worker(PROMPT, view) != home, "15 * 35 - 480 are more than 35"
    view.now_s = 6.1
    assert rule.choose_worker(PROMPT, view) == choose_by_hash(b"chat", range(4)), "its heartbeats are too old"
