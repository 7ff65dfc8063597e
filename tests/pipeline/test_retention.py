"""An agent's KV while its tool works: small pools and tiers, filled by others, and the tokens of `generate()`."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.settings import KVSettings
from penstock.messages import Request, Result, Sampling
from sim.conversations import make_chat_bodies, make_chat_request
from sim.line import InProcessPipeline, serving_engine
from sim.waiting import wait_for
from sim.workload import ENGINE_SETTINGS, compute_answers, load_tool_model, make_requests
from tests.draws import draw_cases

BLOCK = ENGINE_SETTINGS.block_size
NUM_AGENTS, NUM_TURNS = 3, 3
FIRST_TOKENS, TURN_TOKENS = 240, 40
"""Tokens of an agent's first prompt, and of what a tool's result adds."""
NUM_OTHERS = 9
"""Requests of others between two turns: they fill the pool and both tiers."""
NUM_ROUNDS = -(-1000 // (NUM_TURNS * (NUM_AGENTS + NUM_OTHERS)))
"""A thousand requests, where whole products are run."""
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
MakeLine = Callable[..., InProcessPipeline]


@pytest.fixture
def line(make_line: MakeLine, tmp_path: Path) -> InProcessPipeline:
    """Room for 3 long prompts in the pool, 80 blocks in shared memory and 160 on disk."""
    tiers = KVSettings(
        shared_mb=8, shared_dir=str(tmp_path), disk_mb=16, disk_dir=str(tmp_path / "disk"), redis_mb=0,
        retained_share=1.0,
    )  # fmt: skip
    engine = ENGINE_SETTINGS.model_copy(update={"pool_mb": 12})
    return make_line(kv=tiers, engine=engine)


class Agents:
    """Agents whose prompts go on with their answers, beside requests that fill the pool and the tiers."""

    def __init__(self, line: InProcessPipeline, number: int, tag: str) -> None:
        self._line, self._chance, self._tag = line, random.Random(number), f"{tag}-{number}"
        self._words = make_requests(9, tag)[-1].token_ids or []
        self._prompts = {f"{self._tag}-agent-{agent}": self._draw(FIRST_TOKENS) for agent in range(NUM_AGENTS)}
        self.asked: list[Request] = []
        self.results: dict[str, Result] = {}
        self.cached: list[int] = []
        """Tokens of each agent's prompt that were found at a later turn."""
        self.prompt_tokens: list[int] = []

    def _draw(self, count: int) -> list[int]:
        return self._chance.choices(self._words, k=count)

    def ask(self, requests: list[Request]) -> None:
        """Send requests, and wait for their results."""
        self._line.send_requests(*requests)
        self.asked += requests
        found = self._line.run_until_results(len(self._line.read_results()) + len(requests))
        self.results.update({result.id: result for result in found})

    def run_turn(self, turn: int, retain_s: float | None) -> None:
        """Let each agent ask, then others, who fill the pool and the tiers."""
        mine = [
            Request(
                id=f"{name}-{turn}", token_ids=prompt, tenant=self._tag, retain_s=retain_s, session=name,
                sampling=GREEDY,
            )
            for name, prompt in self._prompts.items()
        ]  # fmt: skip
        self.ask(mine)
        for request, (name, prompt) in zip(mine, list(self._prompts.items()), strict=True):
            result = self.results[request.id]
            if turn:
                self.cached.append(result.usage.cached_tokens)
                self.prompt_tokens.append(len(prompt))
            self._prompts[name] = [*prompt, *result.token_ids, *self._draw(TURN_TOKENS)]
        others = [self._draw(self._chance.randint(200, 600)) for _ in range(NUM_OTHERS)]
        self.ask([
            Request(id=f"{self._tag}-other-{turn}-{number}", token_ids=prompt, sampling=GREEDY)
            for number, prompt in enumerate(others)
        ])  # fmt: skip


def play(line: InProcessPipeline, number: int, retain_s: float | None) -> Agents:
    agents = Agents(line, number, "agents" if retain_s else "forgotten")
    for turn in range(NUM_TURNS):
        agents.run_turn(turn, retain_s)
    return agents


@pytest.mark.in_memory
@pytest.mark.parametrize("number", draw_cases(range(NUM_ROUNDS), 1))
def test_agents_find_their_kv_among_others_and_no_token_changes(line: InProcessPipeline, number: int) -> None:
    retained = play(line, number, 600.0)
    expected = compute_answers(retained.asked)
    assert {name: result.token_ids for name, result in retained.results.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    share = sum(retained.cached) / sum(retained.prompt_tokens)
    assert share > 0.7, "what a turn adds is new, and the last block is computed"
    assert share > 4 * find_share_without(line, number)


def find_share_without(line: InProcessPipeline, number: int) -> float:
    """Return what the same agents find whose KV is not retained."""
    forgotten = play(line, number, None)
    return sum(forgotten.cached) / sum(forgotten.prompt_tokens)


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
