"""Placement beside workers that are not equally fast, in virtual time."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from zlib import crc32

import pytest

from benchmarks import placement_sides
from benchmarks.placement import BLOCK_TOKENS, COST, ITL_S, SPEC, make_tiers
from penstock.bus.placement import CHARS_PER_TOKEN, Link
from penstock.engine.scheduling.cost import StepCost
from penstock.plan.placing import PlacedRequest, WorkerSpec
from penstock.plan.simulator import Simulation
from penstock.plan.trace import compute_quantile
from sim.placement.pull import PullSimulation
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
    traces = [make_requests(SHAPES[trace], 4.0, 140.0, BLOCK_TOKENS, seed=seed) for seed in (3, 4)]
    shares = [play_beside_a_slow_worker([tell_characters(one, ratios) for one in requests]) for requests in traces]
    assert statistics.fmean(shares) >= 0.99


def make_spec(slowness: float) -> WorkerSpec:
    """Return a worker of `benchmarks.placement_run`."""
    cost = {name: None if one is None else slowness * one for name, one in asdict(placement_sides.COST).items()}
    sides = placement_sides
    return WorkerSpec(StepCost(**cost), 5000, sides.BLOCK_TOKENS, sides.MAX_BATCH, sides.MAX_STEP_TOKENS)  # type: ignore[arg-type]


def test_where_workers_pull_a_slow_one_leaves_what_comes_sooner_elsewhere() -> None:
    """As `benchmarks.placement_run --slow 4 --quick` plays it on Redis Streams."""
    trace = [ask.placed for ask in placement_sides.make_trace(placement_sides.Shape(50, 16.0, 3.0, 8))]
    late, p99_s = dict[bool, int](), dict[bool, float]()
    for leaves in (False, True):
        outcomes = PullSimulation([*[make_spec(1.0)] * 3, make_spec(4.0)], leaves=leaves).run(trace)
        late[leaves] = sum(one.ttft_s > 1.0 for one in outcomes)
        p99_s[leaves] = compute_quantile([one.ttft_s for one in outcomes], 0.99)
    assert late[True] <= late[False] / 2
    assert p99_s[True] <= 0.8 * p99_s[False]
    assert sum(one.worker == 3 for one in outcomes) > 0, "it takes its part of what waits for long"


def test_where_workers_pull_equal_ones_leave_nothing_and_a_slow_one_alone_takes_all() -> None:
    trace = [ask.placed for ask in placement_sides.make_trace(placement_sides.Shape(10, 8.0, 3.0, 2))]
    for specs in ([make_spec(1.0)] * 4, [make_spec(4.0)]):
        played = [PullSimulation(specs, leaves=leaves).run(trace) for leaves in (False, True)]
        assert played[0] == played[1]
