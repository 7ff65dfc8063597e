"""An agent's KV while its tool works: small pools and tiers, filled by others, and the tokens of `generate()`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sim.agents import NUM_PLAYED, RETAIN_S, SMALL_ENGINE, find_wrong, make_small_tiers, play_agents
from sim.conversations import make_chat_bodies, make_chat_request
from sim.line import InProcessPipeline, serving_engine
from sim.waiting import wait_for
from sim.workload import ENGINE_SETTINGS, load_tool_model, make_requests
from tests.draws import draw_cases

BLOCK = ENGINE_SETTINGS.block_size
NUM_ROUNDS = -(-1000 // NUM_PLAYED)
"""A thousand requests, where whole products are run."""
MakeLine = Callable[..., InProcessPipeline]


@pytest.fixture
def line(make_line: MakeLine, tmp_path: Path) -> InProcessPipeline:
    return make_line(kv=make_small_tiers(tmp_path), engine=SMALL_ENGINE)


@pytest.mark.in_memory
@pytest.mark.parametrize("number", draw_cases(range(NUM_ROUNDS), 1))
def test_agents_find_their_kv_among_others_and_no_token_changes(line: InProcessPipeline, number: int) -> None:
    retained = play_agents(line, number, RETAIN_S)
    assert find_wrong(retained) == []
    assert retained.cached_share > 0.7, "what a turn adds is new, and the last block is computed"
    assert retained.cached_share > 4 * play_agents(line, number, None).cached_share


@pytest.mark.in_memory
def test_an_answer_that_calls_a_tool_retains_its_blocks_and_the_last_one_of_the_agent_ends_it(
    make_line: MakeLine,
) -> None:
    line = make_line(load=load_tool_model)
    (calls,), (answers,) = (make_chat_bodies(1, "retention", [kind]) for kind in ("call", "plain"))
    limit = {"max_tokens": 200, "temperature": 0}
    called = make_chat_request("called", calls | limit)
    line.send_requests(called, make_chat_request("said", answers | limit))
    told = {result.id: result for result in line.run_until_results(2)}
    assert ("<tool_call>" in told["called"].text, "<tool_call>" in told["said"].text) == (True, False)
    engine = serving_engine(line.decode)
    retained = engine.report_state()["retention"]
    num_blocks = (told["called"].usage.prompt_tokens + told["called"].usage.completion_tokens - 1) // BLOCK
    assert retained == {
        "bytes": {"default": num_blocks * engine.store.layout.payload_bytes}, "retained": num_blocks, "found": 0,
    }  # fmt: skip
    prefilled = serving_engine(line.prefill).report_state()["retention"]
    assert prefilled == {"bytes": {}, "retained": 0, "found": 0}, "it does not know how they end"


@pytest.mark.in_memory
def test_what_the_tiers_have_lost_is_written_again_before_the_pool_loses_it(line: InProcessPipeline) -> None:
    engine, store = serving_engine(line.decode), serving_engine(line.decode).store
    (request,) = make_requests(1, "lost", max_tokens=3 * BLOCK)
    prompt = make_requests(9, "lost")[-1].token_ids or []
    sampling = request.sampling.model_copy(update={"ignore_eos": True})
    request = request.model_copy(update={"token_ids": prompt[: 5 * BLOCK], "retain_s": 60.0, "sampling": sampling})
    line.send_requests(request)
    line.run_prefill(1)
    line.run_until_tokens(request.id, 2 * BLOCK)
    keys = engine.hash_prompt("lost", prompt[: 5 * BLOCK]).hasher.keys
    for tier in store.tiers:
        tier.remove_blocks([key.hash for key in keys])
    line.run_until_results(1)
    wait_for(lambda: [tier.read_usage().retained for tier in store.tiers] == [7, 7], "all blocks are in both tiers")
    assert [tier.has_blocks([key.hash for key in keys]) for tier in store.tiers] == [[True] * 5] * 2
