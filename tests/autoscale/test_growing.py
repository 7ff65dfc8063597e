"""The controller in the simulator: the load that a planner without a queue in its sight does not carry."""

from benchmarks.roles import play_dynamo


def test_a_burst_that_one_worker_cannot_carry_is_carried() -> None:
    """dynamo#10528, scaled to one simulated worker: its planner stayed at one, and first tokens took ten seconds."""
    assert play_dynamo()["slo_attainment_dynamo_10528"] >= 0.95
