"""Answers that may fill the context: they end with it, and explicit limits that do not fit are refused."""

import pytest

from penstock.config.settings import EngineSettings
from penstock.messages import DEFAULT_MAX_TOKENS, Request, Sampling
from sim.line import InProcessPipeline, core_of
from sim.workload import load_demo_model

NO_LIMIT = 2**31 - 1
pytestmark = pytest.mark.in_memory


def ask(name: str, length: int, max_tokens: int, *, fits: bool = True) -> Request:
    sampling = Sampling(max_tokens=max_tokens, fit_context=True if fits else None, temperature=0, ignore_eos=True)
    return Request(id=name, token_ids=[5 + n % 200 for n in range(length)], sampling=sampling)


def test_an_answer_ends_with_the_context_or_with_its_limit_whichever_is_first(line: InProcessPipeline) -> None:
    context = load_demo_model().context_length
    line.send_requests(
        ask("open", context - 20, NO_LIMIT),
        ask("limited", context - 20, 7),
        ask("last", context - 1, NO_LIMIT),
        ask("full", context, NO_LIMIT),
        ask("explicit", context - 20, 21, fits=False),
    )
    results = {result.id: result for result in line.run_until_results(5)}
    ends = {name: (result.finish_reason, len(result.token_ids)) for name, result in results.items()}
    lengths = {"open": 20, "limited": 7, "last": 1}
    assert ends == {name: ("length", count) for name, count in lengths.items()} | dict.fromkeys(
        ("full", "explicit"), ("error", 0)
    )
    assert {results[name].error.code for name in ("full", "explicit")} == {"prompt_too_long"}  # type: ignore[union-attr]
    assert results["open"].token_ids[:7] == results["limited"].token_ids


def test_a_pool_that_is_smaller_than_the_context_ends_answers_too(line: InProcessPipeline) -> None:
    """First the pool of decode alone is smaller, then both are."""
    block = EngineSettings().block_size
    line.send_requests(ask("decode", 100, NO_LIMIT))
    line.run_prefill(1)
    for worker in (line.decode, line.prefill):
        pool = core_of(worker).pool
        pool.num_blocks = 8
    (decode,) = line.run_until_results(1)
    assert (decode.finish_reason, len(decode.token_ids)) == ("length", 8 * block + 1 - 100)
    line.send_requests(ask("both", 100, NO_LIMIT), ask("explicit", 100, 8 * block + 2 - 100, fits=False))
    both, explicit = (next(one for one in line.run_until_results(3) if one.id == name) for name in ("both", "explicit"))
    assert (both.finish_reason, both.token_ids) == ("length", decode.token_ids)
    assert explicit.error is not None
    assert explicit.error.code == "prompt_too_long"


def test_a_change_of_workers_changes_nothing(line: InProcessPipeline) -> None:
    context = load_demo_model().context_length
    line.send_requests(ask("whole", context - 20, NO_LIMIT))
    (whole,) = line.run_until_results(1)
    line.send_requests(ask("cut", context - 20, NO_LIMIT))
    line.run_prefill(1)
    line.run_until_tokens("cut", 10)
    line.decode.close()
    line.renew_decode()
    cut = next(result for result in line.run_until_results(2) if result.id == "cut")
    assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids)


def test_the_reported_load_does_not_grow_with_the_context(line: InProcessPipeline) -> None:
    """Workers expect as many tokens as recent answers had, and the default limit before the first answer."""
    line.send_requests(ask("first", 20, NO_LIMIT))
    line.run_prefill(1)
    prefill = line.prefill.report_load()["interactive"]
    assert isinstance(prefill, dict)
    assert prefill["mean_output_tokens"] == DEFAULT_MAX_TOKENS

    def left() -> object:
        load = line.decode.report_load()["interactive"]
        assert isinstance(load, dict)
        return load["output_tokens"]

    line.run_until_tokens("first", 5)
    task = line.decode.running["first"]
    assert left() == DEFAULT_MAX_TOKENS - task.claim.num_tokens
    line.decode.load.mean_output_tokens["interactive"].add(40)
    assert left() == 40 - task.claim.num_tokens
    line.run_until_tokens("first", 44)
    assert left() == 1
    assert line.decode.load.mean_output_tokens["interactive"].value == 40
