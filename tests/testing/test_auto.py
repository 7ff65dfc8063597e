"""A worker that reads requests and jobs: what stays, what leaves and why, and what its death costs."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.trace import Span

from penstock.client import Answer
from penstock.config.settings import StaySettings
from penstock.telemetry import tracing
from penstock.testing.pipeline import TestPipeline
from tests.draws import mark_some

PROMPT = "Once upon a time"


@pytest.fixture
def stay() -> StaySettings:
    return StaySettings()


@pytest.fixture
def pipeline(stay: StaySettings) -> Iterator[TestPipeline]:
    """One worker of kind `auto`, alone: the two that a pipeline begins with have left."""
    with TestPipeline(stay=stay) as made:
        made.start_worker("auto")
        made.stop_worker("prefill-0")
        made.stop_worker("decode-0")
        yield made


def ask(pipeline: TestPipeline, prompt: str = PROMPT, max_tokens: int = 20) -> Answer:
    with pipeline.client() as client:
        return client.result(client.submit(prompt, max_tokens=max_tokens))


@pytest.mark.proof
def test_its_spans_tell_the_prompt_from_the_answer(pipeline: TestPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, start_span = list[str](), tracing.start_span

    def note_span(name: str, *given: Any, **attributes: Any) -> Span:
        begun.append(name)
        return start_span(name, *given, **attributes)

    monkeypatch.setattr(tracing, "start_span", note_span)
    ask(pipeline)
    assert [name for name in begun if name in ("prefill", "first_token", "hand_off", "decode", "end")] == [
        "prefill", "first_token", "decode", "end",
    ]  # fmt: skip


@pytest.mark.proof
def test_one_and_two_hops_give_the_same_tokens(pipeline: TestPipeline) -> None:
    with pipeline.client() as client:
        here = client.result(client.submit(PROMPT, max_tokens=30, seed=7))
        pipeline.start_worker("prefill", "prefill-1")
        pipeline.start_worker("decode", "decode-1")
        pipeline.stop_worker("auto-0")
        there = client.result(client.submit(PROMPT, max_tokens=30, seed=7))
    assert there.timings.handed_off > 0.0
    assert here.token_ids == there.token_ids
    assert here.usage == there.usage


@pytest.mark.proof
def test_an_answer_of_one_token_is_settled_where_it_was_computed(pipeline: TestPipeline) -> None:
    assert len(ask(pipeline, max_tokens=1).token_ids) == 1


@pytest.mark.parametrize("tokens", mark_some([1, 2, 9], pytest.mark.proof))
def test_another_one_goes_on_with_what_a_dead_one_decoded(pipeline: TestPipeline, tokens: int) -> None:
    with pipeline.client() as client:
        request_id = client.submit(PROMPT, max_tokens=40)
        pipeline.kill_worker("auto-0", after_tokens=tokens)
        pipeline.start_worker("auto")
        assert len(client.result(request_id).token_ids) == 40
    assert len(pipeline.wait_for_results(1)) == 1


def test_prefill_and_decode_go_on_with_what_a_dead_one_decoded(pipeline: TestPipeline) -> None:
    """A prefill worker that finds tokens in the log hands off behind them."""
    with pipeline.client() as client:
        request_id = client.submit(PROMPT, max_tokens=40)
        pipeline.kill_worker("auto-0", after_tokens=9)
        pipeline.start_worker("prefill")
        pipeline.start_worker("decode")
        result = client.result(request_id)
    assert len(result.token_ids) == 40
    assert result.timings.handed_off > 0.0


def test_a_worker_that_leaves_gives_back_what_it_decodes(pipeline: TestPipeline) -> None:
    with pipeline.client() as client:
        request_id = client.submit(PROMPT, max_tokens=400)
        stream = client.stream(request_id)
        next(stream)
        pipeline.start_worker("auto")
        pipeline.stop_worker("auto-0")
        assert len(client.result(request_id).token_ids) == 400


@pytest.mark.parametrize(
    ("stay", "max_tokens", "leaves"),
    mark_some(
        [
            pytest.param(StaySettings(max_prompt_tokens=2), 20, True, id="a long prompt"),
            pytest.param(StaySettings(), 20, False, id="nothing"),
        ],
        pytest.mark.proof,
    ),
)
def test_what_leaves_is_decoded_elsewhere(pipeline: TestPipeline, max_tokens: int, leaves: bool) -> None:
    alone = ask(pipeline, max_tokens=max_tokens)
    assert alone.timings.handed_off == 0.0, "a worker hands nothing to itself"
    pipeline.start_worker("decode", "decode-1")
    with pipeline.client() as client:
        first = client.result(client.submit(PROMPT, max_tokens=max_tokens, seed=7))
        second = client.result(client.submit(PROMPT, max_tokens=max_tokens, seed=7))
    assert (first.timings.handed_off > 0.0) == leaves
    assert first.token_ids == second.token_ids
    assert len(pipeline.wait_for_results(3)) == 3
