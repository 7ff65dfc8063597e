"""An exception about one request, at any place of the endpoint worker's loop, ends that request alone."""

from typing import Any

import pytest

from penstock.bus.contract import Outgoing, as_text
from penstock.client.core import make_request
from penstock.endpoint_worker.engine import EndpointEngine
from penstock.endpoint_worker.role import EndpointRole
from penstock.record import Claim
from penstock.telemetry.stage import StageMetrics
from penstock.testing.bus import MemoryBus
from penstock.worker.task import Task
from penstock.worker.worker import Worker
from sim.endpoint import CountingEndpoint, write_numbers
from tests.endpoint.conftest import EndpointPipeline

pytestmark = pytest.mark.in_memory

WORDS = "half a pair: \ud800"
HELPED = "is told, and does no harm"
"""What only tells of a request: it is answered all the same."""
PLACES = [
    (Task, "to_claim_request", "dead letter"),
    (Worker, "_record_queue_wait", "internal_error"),
    (Worker, "_replace_older_task", "internal_error"),
    (Task, "start_span", "internal_error"),
    (EndpointRole, "begin_request", "internal_error"),
    (EndpointEngine, "_build_question", "internal_error"),
    (EndpointEngine, "_handle_event", "internal_error"),
    (EndpointRole, "record_token", HELPED),
    (Claim, "next_event", "internal_error"),
    (Worker, "_end_told", "internal_error"),
    (EndpointRole, "build_end_event", "internal_error"),
    (EndpointRole, "build_stage_output", "internal_error"),
    (StageMetrics, "record_end", HELPED),
]


@pytest.mark.parametrize(("owner", "method", "outcome"), PLACES, ids=[method for _, method, _ in PLACES])
def test_an_exception_about_a_request_ends_that_request_alone(
    owner: type, method: str, outcome: str, line: EndpointPipeline, endpoint: CountingEndpoint, monkeypatch: Any
) -> None:
    original = getattr(owner, method)

    def fail_for_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        about = next((one for one in (*args, self) if getattr(one, "id", None) is not None), None)
        if about is None or about.id == "bad":
            raise ValueError(WORDS)
        return original(self, *args, **kwargs)

    if owner is StageMetrics:
        monkeypatch.setattr(owner, method, lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(owner, method, fail_for_one)
    line.add_worker(endpoint)
    for name in ("before", "bad", "behind"):
        line.send(max_tokens=3, id=name)
    line.run_until(lambda: len(line.read_results()) + len(_read_letters(line)) >= 3 + (outcome == "internal_error"))
    line.run_until(lambda: all(worker.is_settled() for worker in line.workers))
    results = {result.id: result for result in line.read_results()}
    assert len(results) == len(line.read_results())
    assert results["before"].text == results["behind"].text == write_numbers(3)
    if outcome == "dead letter":
        assert "bad" not in results
        assert [letter.key for letter in _read_letters(line)] == ["bad"]
    elif outcome == HELPED:
        assert results["bad"].text == write_numbers(3)
    else:
        error = results["bad"].error
        assert error is not None
        assert error.code == outcome
    assert not line.workers[0].running


def _read_letters(line: EndpointPipeline) -> list[Any]:
    return list(line.bus.read_all(line.pipeline.dead_letter_topic))


def test_a_dead_letter_whose_headers_cannot_be_written_goes_without_them(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    line.add_worker(endpoint)
    assert isinstance(line.bus, MemoryBus)
    line.bus.append([Outgoing(line.pipeline.request_topic("interactive"), b"{", None, {"name": WORDS})])
    line.send(max_tokens=2, id="behind")
    line.run_until(lambda: line.read_results() and _read_letters(line))
    (letter,) = _read_letters(line)
    assert "name" not in letter.headers


def test_a_trace_header_that_is_not_utf_8_costs_the_request_nothing(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    line.add_worker(endpoint)
    request = make_request("count|", {"max_tokens": 2})
    headers = {"baggage": as_text(b"user=\xff"), "traceparent": as_text(b"\xff")}
    line.publisher.publish(
        [Outgoing(line.pipeline.request_topic("interactive"), request.encode(), request.id, headers)]
    )
    (result,) = line.run_until_results(1)
    assert result.text == write_numbers(2)


def test_a_claim_without_a_request_ends_an_idle_worker(line: EndpointPipeline, endpoint: CountingEndpoint) -> None:
    worker = line.add_worker(endpoint)
    worker.run_once()
    claim = worker.record.claim_decode("forgotten", worker.session.id, "job", b"")
    assert isinstance(claim, Claim)
    worker.session.add_claim(claim)
    with pytest.raises(AssertionError, match="claims without a request: forgotten"):
        worker.run_once()
    worker.session.remove_claim(claim)
