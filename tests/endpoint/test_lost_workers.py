"""Endpoint workers on real servers are lost in the middle of answers."""

import pytest

from penstock.config.settings import RecordSettings
from penstock.worker.worker import Worker
from sim.endpoint import CountingEndpoint, Fault, write_numbers
from tests.endpoint.conftest import MakeEndpointPipeline


@pytest.mark.parametrize("bus", ["embedded", "kafka"])
def test_on_real_servers_workers_are_lost_in_the_middle(make_pipeline: MakeEndpointPipeline, bus: str) -> None:
    """Twenty requests, and their worker lost twice."""
    pipeline = make_pipeline(bus)
    with CountingEndpoint(pause_s=0.02) as endpoint:
        worker = pipeline.add_worker(endpoint, max_requests=20)
        sent = {pipeline.send(max_tokens=20).id for _ in range(20)}
        for _ in range(2):
            pipeline.run_until(lambda: any(task.log_events for task in worker.running.values()))  # noqa: B023
            pipeline.kill(worker)
            worker = pipeline.add_worker(endpoint, max_requests=20)
        results = pipeline.run_until_results(20)
        pipeline.run_until(worker.is_settled)
    assert {result.id for result in results} == sent
    assert len(pipeline.read_results()) == 20
    assert {(result.text, result.error) for result in results} == {(write_numbers(20), None)}


def test_who_ends_each_worker_behind_one_piece_is_given_up(make_pipeline: MakeEndpointPipeline) -> None:
    """The first attempt brought more than none; those after it brought no more than that one."""
    pipeline = make_pipeline("embedded")
    pipeline.record_settings = RecordSettings(lease_s=0.3, max_attempts=3)
    num_killed = 0
    with CountingEndpoint() as endpoint:
        endpoint.faults.extend([Fault("hang", after=1)] * 40)
        pipeline.send(max_tokens=20)
        while not pipeline.read_results():
            worker = pipeline.add_worker(endpoint)

            def has_a_piece(worker: Worker = worker) -> bool:
                return any(task.claim.num_tokens > task.claim.num_found_tokens for task in worker.running.values())

            pipeline.run_until(lambda: has_a_piece() or pipeline.read_results())
            if worker.running:
                pipeline.kill(worker)
                num_killed += 1
    (result,) = pipeline.read_results()
    assert result.error is not None
    assert result.error.code == "attempts_exhausted"
    assert result.text == write_numbers(num_killed)
    assert num_killed == 4
