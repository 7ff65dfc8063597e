"""Placement beside workers that are not equally fast, in virtual time."""

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

import pytest

from benchmarks.placement import BLOCK_TOKENS, COST, ITL_S, SPEC, make_tiers
from penstock.bus.placement import CHARS_PER_TOKEN, Link
from penstock.engine.scheduling.cost import StepCost
from penstock.plan.placing import PlacedRequest
from penstock.plan.simulator import Simulation
from sim.placement.rules import RULES
from sim.placement.traces import SHAPES, make_requests


def play_beside_a_slow_worker(requests: Sequence[PlacedRequest]) -> float:
    """Return the share in time of the requests after 40 s, where one of four workers is four times slower.

    There are two gateways that do not talk. A first token may take 4 s, others 0.2 s on the mean.
    """
    simulation = Simulation({"auto": (4, SPEC)}, [RULES["ours"]() for _ in range(2)], make_tiers())
    last, slowness = simulation.readers[-1], 4.0
    last.scheduler.cost = StepCost(
        slowness * COST.fixed_s, slowness * COST.row_s, slowness * COST.context_s, 0.0, slowness * COST.token_s
    )
    last.spec = replace(SPEC, cost=last.scheduler.cost)
    counted = [one for one in simulation.run(requests) if one.request.at_s >= 40.0]
    return sum(one.ttft_s <= 4.0 and one.itl_s <= ITL_S for one in counted) / len(counted)


def tell_characters(request: PlacedRequest, ratios: Sequence[float]) -> PlacedRequest:
    """Return the request with a prompt of which a producer knows the characters, so many a token as its chat has."""
    chain, ratio = request.chain, ratios[crc32(request.id.rpartition(".")[0].encode()) % len(ratios)]
    assert chain is not None
    links = tuple(Link(link.digest, round(link.length * ratio)) for link in chain.links)
    return replace(request, chain=replace(chain, links=links, length=round(chain.length * ratio), is_tokens=False))


@pytest.mark.parametrize("rate", [2.5, 4.0])
@pytest.mark.parametrize("trace", ["one_system_prompt", "skewed"])
def test_a_worker_that_is_four_times_slower_makes_no_request_late(trace: str, rate: float) -> None:
    assert play_beside_a_slow_worker(make_requests(SHAPES[trace], rate, 140.0, BLOCK_TOKENS, seed=3)) >= 0.99


@pytest.mark.parametrize("trace", ["one_system_prompt", "skewed"])
def test_characters_place_as_tokens_do_where_chats_have_five_times_more_a_token_than_others(trace: str) -> None:
    ratios = CHARS_PER_TOKEN * 5 / 3, CHARS_PER_TOKEN / 3  # on the mean what producers reckon with
    requests = make_requests(SHAPES[trace], 4.0, 140.0, BLOCK_TOKENS, seed=3)
    assert play_beside_a_slow_worker([tell_characters(one, ratios) for one in requests]) >= 0.99
