"""Drafts through the whole pipeline: a step gives several tokens of a request, and its log and result are the same."""

from typing import Any

import pytest

from penstock.engine.drafts import Drafter
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.messages import EndEvent, Request, Result, Sampling, TokenEvent
from sim.line import InProcessPipeline, core_of

pytestmark = pytest.mark.in_memory

NUM_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["king", "priest"]}, "name": {"type": "string", "maxLength": 8}},
    "required": ["kind", "name"],
    "additionalProperties": False,
}


@pytest.fixture
def drafts(line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Make steps draft: what the last answer in this list says next, whatever comes. The list is empty at first."""
    answers: list[list[int]] = []

    def propose(
        self: Drafter, token_ids: list[int], grammar: GrammarState | None, max_tokens: int
    ) -> tuple[list[int], list[float]]:
        answer = answers[-1] if answers else []
        prompts = (count for count in range(1, len(token_ids)) if token_ids[count:] == answer[: len(token_ids) - count])
        count = next(prompts, len(token_ids))
        draft = answer[len(token_ids) - count :][:max_tokens]
        return draft, [1.0] * len(draft)

    monkeypatch.setattr(Drafter, "propose_tokens", propose)
    core_of(line.decode).speculates = True
    return answers


def _ask(line: InProcessPipeline, name: str, **sampling: Any) -> Result:
    """Send a request and return its result."""
    _send(line, name, **sampling)
    return _read_result(line, name)


def _send(line: InProcessPipeline, name: str, **sampling: Any) -> None:
    values = {"max_tokens": NUM_TOKENS, "temperature": 0.7, "seed": 5, "ignore_eos": True, **sampling}
    line.send_requests(Request(id=name, prompt="And the king said", sampling=Sampling(**values)))


def _read_result(line: InProcessPipeline, name: str) -> Result:
    """Return the result of the request that was sent last, once it is there."""
    results = line.run_until_results(len(line.read_results()) + 1)
    return next(result for result in results if result.id == name)


def _check_log(line: InProcessPipeline, result: Result) -> None:
    """Check that the log says what the result says, token by token, with one end."""
    *tokens, end = line.decode.record.read_log(result.id)
    assert isinstance(end, EndEvent)
    assert [event.token for event in tokens if isinstance(event, TokenEvent)] == result.token_ids
    assert [int(event.id.partition("-")[0]) for event in tokens if isinstance(event, TokenEvent)] == list(
        range(len(result.token_ids))
    )
    assert end.usage.completion_tokens == len(result.token_ids)


def _check_same(result: Result, expected: Result) -> None:
    assert (result.token_ids, result.text, result.finish_reason) == (
        expected.token_ids,
        expected.text,
        expected.finish_reason,
    )


def test_an_answer_ends_in_the_middle_of_a_draft_where_it_ends_without_drafts(
    line: InProcessPipeline, drafts: list[list[int]]
) -> None:
    """At a stop string, an end-of-answer token, the last token allowed, and the end of a grammar."""
    whole = _ask(line, "whole")
    tokens = whole.token_ids
    stop = whole.text[len(whole.text) // 2 :][:3]
    cases: dict[str, dict[str, Any]] = {
        "string": {"stop": [stop]},
        "token": {"stop_token_ids": [tokens[17]]},
        "length": {"max_tokens": 9},
        "grammar": {"grammar": make_schema_spec(SCHEMA, "schema"), "ignore_eos": False},
    }
    for name, sampling in cases.items():
        drafts.clear()
        expected = _ask(line, f"{name}-plain", **sampling)
        drafts.append(expected.token_ids + [7] * 9 if name == "grammar" else tokens)
        before = core_of(line.decode).num_accepted_tokens
        result = _ask(line, name, **sampling)
        _check_same(result, expected)
        _check_log(line, result)
        assert core_of(line.decode).num_accepted_tokens > before
    assert core_of(line.decode).num_running == 0


def test_logprobs_and_penalties_are_those_without_drafts(line: InProcessPipeline, drafts: list[list[int]]) -> None:
    sampling = {"logprobs": 2, "repetition_penalty": 1.2, "presence_penalty": 0.5}
    expected = _ask(line, "plain", **sampling)
    drafts.append(expected.token_ids)
    result = _ask(line, "drafted", **sampling)
    _check_same(result, expected)
    assert result.logprobs is not None
    assert expected.logprobs is not None
    assert [[one.token for one in entry.top] for entry in result.logprobs] == [
        [one.token for one in entry.top] for entry in expected.logprobs
    ]
    assert core_of(line.decode).num_accepted_tokens > NUM_TOKENS / 2


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 17])
def test_another_worker_goes_on_where_the_log_ends(
    line: InProcessPipeline, drafts: list[list[int]], num_tokens: int
) -> None:
    expected = _ask(line, "plain")
    drafts.append(expected.token_ids)
    _send(line, "moved")
    line.run_prefill(1)
    line.run_until_tokens("moved", num_tokens)
    line.decode.close()
    line.renew_decode()
    core_of(line.decode).speculates = True
    result = _read_result(line, "moved")
    _check_same(result, expected)
    _check_log(line, result)


def test_a_request_that_is_cancelled_ends_with_the_tokens_before(
    line: InProcessPipeline, drafts: list[list[int]]
) -> None:
    expected = _ask(line, "plain")
    drafts.append(expected.token_ids)
    _send(line, "gone")
    line.run_prefill(1)
    line.run_until_tokens("gone", 5)
    assert line.decode.record.cancel_request("gone")
    result = _read_result(line, "gone")
    assert result.finish_reason == "cancelled"
    assert 5 < len(result.token_ids) < NUM_TOKENS
    assert result.token_ids == expected.token_ids[: len(result.token_ids)]
    _check_log(line, result)
