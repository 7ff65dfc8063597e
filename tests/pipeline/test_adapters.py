"""Adapters: an answer is that of one version of one adapter, whichever workers have which, and whichever die."""

import itertools
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.bus.contract import Delivery
from penstock.errors import AnswerInterrupted, RequestError, UnknownModel
from penstock.messages import Result, TokenEvent
from penstock.record import Claim
from penstock.testing.engine import compute_token, load_tokenizer, seed_adapter
from penstock.testing.pipeline import TestPipeline
from penstock.worker.adapters import AdapterVersions
from penstock.worker.failure import RetryPolicy
from sim.waiting import PATIENCE_S

PROMPT = "Once upon a time there was a fox"
VERSIONS = {name: {"sql": digit * 64, "chat": "c" * 64} for name, digit in (("first", "1"), ("second", "2"))}
NUM_TOKENS = 12


def expect(digest: str, seed: int = 7) -> list[int]:
    prompt = load_tokenizer().encode(PROMPT, add_special_tokens=False)
    return [compute_token(prompt, seed_adapter(seed, digest), position) for position in range(NUM_TOKENS)]


def start(pipeline: TestPipeline, versions: str, *kinds: str) -> list[str]:
    return [pipeline.start_worker(kind, adapters=VERSIONS[versions]) for kind in kinds]  # type: ignore[arg-type]


class EmptyPipeline(TestPipeline):
    """One that begins without workers."""

    def __enter__(self) -> "EmptyPipeline":
        return self


def submit(pipeline: TestPipeline, model: str | None = "sql") -> str:
    with pipeline.client() as client:
        return client.submit(PROMPT, model=model, max_tokens=NUM_TOKENS, seed=7, ignore_eos=True)


def find_result(pipeline: TestPipeline, count: int = 1) -> Result:
    return pipeline.wait_for_results(count)[-1]


def begin_answer(pipeline: TestPipeline) -> list[int]:
    """Have a worker with the first version begin an answer, and die; return its tokens."""
    (dying,) = start(pipeline, "first", "auto")
    pipeline.kill_worker(dying, after_tokens=5)
    with pipeline.client() as client:
        request_id = submit(pipeline)
        events = (event for event in client.stream(request_id) if isinstance(event, TokenEvent))
        return [event.token for event in itertools.islice(events, 5)]


@pytest.mark.parametrize("kinds", [("prefill", "decode"), ("auto",)])
def test_each_adapter_answers_by_its_name(kinds: Sequence[str]) -> None:
    with EmptyPipeline() as pipeline:
        start(pipeline, "first", *kinds)
        ids = {name: submit(pipeline, name) for name in ("sql", "chat", "formula", None)}
        found = {one.id: one for one in pipeline.wait_for_results(4)}
    digests = {"sql": "1" * 64, "chat": "c" * 64, "formula": "", None: ""}
    for name, request_id in ids.items():
        assert found[request_id].token_ids == expect(digests[name])
        assert found[request_id].model == (name or "formula")


def test_a_name_that_no_worker_has_is_refused() -> None:
    with EmptyPipeline() as pipeline:
        start(pipeline, "first", "auto")
        submit(pipeline, "nobody")
        error = find_result(pipeline).error
    assert error is not None
    assert isinstance(error.to_exception(), UnknownModel)


def test_a_worker_without_the_adapter_leaves_the_request_to_one_that_has_it() -> None:
    with EmptyPipeline() as pipeline:
        pipeline.start_worker("auto")
        start(pipeline, "first", "auto")
        for _ in range(8):
            submit(pipeline)
        found = pipeline.wait_for_results(8)
    assert [one.token_ids for one in found] == [expect("1" * 64)] * 8


def test_a_request_waits_until_a_worker_that_decodes_has_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that read requests were started anew before those that decode."""
    sent_back, retry_later = threading.Event(), RetryPolicy.retry_later

    def note(policy: RetryPolicy, delivery: Delivery, claim: Claim, error: RequestError) -> bool:
        if (
            error.is_for_others and claim.num_tokens == 0
        ):  # with a token it is the job, which the other worker passes on
            sent_back.set()
        return retry_later(policy, delivery, claim, error)

    monkeypatch.setattr(RetryPolicy, "retry_later", note)
    with EmptyPipeline() as pipeline:
        start(pipeline, "second", "prefill")
        start(pipeline, "first", "decode")
        submit(pipeline)
        assert sent_back.wait(PATIENCE_S)
        start(pipeline, "second", "decode")
        assert find_result(pipeline).token_ids == expect("2" * 64)


@pytest.mark.parametrize("stays", [True, False], ids=["a worker has its version", "no worker has its version"])
def test_an_answer_goes_on_in_the_version_that_began_it_or_ends(stays: bool) -> None:
    with EmptyPipeline() as pipeline:
        begun = begin_answer(pipeline)
        start(pipeline, "second", "auto")
        if stays:
            start(pipeline, "first", "auto")
        result = find_result(pipeline)
    assert begun == expect("1" * 64)[:5]
    if stays:
        assert result.token_ids == expect("1" * 64)
    else:
        assert result.error is not None
        assert isinstance(result.error.to_exception(), AnswerInterrupted)
        assert result.token_ids == begun


def test_an_answer_ends_where_no_worker_knows_its_adapter_any_more() -> None:
    with EmptyPipeline() as pipeline:
        begun = begin_answer(pipeline)
        pipeline.start_worker("auto")
        result = find_result(pipeline)
    assert result.error is not None
    assert isinstance(result.error.to_exception(), AnswerInterrupted)
    assert result.token_ids == begun


def test_weights_that_did_not_begin_an_answer_do_not_go_on_with_it() -> None:
    """As where the model itself has the adapter's name by now."""
    task: Any = SimpleNamespace(
        adapter=None, adapter_digest="", role=None, log_events=[SimpleNamespace(adapter="1" * 64)]
    )
    with pytest.raises(AnswerInterrupted, match="another adapter"):
        AdapterVersions({}).check_task(task)
    task.log_events = [SimpleNamespace(adapter=None)]
    AdapterVersions({}).check_task(task)


def test_a_request_for_an_adapter_that_is_here_is_sent_nowhere() -> None:
    """As where the model itself had the name, and began the answer."""
    versions = AdapterVersions({"sql": "1" * 64})
    versions.read_beats = lambda: [{"stage": "auto", "state": "ready", "adapters": {"sql": "2" * 64, "chat": "3" * 64}}]
    assert not versions.build_unknown_error("sql").is_for_others
    assert versions.build_unknown_error("chat").is_for_others
