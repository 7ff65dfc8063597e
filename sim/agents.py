"""Agents whose KV is retained while their tools work, in a pipeline whose pool and tiers are small.

Each turn goes on with the answer of the one before. Between two turns come requests of others, which fill the pool and
the tiers.
"""

import random
from pathlib import Path

from penstock.config.addresses import Addresses
from penstock.config.settings import KVSettings
from penstock.messages import Request, Result, Sampling
from sim.line import InProcessPipeline
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests

NUM_AGENTS, NUM_TURNS = 3, 3
FIRST_TOKENS, TURN_TOKENS = 240, 40
"""Tokens of an agent's first prompt, and of what a tool's result adds."""
NUM_OTHERS = 9
"""Requests of others between two turns: they fill the pool and both tiers."""
NUM_PLAYED = NUM_TURNS * (NUM_AGENTS + NUM_OTHERS)
"""Requests of one play."""
RETAIN_S = 600.0
POOL_MB, SHARED_MB, DISK_MB = 12, 8, 16
"""Room for 3 long prompts in the pool, 80 blocks in shared memory and 160 on disk."""
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)
SMALL_ENGINE = ENGINE_SETTINGS.model_copy(update={"pool_mb": POOL_MB})


def make_small_tiers(directory: Path) -> KVSettings:
    """Return settings of tiers below a directory."""
    return KVSettings(
        shared_mb=SHARED_MB, shared_dir=str(directory), disk_mb=DISK_MB, disk_dir=str(directory / "disk"), redis_mb=0,
        retained_share=1.0,
    )  # fmt: skip


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

    @property
    def cached_share(self) -> float:
        """The share of later turns' prompts that was found."""
        return sum(self.cached) / sum(self.prompt_tokens)

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


def play_agents(line: InProcessPipeline, number: int, retain_s: float | None) -> Agents:
    """Let agents take all their turns."""
    agents = Agents(line, number, "agents" if retain_s else "forgotten")
    for turn in range(NUM_TURNS):
        agents.run_turn(turn, retain_s)
    return agents


def find_wrong(agents: Agents) -> list[str]:
    """Return what is wrong with the answers: their tokens are to be those of `generate()`."""
    expected = compute_answers(agents.asked)
    return [
        f"{name}: {agents.results[name].token_ids} are not the tokens {answer.token_ids}"
        for name, answer in expected.items()
        if agents.results[name].token_ids != answer.token_ids
    ]


def play_line(seed: int, directory: Path) -> tuple[int, list[str]]:
    """Play agents with retention and without, without any server. Return how many requests there were, and what is
    wrong.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tiers = make_small_tiers(directory)
    with InProcessPipeline(Addresses(pipeline=f"agents-{seed}"), kv=tiers, engine=SMALL_ENGINE, in_memory=True) as line:
        retained, forgotten = play_agents(line, seed, RETAIN_S), play_agents(line, seed, None)
    told = [*find_wrong(retained), *find_wrong(forgotten)]
    if retained.cached_share < max(0.7, 2 * forgotten.cached_share):
        told.append(f"{retained.cached_share:.0%} were found with retention, {forgotten.cached_share:.0%} without")
    return len(retained.asked) + len(forgotten.asked), told
