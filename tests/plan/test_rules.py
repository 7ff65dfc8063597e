"""Each rule against an example that is worked out by hand from where it was published."""

from penstock.bus.affinity import rank_partitions
from penstock.engine.cost import StepCost
from penstock.plan.placing import Beat, OwnLoad, PlacedRequest, RoundRobin, Tier, View, WorkerSpec
from sim.placement.rules import Hash

SPEC = WorkerSpec(
    StepCost(fixed_s=0.0, row_s=0.0, context_s=0.0, chunk_s=0.0, token_s=0.001), num_blocks=1000, max_step_tokens=1000
)
"""A thousand prompt tokens a second."""
PROMPT = PlacedRequest("r", 0.0, 160, 10, affinity="a", home="chat")
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
    assert [rule.choose(PROMPT, make_view([0] * 3)) for _ in range(4)] == [0, 1, 2, 0]


def test_hash_is_that_of_the_product() -> None:
    rule, first = Hash(), rank_partitions("a", 3)[0]
    assert [rule.choose(PROMPT, make_view([0] * 3)) for _ in range(8)] == [first] * 8
