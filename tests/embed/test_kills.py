"""A worker dies at each step: each request is answered once, with the same vectors."""

from collections.abc import Iterator

import pytest

from penstock import failpoints
from penstock.embed_worker.model import EmbedModel
from penstock.worker.worker import Worker
from tests.embed.checkpoints import draw_text
from tests.embed.conftest import EmbedPipeline, MakeEmbedPipeline
from tests.embed.test_model import compute, measure_cosine
from tests.embed.test_worker import read_vectors

POINTS = [point for point in failpoints.ENDPOINT if point != "endpoint.3.appended"]  # there are no tokens
BEFORE = {"endpoint.1.taken": "endpoint.1.claimed"}
"""The point at which a worker died before, so that another one comes to this point."""


class Died(BaseException):
    """A worker's death."""


def die() -> None:
    raise Died


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No point is armed after a test."""
    yield
    failpoints.disarm()


def run_until_death(line: EmbedPipeline, worker: Worker, num_results: int) -> bool:
    """Return whether the worker died before there were so many results."""
    try:
        line.run_until_results(num_results)
    except Died:
        line.kill(worker)
        return True
    return False


@pytest.mark.parametrize("bus", ["embedded", "kafka"])
def test_a_worker_dies_at_each_step(make_pipeline: MakeEmbedPipeline, bert: EmbedModel, bus: str) -> None:
    line = make_pipeline(bus)
    worker = line.add_embed_worker(bert)
    for count, point in enumerate(POINTS, start=1):
        texts = [draw_text(count, count), draw_text(30, count)]
        request = line.send(None, texts=texts)
        for armed in filter(None, (BEFORE.get(point), point)):
            failpoints.arm_action(armed, die, passage=1)
            has_died = run_until_death(line, worker, count)
            failpoints.disarm()
            # A bus that is quick delivers the message again before anybody takes it over: then it is claimed.
            assert has_died or armed == "endpoint.1.taken"
            if has_died:
                worker = line.add_embed_worker(bert, count)
        result = next(one for one in line.run_until_results(count) if one.id == request.id)
        line.run_until(worker.is_settled)
        assert (result.error, result.usage.completion_tokens) == (None, 0)
        assert measure_cosine(read_vectors(result.vectors), compute(bert, texts)) >= 0.99999
        assert len(line.read_log(request.id)) == 1
    results = [result.id for result in line.read_results()]
    assert len(results) == len(set(results)) == len(POINTS)
    assert not line.read_dead_letters()


@pytest.mark.parametrize("bus", ["embedded", "kafka"])
def test_a_client_asks_for_vectors(make_pipeline: MakeEmbedPipeline, bert: EmbedModel, bus: str) -> None:
    line = make_pipeline(bus)
    worker = line.add_embed_worker(bert)
    with line.open_client() as client:
        request_id = client.submit(texts=["bar", "cold dune"], embed={"prompt": "query", "dimensions": 32})
        line.run_until_results(1)
        line.run_until(worker.is_settled)
        found = client.result(request_id)
    assert found.vectors is not None
    assert found.vectors.size == 32
    vectors = compute(bert, ["bar", "cold dune"], prompt="query")[:, :32]
    assert measure_cosine(read_vectors(found.vectors), vectors) >= 0.99999
    assert (found.text, found.token_ids, found.finish_reason) == ("", [], "stop")
