"""Placement beside workers that are not equally fast, in virtual time."""

from dataclasses import replace

import pytest

from benchmarks.placement import BLOCK_TOKENS, COST, ITL_S, SPEC, make_tiers
from penstock.engine.scheduling.cost import StepCost
from penstock.plan.simulator import Simulation
from sim.placement.rules import RULES
from sim.placement.traces import SHAPES, make_requests


@pytest.mark.parametrize("rate", [2.5, 4.0])
@pytest.mark.parametrize("trace", ["one_system_prompt", "skewed"])
def test_a_worker_that_is_four_times_slower_makes_no_request_late(trace: str, rate: float) -> None:
    """One of four workers, and two gateways that do not talk. A first token may take 4 s, others 0.2 s on the mean."""
    simulation = Simulation({"auto": (4, SPEC)}, [RULES["ours"]() for _ in range(2)], make_tiers())
    last, slowness = simulation.readers[-1], 4.0
    last.scheduler.cost = StepCost(
        slowness * COST.fixed_s, slowness * COST.row_s, slowness * COST.context_s, 0.0, slowness * COST.token_s
    )
    last.spec = replace(SPEC, cost=last.scheduler.cost)
    requests = make_requests(SHAPES[trace], rate, 140.0, BLOCK_TOKENS, seed=3)
    counted = [one for one in simulation.run(requests) if one.request.at_s >= 40.0]
    in_time = sum(one.ttft_s <= 4.0 and one.itl_s <= ITL_S for one in counted)
    assert in_time >= 0.99 * len(counted)
