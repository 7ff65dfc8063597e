"""An exception about one request, at any place of a worker's loop, ends that request alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest

from penstock.bus.contract import Outgoing, as_text
from penstock.client.core import make_request
from penstock.endpoint_worker.engine import EndpointEngine
from penstock.messages import Request, Result, Sampling
from penstock.names import Pipeline
from penstock.record import Claim
from penstock.testing.bus import MemoryBus
from penstock.worker.task import Task
from penstock.worker.worker import Worker
from sim.endpoint import CountingEndpoint, write_numbers
from sim.line import InProcessPipeline
from tests.endpoint.conftest import EndpointPipeline
from tests.record.play import claim_decode

pytestmark = pytest.mark.in_memory

WORDS = "half a pair: \ud800"
Kind = Literal["prefill", "decode", "endpoint"]
ALL: tuple[Kind, ...] = ("prefill", "decode", "endpoint")
DEAD, ERROR = "dead letter", "internal_error"
HELPED = "is told, and does no harm"
"""Of what only tells of a request: it is answered all the same."""
PLACES: list[tuple[type | str, str, str, tuple[Kind, ...]]] = [
    (Task, "to_claim_request", DEAD, ALL),
    ("role", "identify_request", DEAD, ALL),
    ("role", "read_request", ERROR, ALL),
    (Worker, "_record_queue_wait", ERROR, ALL),
    (Worker, "_replace_older_task", ERROR, ALL),
    (Task, "start_span", ERROR, ALL),
    (Worker, "_record_load", HELPED, ALL[:2]),
    ("role", "begin_request", ERROR, ALL[2:]),
    (EndpointEngine, "_build_question", ERROR, ALL[2:]),
    (EndpointEngine, "_handle_event", ERROR, ALL[2:]),
    ("role", "make_event", ERROR, ALL[:2]),
    (Claim, "next_event", ERROR, ALL),
    ("role", "record_token", HELPED, ALL),
    (Worker, "_end_told", ERROR, ALL[2:]),
    ("role", "build_end_event", ERROR, ALL[1:]),
    ("role", "build_end_event", HELPED, ALL[:1]),  # prefill ends no request that goes on
    ("role", "build_stage_output", ERROR, ALL),
    ("metrics", "record_end", HELPED, ALL),
]


class PanicException(BaseException):
    """As a library in Rust raises it, by this name: no `Exception`."""


class Failure:
    """A method that fails for the request `bad` while it is armed."""

    def __init__(self, patch: pytest.MonkeyPatch, worker: Worker, owner: type | str, method: str) -> None:
        self.is_armed = False
        target = getattr(worker, owner) if isinstance(owner, str) else owner
        original = getattr(target, method)

        def fail_for_one(*args: Any, **kwargs: Any) -> Any:
            is_bad = any("bad" in (getattr(one, "id", ""), getattr(one, "key", "")) for one in args)
            if self.is_armed and (is_bad or method == "record_end"):
                raise PanicException(WORDS)
            return original(*args, **kwargs)

        patch.setattr(target, method, fail_for_one)


def check(results: list[Result], letters: Sequence[Outgoing], outcome: str, is_whole: Callable[[Result], bool]) -> None:
    """Check that `bad` ended so, and that those around it are answered."""
    found = {result.id: result for result in results}
    assert len(found) == len(results)
    bad = found.pop("bad", None)
    assert found.keys() == {"a", "z"}
    assert all(map(is_whole, found.values()))
    if outcome == DEAD:
        assert bad is None
        assert [letter.key for letter in letters] == ["bad"]
    elif outcome == HELPED:
        assert bad is not None
        assert is_whole(bad)
    else:
        assert bad is not None
        assert bad.error is not None
        assert bad.error.code == outcome


@pytest.mark.parametrize(
    ("kind", "owner", "method", "outcome"),
    [
        (kind, owner, method, outcome)
        for owner, method, outcome, kinds in PLACES
        for kind in kinds
        if kind != "endpoint"
    ],
)
def test_an_exception_about_a_request_ends_that_request_alone(
    line: InProcessPipeline, kind: Kind, owner: type | str, method: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(monkeypatch, line.prefill if kind == "prefill" else line.decode, owner, method)
    failure.is_armed = kind == "prefill"
    sampling = Sampling(max_tokens=3, temperature=0, ignore_eos=True)
    line.send_requests(*(Request(id=name, prompt="In the beginning", sampling=sampling) for name in ("a", "bad", "z")))
    line.run_prefill(2 if outcome == DEAD and kind == "prefill" else 3)
    failure.is_armed = kind == "decode"
    results = line.run_until_results(2 if outcome == DEAD else 3)
    letters = line.run_until_dead(1) if outcome == DEAD else []
    check(results, letters, outcome, lambda result: len(result.token_ids) == 3)
    assert {len(line.prefill.running), len(line.decode.running)} == {0}


@pytest.fixture
def endpoints() -> Iterator[EndpointPipeline]:
    """A pipeline of one endpoint worker."""
    with CountingEndpoint() as endpoint:
        made = EndpointPipeline(Pipeline("confined"))
        made.add_worker(endpoint)
        yield made
        made.close()


def read_letters(endpoints: EndpointPipeline) -> list[Outgoing]:
    return list(endpoints.bus.read_all(endpoints.pipeline.dead_letter_topic))


@pytest.mark.parametrize(("owner", "method", "outcome"), [place[:3] for place in PLACES if "endpoint" in place[3]])
def test_so_it_is_in_an_endpoint_worker(
    endpoints: EndpointPipeline, owner: type | str, method: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (worker,) = endpoints.workers
    Failure(monkeypatch, worker, owner, method).is_armed = True
    for name in ("a", "bad", "z"):
        endpoints.send(max_tokens=3, id=name)
    endpoints.run_until(lambda: len(endpoints.read_results()) + len(read_letters(endpoints)) >= 3 + (outcome == ERROR))
    endpoints.run_until(worker.is_settled)
    check(endpoints.read_results(), read_letters(endpoints), outcome, lambda result: result.text == write_numbers(3))
    assert not worker.running


def test_a_dead_letter_whose_headers_cannot_be_written_goes_without_them(endpoints: EndpointPipeline) -> None:
    assert isinstance(endpoints.bus, MemoryBus)
    endpoints.bus.append([Outgoing(endpoints.pipeline.request_topic("interactive"), b"{", None, {"name": WORDS})])
    endpoints.send(max_tokens=2, id="behind")
    endpoints.run_until(lambda: endpoints.read_results() and read_letters(endpoints))
    (letter,) = read_letters(endpoints)
    assert "name" not in letter.headers


def test_a_trace_header_that_is_not_utf_8_costs_the_request_nothing(endpoints: EndpointPipeline) -> None:
    request = make_request("count|", {"max_tokens": 2})
    headers = {"baggage": as_text(b"user=\xff"), "traceparent": as_text(b"\xff")}
    topic = endpoints.pipeline.request_topic("interactive")
    endpoints.publisher.publish([Outgoing(topic, request.encode(), request.id, headers)])
    (result,) = endpoints.run_until_results(1)
    assert result.text == write_numbers(2)


def test_a_claim_without_a_request_ends_an_idle_worker(endpoints: EndpointPipeline) -> None:
    (worker,) = endpoints.workers
    worker.run_once()
    claim = claim_decode(worker.record, "forgotten", worker.session.id, "job", b"")
    assert isinstance(claim, Claim)
    worker.session.add_claim(claim)
    with pytest.raises(AssertionError, match="claims without a request: forgotten"):
        worker.run_once()
    worker.session.remove_claim(claim)
