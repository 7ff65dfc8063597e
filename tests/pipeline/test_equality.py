"""Splitting changes no token: two prefill and two decode workers as processes. `tests/chaos` kills them."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.client.sync import Client
from penstock.local.stack import Stack
from penstock.messages import Request, Result
from penstock.waiting import wait_until
from sim.forked import ForkedStack
from sim.workload import ENGINE_SETTINGS, ExpectedAnswer, compute_answers, make_requests
from tests.pipeline.checks import Streams, check_results, check_streams, results_of

pytestmark = pytest.mark.timeout(400)
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def stack(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {
        "PENSTOCK_ENGINE_DTYPE": "float32",
        "PENSTOCK_ENGINE_MAX_STEP_TOKENS": str(ENGINE_SETTINGS.max_step_tokens),
        "PENSTOCK_ENGINE_MAX_BATCH": "8",
        "PENSTOCK_ENGINE_POOL_MB": "64",
    }
    directory = tmp_path_factory.mktemp("stack")
    name = f"equality-{random.getrandbits(32):08x}"
    made = ForkedStack(directory, pipeline=name, kafka=kafka, prefill=2, decode=2, environment=environment)
    with made as running:
        running.wait_until_ready(120)
        yield running
        running.stop_workers()
        counts = Counter(result.id for result in results_of(running.addresses))
        assert set(counts.values()) == {1}, "a request has more than one result"


@contextmanager
def tended(stack: Stack) -> Iterator[None]:
    """What dies is started again, as `penstock up` does."""
    ended = threading.Event()

    def tend() -> None:
        while not ended.wait(0.1):
            stack.restart_dead()

    thread = threading.Thread(target=tend)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def submit(client: Client, work: list[Request]) -> None:
    for request in work:
        client.submit(
            token_ids=request.token_ids or [],
            id=request.id,
            tenant=request.tenant,
            **request.sampling.model_dump(),
        )


def results_when_all_there(stack: Stack, expected: dict[str, ExpectedAnswer]) -> list[Result]:
    """The results, once each id has one: a settlement may wait for a dead worker's delivery to come back."""
    found: list[Result] = []

    def all_there() -> bool:
        found[:] = results_of(stack.addresses)
        return expected.keys() <= {result.id for result in found}

    wait_until(all_there, 90, "a result for every request", every_s=0.5)
    return found


def test_tokens_equal_the_undivided_model(stack: Stack) -> None:
    work = make_requests(NUM_REQUESTS, "calm")
    with Client(stack.addresses) as client:
        submit(client, work)
        streams = Streams(client, work)
        streams.finish()
    expected = compute_answers(work)
    check_streams(streams, expected)
    check_results(results_when_all_there(stack, expected), expected)


def test_workers_leave_on_request(stack: Stack) -> None:
    """SIGTERM in the middle of work: what runs is finished or handed back, and every process ends with status 0."""
    work = make_requests(12, "leaving", max_tokens=60)
    stack.wait_until_ready(120)
    with Client(stack.addresses) as client, tended(stack):
        streams = Streams(client, work)
        submit(client, work)
        streams.wait_for(2)
        for worker in stack.workers[::2]:
            assert worker.child is not None
            assert worker.child.stop(timeout_s=60.0) == 0
        streams.finish()
    expected = compute_answers(work)
    check_streams(streams, expected)
