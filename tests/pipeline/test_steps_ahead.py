"""A device computes the next step while the tokens of the last one are handled: answers are the same."""

from collections.abc import Callable

import pytest

from penstock.config.settings import RecordSettings
from penstock.messages import Sampling
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, core_of, run_until_running
from sim.workload import compute_answers, make_requests


def compute_ahead(worker: Worker) -> None:
    """Let a worker's steps be computed from their beginning on, as a device does."""
    core_of(worker).runner.is_asynchronous = True
    assert worker.engine.is_asynchronous


@pytest.mark.in_memory
def test_answers_are_the_same(line: InProcessPipeline) -> None:
    for worker in (line.prefill, line.decode):
        compute_ahead(worker)
    work = make_requests(6, "ahead", max_tokens=24)
    # These end with a word, which the worker finds out when the next step has begun.
    work += [
        one.model_copy(update={"id": f"{one.id}-stop", "sampling": one.sampling.model_copy(update={"stop": [" the"]})})
        for one in work
    ]
    line.send_requests(*work)
    results = {result.id: result for result in line.run_until_results(len(work))}
    for name, answer in compute_answers(work).items():
        found = results[name]
        assert (found.error, found.text, found.token_ids) == (None, answer.text, answer.token_ids)
        assert found.finish_reason == answer.finish_reason
    assert {result.finish_reason for result in results.values()} == {"length", "stop"}
    for worker in (line.prefill, line.decode):
        assert core_of(worker).num_free_blocks == core_of(worker).pool.num_blocks
        assert not core_of(worker).staging.count_pins()


def test_a_worker_that_falls_silent_has_begun_a_step_and_another_goes_on(
    make_line: Callable[..., InProcessPipeline],
) -> None:
    line = make_line(record=RecordSettings(lease_s=0.4))
    compute_ahead(line.decode)
    (asked,) = make_requests(1, "silent", max_tokens=60)
    asked = asked.model_copy(update={"sampling": Sampling(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)})
    line.send_requests(asked)
    line.run_prefill(1)
    silent = line.silence_worker("decode", num_tokens=5)
    compute_ahead(line.decode)
    run_until_running(line.decode)
    silent.member.close()  # now its group knows, and gives its delivery to the other
    (result,) = line.run_until_results(1)
    assert result.token_ids == compute_answers([asked])[asked.id].token_ids
    assert result.usage.completion_tokens == 60
    silent.abandon()
    assert not core_of(silent).has_work()


def test_a_cancelled_request_ends_in_the_middle_of_a_step(line: InProcessPipeline) -> None:
    compute_ahead(line.decode)
    first, second = make_requests(2, "cancelled", max_tokens=200)
    work = [
        one.model_copy(update={"sampling": Sampling(max_tokens=200, temperature=1.0, seed=4, ignore_eos=True)})
        for one in (first, second)
    ]
    line.send_requests(*work)
    line.run_prefill(2)
    while not all(one.id in line.decode.running and line.decode.running[one.id].claim.num_tokens > 5 for one in work):
        line.decode.run_once()
    line.prefill.record.cancel_request(work[0].id)
    results = {result.id: result for result in line.run_until_results(2)}
    error = results[work[0].id].error
    assert error is not None
    assert error.code == "cancelled"
    assert results[work[1].id].token_ids == compute_answers(work[1:])[work[1].id].token_ids
