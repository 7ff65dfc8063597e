"""Splitting changes no token: two prefill and two decode workers as processes. `tests/chaos` kills them."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from penstock.client.sync import Client
from penstock.local.stack import Stack
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests
from tests.pipeline.checks import Streams, check_results, check_streams, results_of
from tests.pipeline.site import submit, wait_for_results

pytestmark = pytest.mark.proof
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
        running.wait_until_ready(PATIENCE_S)
        yield running
        running.stop_workers()
        counts = Counter(result.id for result in results_of(running.addresses))
        assert set(counts.values()) == {1}, "a request has more than one result"


def test_tokens_equal_the_undivided_model(stack: Stack) -> None:
    work = make_requests(NUM_REQUESTS, "calm")
    with Client(stack.addresses) as client:
        for request in work:
            submit(client, request)
        streams = Streams(client, work)
        streams.finish()
    expected = compute_answers(work)
    check_streams(streams, expected)
    check_results(wait_for_results(stack.addresses, expected), expected)
