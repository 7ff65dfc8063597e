"""Vectors and scores without a gateway: both clients split texts, and join what was computed of them."""

import asyncio
from typing import Any

import pytest

from penstock.client import AsyncClient, Client
from penstock.client.core import MAX_PART_BYTES, join_vectors, split_texts
from penstock.errors import InvalidRequest, ModelError
from penstock.messages import MAX_TEXTS, EndEvent, ErrorInfo, Request
from sim.waiting import wait_for
from tests.gateways import ScriptedPipeline
from tests.ingest.test_embeddings import compute, compute_score, compute_vector


def ask(scripted: ScriptedPipeline, name: str, kind: str, *args: Any, **options: Any) -> Any:
    """Return what one of the two clients returns."""
    redis_url = scripted.addresses.stream_url
    if kind == "sync":
        with Client(redis=redis_url, pipeline=scripted.pipeline.name) as client:
            return getattr(client, name)(*args, **options)

    async def run() -> Any:
        async with AsyncClient(redis=redis_url, pipeline=scripted.pipeline.name) as client:
            return await getattr(client, name)(*args, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_texts_get_vectors_and_scores_in_their_order(scripted: ScriptedPipeline, kind: str) -> None:
    texts = [f"{number} " + "x" * (number % 7) for number in range(130)]
    with scripted.answer_texts(compute) as answered:
        cut = [compute_vector(f"query: {text}", 5) for text in texts]
        assert ask(scripted, "embed", kind, texts, "query", dimensions=5, truncate="end") == cut
        assert ask(scripted, "embed", kind, []) == []
        assert ask(scripted, "score", kind, "why", texts[:3]) == [compute_score("why", text) for text in texts[:3]]
    assert sorted(len(request.texts or []) for request in answered) == [2, 3, 64, 64]
    for wrong in ({"dimensions": 0}, {"prompt": "x" * 300}, {"truncate": "middle"}):
        with pytest.raises(InvalidRequest, match="embed"):
            ask(scripted, "embed", kind, ["a"], **wrong)
    for given in ("a text", [1, 2], [None]):
        with pytest.raises(InvalidRequest, match="sequence of strings"):
            ask(scripted, "embed", kind, given)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_first_error_is_raised_and_cancels_the_rest(scripted: ScriptedPipeline, kind: str) -> None:
    def fail(request: Request) -> EndEvent:
        wait_for(lambda: len(scripted.read_requests()) == 2, "both parts are published")
        return EndEvent(finish_reason="error", error=ErrorInfo(code="invalid_request", message="no such prompt"))

    with scripted.answer_texts(fail), pytest.raises(InvalidRequest, match="no such prompt"):
        ask(scripted, "embed", kind, ["a"] * 65)
    second = scripted.read_requests()[1].id
    status = scripted.record.read_status(second)
    assert status is not None
    assert status.cancelled or status.stage == "end"


def test_parts_are_of_like_length_and_bounded() -> None:
    texts = ["é" * MAX_PART_BYTES, *("x" * (MAX_PART_BYTES // 4) for _ in range(5)), *("y" * at for at in range(200))]
    parts = split_texts(texts)
    assert sorted(place for part in parts for place in part) == [*range(len(texts))]
    assert [len(part) for part in parts] == [1, 4, 1 + 63, 64, 64, 9]
    assert all(len(part) <= MAX_TEXTS for part in parts)
    with pytest.raises(ModelError, match="one vector of each text"):
        join_vectors([0, 1], [])
