"""What can happen to a request on its way: cancelled, sent twice, given up, of either class, ended in prefill."""

from collections.abc import Callable
from contextlib import closing
from unittest import mock

import pytest

from penstock.config.settings import RecordSettings, StaySettings
from penstock.messages import Request, Sampling, Usage, now_s
from penstock.prefill_worker.stay import StayPolicy
from sim.line import InProcessPipeline, core_of, run_until_idle
from sim.waiting import wait_for
from sim.workload import load_split_model
from tests.engine.helpers import needs_kernels

pytestmark = [pytest.mark.in_memory, pytest.mark.proof]


@pytest.fixture
def line(make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(record=RecordSettings(max_attempts=2, retry_first_s=0.05))


def ask(name: str, max_tokens: int = 6, **changes: object) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request.model_validate({"id": name, "prompt": "In the beginning", "sampling": sampling, **changes})


def test_cancelled_refused_or_too_late_it_has_used_nothing(line: InProcessPipeline) -> None:
    line.decode.record.cancel_request("cancelled")
    line.send_requests(
        ask("cancelled"),
        ask("prompt_too_long", prompt=None, token_ids=[5] * 5000),
        ask("deadline_exceeded", deadline=now_s() - 1),
        ask("stays"),
    )
    results = {result.id: result for result in line.run_until_results(4)}
    stays = results.pop("stays")
    assert (stays.error, stays.usage.prompt_tokens > 0) == (None, True)
    assert results["cancelled"].finish_reason == "cancelled"
    for name, result in results.items():
        assert result.error is not None
        assert (result.error.code, result.token_ids, result.usage) == (name, [], Usage())


def test_cancelled_while_it_waits_for_decode_it_has_used_its_prompt(line: InProcessPipeline) -> None:
    line.send_requests(ask("gone"))
    line.run_prefill(1)
    assert line.decode.record.cancel_request("gone")
    (result,) = line.run_until_results(1)
    assert result.finish_reason == "cancelled"
    assert result.error is not None
    assert result.error.message == "the request was cancelled"
    assert result.usage.prompt_tokens > 0


def test_both_classes_are_answered_and_keep_their_class(line: InProcessPipeline) -> None:
    slow, quick = ask("slow", priority_class="batch"), ask("quick", priority_class="interactive")
    line.publish_bytes(slow.encode(), slow.id, line.pipeline.request_topic("batch"))
    line.send_requests(quick)
    results = {result.id: result.priority_class for result in line.run_until_results(2)}
    assert results == {"slow": "batch", "quick": "interactive"}


def test_chat_tokens_are_those_of_the_template(line: InProcessPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that adds a first token to every text does not add it to what the template wrote."""
    tokenizer, given = core_of(line.prefill).model.tokenizer, []

    class Recording:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
            given.append(add_special_tokens)
            return {"input_ids": tokenizer(text)["input_ids"]}

    monkeypatch.setattr(vars(line.prompt_tokenizer)["_chats"], "_tokenizer", Recording())
    line.send_requests(
        ask("chat", prompt=None, messages=[{"role": "user", "content": "In the beginning"}]), ask("plain")
    )
    line.run_prefill(2)
    assert sorted(given) == [False, True]


@pytest.mark.parametrize("how", ["cancelled", "deadline_exceeded"])
def test_ended_while_its_prompt_is_computed(line: InProcessPipeline, how: str) -> None:
    """In the middle of a long prompt: no token is sampled, and the blocks are free again."""
    token_ids = [5 + n % 200 for n in range(900)]
    line.send_requests(ask("stopped", prompt=None, token_ids=token_ids))
    prefill = line.prefill
    while not (prefill.running and prefill.running["stopped"].num_prefilled_tokens > 0):
        prefill.run_once()
    task = prefill.running["stopped"]
    assert task.message is not None
    if how == "cancelled":
        assert prefill.record.cancel_request("stopped")
    else:
        task.message = task.message.model_copy(update={"deadline": now_s()})

    def has_ended() -> bool:  # no step is made: it hears of it without one
        prefill._handle_claim_news()
        prefill._end_overdue()
        return not prefill.running

    wait_for(has_ended, "the end")
    (result,) = line.run_until_results(1)
    run_until_idle(prefill)
    assert core_of(prefill).num_free_blocks == core_of(prefill).pool.num_blocks
    assert (result.error and result.error.code, result.token_ids) == (how, [])
    assert 0 < result.usage.prompt_tokens < len(token_ids)


@needs_kernels
@pytest.mark.in_memory
def test_one_hop_changes_no_token_where_prompts_and_answers_have_weights_in_two_forms(
    make_line: Callable[..., InProcessPipeline],
) -> None:
    """A worker of both stages has both forms. The second request finds no KV of the first one, whose tenant differs."""
    with mock.patch("sim.line.load_native_demo_model", load_split_model):
        line = make_line()
        line.send_requests(ask("two-hops", max_tokens=12, tenant="one"))
        (two_hops,) = line.run_until_results(1)
        with closing(line.make_auto("auto-0", StayPolicy(StaySettings(), lambda: ()))) as worker:
            line.send_requests(ask("one-hop", max_tokens=12, tenant="two"))
            run_until_idle(worker)
    _, one_hop = line.read_results()
    assert (two_hops.timings.handed_off > 0.0, one_hop.timings.handed_off) == (True, 0.0)
    assert one_hop.token_ids == two_hops.token_ids
