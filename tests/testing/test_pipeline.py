"""A pipeline in memory as users have it: clients, kills, and what ends a worker that nobody killed."""

import threading
from unittest import mock

import pytest

from penstock.errors import Cancelled
from penstock.messages import TokenEvent
from penstock.testing.engine import FormulaEngine, list_tokens
from penstock.testing.pipeline import TestPipeline
from sim.waiting import wait_for
from tests.draws import mark_some

PROMPT = [300, 301, 302]
NUM_TOKENS = 20


def submit(pipeline: TestPipeline, request_id: str) -> str:
    with pipeline.client() as client:
        return client.submit(
            id=request_id, token_ids=PROMPT, seed=7, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
        )


def read_tokens(pipeline: TestPipeline, request_id: str) -> list[int]:
    with pipeline.client() as client:
        return [event.token for event in client.stream(request_id) if isinstance(event, TokenEvent)]


@pytest.mark.parametrize(
    ("name", "after_tokens"), mark_some([("decode-0", 1), ("decode-0", 12), ("prefill-0", 1)], pytest.mark.proof)
)
def test_an_answer_is_whole_after_a_kill(name: str, after_tokens: int) -> None:
    with TestPipeline() as pipeline:
        pipeline.kill_worker(name, after_tokens)
        request_id = submit(pipeline, "r1")
        pipeline.start_worker("prefill" if name.startswith("prefill") else "decode")
        assert read_tokens(pipeline, request_id) == list_tokens(PROMPT, 7, NUM_TOKENS)
        assert [result.token_ids for result in pipeline.wait_for_results(1)] == [list_tokens(PROMPT, 7, NUM_TOKENS)]


@pytest.mark.proof
def test_a_dead_worker_writes_nothing_more() -> None:
    with TestPipeline() as pipeline:
        pipeline.kill_worker("decode-0", after_tokens=4)
        with pipeline.client() as client:
            events = client.stream(submit(pipeline, "r1"))
            seen = [next(events) for _ in range(5)]
        pipeline._workers["decode-0"].thread.join()
        assert len(pipeline.records.records["r1"].tokens) == len(seen), "prefill's, and four"


@pytest.mark.proof
def test_a_worker_of_the_same_name_takes_the_place_of_a_dead_one() -> None:
    with TestPipeline() as pipeline:
        pipeline.kill_worker("decode-0")
        pipeline.start_worker("decode", "decode-0")
        assert len(read_tokens(pipeline, submit(pipeline, "r1"))) == NUM_TOKENS


@pytest.mark.proof
def test_a_worker_that_leaves_gives_its_requests_to_another_one() -> None:
    with TestPipeline() as pipeline, pipeline.client() as client:
        events = client.stream(submit(pipeline, "r1"))
        seen = [next(events) for _ in range(3)]
        pipeline.start_worker("decode")
        pipeline.stop_worker("decode-0")
        seen += list(events)
        assert len(seen) == NUM_TOKENS + 1


@pytest.mark.proof
async def test_the_client_for_asyncio_reads_streams_too() -> None:
    with TestPipeline(lambda prompt: f"You asked: {prompt}") as pipeline:
        async with pipeline.async_client() as client:
            answer = await client.result(await client.submit("what?", max_tokens=50))
    assert answer.text == "You asked: what?"


@pytest.mark.proof
def test_a_request_is_cancelled() -> None:
    with TestPipeline() as pipeline, pipeline.client() as client:
        pipeline.stop_worker("decode-0")
        events = client.stream(submit(pipeline, "r1"))
        next(events)
        assert client.cancel("r1")
        pipeline.start_worker("decode")
        with pytest.raises(Cancelled):
            list(events)


@pytest.mark.proof
def test_what_ends_a_worker_that_nobody_killed_is_raised() -> None:
    before = set(threading.enumerate())
    with (
        mock.patch.object(FormulaEngine, "has_work", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
        TestPipeline() as pipeline,
    ):
        pipeline._workers["decode-0"].thread.join()

    def has_no_thread() -> bool:  # the session's is told to end, and not waited for
        return not [one for one in set(threading.enumerate()) - before if one.name.startswith("penstock-")]

    wait_for(has_no_thread, "all threads of the workers have ended")


@pytest.mark.proof
def test_no_lag_is_told() -> None:
    with TestPipeline() as pipeline, pipeline.client() as client, pytest.raises(NotImplementedError):
        client.estimated_wait()
