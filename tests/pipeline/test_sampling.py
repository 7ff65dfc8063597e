"""Penalties and log probabilities through the whole pipeline, and through a change of workers in the middle."""

from typing import Any

import pytest

from penstock.client.sync import Client
from penstock.ingest.openai.completions import join_prompt_text
from penstock.messages import GrammarSpec, Logprobs, Request, Sampling, TokenEvent
from sim.line import InProcessPipeline
from sim.workload import load_demo_model

NUM_TOKENS = 30
SAMPLING: dict[str, Any] = {
    "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.4, "top_p": 0.9, "min_p": 0.02, "seed": 11,
    "repetition_penalty": 1.2, "presence_penalty": 0.8, "frequency_penalty": 0.6, "logit_bias": {13: -100.0},
    "logprobs": 3,
}  # fmt: skip


def _values(logprobs: Logprobs) -> list[float]:
    return [logprobs.logprob, *(entry.logprob for entry in logprobs.top)]


def ask(name: str, **changes: Any) -> Request:
    return Request(id=name, prompt="In the beginning God said", sampling=Sampling(**(SAMPLING | changes)))


def test_tokens_and_logprobs_are_the_same_after_a_change_of_workers(line: InProcessPipeline) -> None:
    line.send_requests(ask("whole"))
    (whole,) = line.run_until_results(1)
    line.send_requests(ask("cut"))
    line.run_prefill(1)
    line.run_until_tokens("cut", NUM_TOKENS // 2)
    line.decode.close()
    line.renew_decode()
    cut = next(result for result in line.run_until_results(2) if result.id == "cut")
    assert len(cut.token_ids) == NUM_TOKENS
    assert cut.token_ids == whole.token_ids
    assert cut.logprobs is not None
    assert whole.logprobs is not None
    assert [len(one.top) for one in cut.logprobs] == [3] * NUM_TOKENS
    for ours, theirs in zip(cut.logprobs, whole.logprobs, strict=True):
        # The new worker computes the KV of the earlier tokens at once: the model's own sums may round differently.
        assert [entry.token for entry in ours.top] == [entry.token for entry in theirs.top]
        assert _values(ours) == pytest.approx(_values(theirs), abs=1e-4)
    with Client(line.addresses) as client:
        events = [event for event in client.stream("cut") if isinstance(event, TokenEvent)]
        late = [event for event in client.stream("cut", after=events[9].id) if isinstance(event, TokenEvent)]
        assert client.result("cut").logprobs == cut.logprobs
    assert [event.logprobs for event in events] == cut.logprobs
    assert [event.logprobs for event in late] == cut.logprobs[10:]


@pytest.mark.in_memory
def test_an_answer_does_not_end_before_min_tokens(line: InProcessPipeline) -> None:
    """Neither by itself, nor by a stop token, nor by a stop string; and the same after a change of workers."""
    (eos,) = load_demo_model().eos_token_ids
    ends = {"temperature": 0.0, "ignore_eos": False, "logit_bias": {eos: 100.0}}
    letters = GrammarSpec(kind="regex", source="[a-z]{2,90}")
    line.send_requests(
        ask("at-once", **ends),
        ask("later", **ends, min_tokens=7),
        ask("stop-token", **ends | {"logit_bias": {302: 100.0}}, stop_token_ids=[302], min_tokens=7),
        ask("open", **ends | {"logprobs": None}, min_tokens=7, grammar=letters),
        ask("short", **ends | {"logprobs": None}, min_tokens=7, grammar=GrammarSpec(kind="choice", source='["x"]')),
    )
    results = {result.id: result for result in line.run_until_results(5)}
    assert {result.finish_reason for result in results.values()} == {"stop"}
    lengths = {name: len(result.token_ids) for name, result in results.items()}
    assert lengths["at-once"] == 1
    assert lengths["later"] == lengths["stop-token"] == lengths["open"] == 8
    assert results["later"].token_ids[-1] == results["open"].token_ids[-1] == eos
    assert results["short"].text == "x"
    line.send_requests(ask("cut", **ends, min_tokens=7))
    line.run_prefill(1)
    line.run_until_tokens("cut", 3)
    line.decode.close()
    line.renew_decode()
    cut = next(result for result in line.run_until_results(6) if result.id == "cut")
    assert cut.token_ids == results["later"].token_ids


@pytest.mark.in_memory
def test_a_prompts_log_probabilities_come_with_the_first_token(line: InProcessPipeline) -> None:
    """Also where its KV is cached, and from another worker where the first one died before it wrote a token."""
    plain, fields = ask("plain", logprobs=None), {"logprobs": None, "prompt_logprobs": 2}
    line.send_requests(plain)
    line.run_until_results(1)
    line.send_requests(ask("asked", **fields))
    asked = next(result for result in line.run_until_results(2) if result.id == "asked")
    line.send_requests(ask("cut", **fields))
    silent = line.silence_worker("prefill")
    cut = next(result for result in line.run_until_results(3) if result.id == "cut")
    silent.close()
    model, prompt = load_demo_model(), plain.prompt
    assert asked.prompt_tokens is not None
    assert [one.token for one in asked.prompt_tokens] == model.tokenizer(prompt)["input_ids"]
    assert join_prompt_text(asked.prompt_tokens) == prompt
    assert [one.logprob is None for one in asked.prompt_tokens] == [True] + [False] * (len(asked.prompt_tokens) - 1)
    assert [len(one.top) for one in asked.prompt_tokens[1:]] == [2] * (len(asked.prompt_tokens) - 1)
    assert asked.usage.cached_tokens == 0
    assert cut.prompt_tokens == asked.prompt_tokens
    assert cut.token_ids == asked.token_ids
    first, second, *_ = line.decode.record.read_log("cut")
    assert isinstance(first, TokenEvent)
    assert isinstance(second, TokenEvent)
    assert (first.prompt_tokens, second.prompt_tokens) == (cut.prompt_tokens, None)


@pytest.mark.in_memory
def test_only_who_asks_gets_logprobs_and_penalties(line: InProcessPipeline) -> None:
    """Other requests get neither, and log probabilities do not change the tokens."""
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}}
    line.send_requests(ask("penalised"), ask("plain", **plain), ask("silent", logprobs=None))
    results = {result.id: result for result in line.run_until_results(3)}
    assert results["silent"].token_ids == results["penalised"].token_ids != results["plain"].token_ids
    assert results["silent"].logprobs is None
    assert 13 not in results["penalised"].token_ids
    events = line.decode.record.read_log("silent")
    assert all(event.logprobs is None for event in events if isinstance(event, TokenEvent))


@pytest.mark.in_memory
def test_a_bias_for_a_token_beyond_the_vocabulary_is_refused(line: InProcessPipeline) -> None:
    line.send_requests(ask("beyond", logit_bias={1024: 1.0}), ask("last", logit_bias={1023: -1.0}))
    results = {result.id: result for result in line.run_until_results(2)}
    error = results["beyond"].error
    assert error is not None
    assert error.code == "invalid_request"
    assert "logit_bias" in error.message
    assert results["last"].error is None
