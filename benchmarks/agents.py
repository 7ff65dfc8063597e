"""The KV that an agent finds again when its tool has worked, among chats of others: with retention, and without.

python -m benchmarks.agents [--quick | --smoke] [--json FILE]

Agents take 3 to 8 turns with contexts that grow from 2,000 tokens to 8,000 at most (`--quick`: fewer agents, 2,500). A
turn's prompt is the one before, its answer, and a tool's result; the tool works for 1 to 30 s, log-normal. The sides
are the same engine with retention and without, over an empty pool and an empty tier in shared memory, and take turns.

**The engine.** A worker's engine with the 134M shape in bfloat16 and random weights, two threads. The tier has room for
twice the KV of all agents, the pool for a tenth, or two agents. The clock is that of the agents, so tools are not
waited for: between two turns come the chats that others have meanwhile. Within the mean time of a tool they fill the
pool and the tier three times over. Most of their blocks are written as if other workers had computed them; one chat a
turn is asked here. Each question is alone in the engine, so its time to the first token is that of loading and
computing its prompt.

    agent_turn_ttft_p50_vs_no_retention    of agents' later turns: with retention to without
    agent_cached_share, …_no_retention     tokens that were found, of those that the turn before had
    other_ttft_p99_ratio                   of the others' chats: with retention to without
    others_filled_times                    how often their blocks filled the tier, all in all

**Many agents.** 2,000 agents of one tenant over the same pool and tier, whose blocks have a few bytes, and no engine:
`agent_cached_share_many`, `agent_cached_share_many_no_retention`.
"""

import hashlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

import numpy as np

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, print_table, take_turns
from benchmarks.peers.shapes import SHAPES
from benchmarks.systems import GREEDY, draw_tokens, open_shape
from penstock.config.settings import KVSettings
from penstock.engine.engine import Engine
from penstock.engine.memory.pool import BlockPool
from penstock.engine.opening import open_serving_engine
from penstock.engine.sequence import Sequence
from penstock.engine.serving import ServingEngine
from penstock.kvstore.arena.layout import Geometry
from penstock.kvstore.block import Block, BlockFormat, BlockKey
from penstock.kvstore.retention import Retentions
from penstock.kvstore.tiers.host import HostTier

WITH, WITHOUT = "retention", "no retention"
RETENTION_S = {WITH: 3600.0, WITHOUT: 0.0}
"""No tool takes longer than the default of 60 s, but the machine does for what happens meanwhile."""
TOOL_S, TOOL_SPREAD, TOOL_LIMITS_S = 5.0, 0.9, (1.0, 30.0)
"""Median and spread of the log-normal times of tools."""
MEAN_TOOL_S = TOOL_S * math.exp(TOOL_SPREAD**2 / 2)
NUM_TURNS, FIRST_TOKENS, ANSWER_TOKENS, OTHER_TOKENS = (3, 8), 2000, 24, 500
FILLS = 3
"""How often others fill the pool and the tier within the mean time of a tool."""
MAX_WRITTEN = 32
BLOCK_TOKENS = 16
MANY_BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Load:
    """The agents of a run."""

    num_agents: int
    first_tokens: int
    last_tokens: int
    """Tokens of the first and of the longest prompt."""
    num_turns: tuple[int, int] = NUM_TURNS

    def count_blocks(self, block_tokens: int) -> int:
        """Return how many blocks all agents have at most."""
        return self.num_agents * -(-(self.last_tokens + ANSWER_TOKENS) // block_tokens)


class Turn(NamedTuple):
    """A turn of an agent."""

    at_s: float
    agent: int
    number: int
    num_tokens: int
    """Tokens of its prompt."""
    is_last: bool


def list_turns(load: Load, seed: int) -> list[Turn]:
    """Return the turns of all agents in the order of their times."""
    turns: list[Turn] = []
    for agent in range(load.num_agents):
        chance = Random(f"agent {seed} {agent}")
        count, at_s = chance.randint(*load.num_turns), chance.uniform(0, 2 * MEAN_TOOL_S)
        step = (load.last_tokens - load.first_tokens) // load.num_turns[1]
        for number in range(count):
            turns.append(Turn(at_s, agent, number, load.first_tokens + number * step, number == count - 1))
            low, high = TOOL_LIMITS_S
            at_s += min(high, max(low, chance.lognormvariate(math.log(TOOL_S), TOOL_SPREAD)))
    return sorted(turns)


def name_others() -> Iterator[BlockKey]:
    """Yield names of blocks that nobody asks for again."""
    for number in itertools.count():
        yield BlockKey(hashlib.sha256(f"other {number}".encode()).digest(), BLOCK_TOKENS, bytes(16))


def fill_with_others(
    pool: BlockPool, tier: HostTier, names: Iterator[BlockKey], times: float, payload: memoryview
) -> None:
    """Write blocks of others to the pool and to the tier, so many times as many as each has room for."""
    num_pool, num_tier = int(times * pool.num_blocks), int(times * tier.arena.geometry.num_slots)
    for start in range(0, num_pool, MAX_WRITTEN):
        blocks = pool.allocate_blocks(min(MAX_WRITTEN, num_pool - start, pool.num_free_blocks))
        for block in blocks:
            pool.register_block(block, next(names).hash)
        pool.free_blocks(blocks)
    for start in range(0, num_tier, MAX_WRITTEN):
        count = min(MAX_WRITTEN, num_tier - start)
        tier.put([Block(name, payload) for name in itertools.islice(names, count)])


@dataclass
class Seen:
    """What one side has seen."""

    turn_s: list[float] = field(default_factory=list)
    """Times to the first token of later turns."""
    other_s: list[float] = field(default_factory=list)
    num_found: int = 0
    num_known: int = 0
    """Tokens of later turns that the turn before had, in full blocks, and those of them that were found."""
    num_fills: float = 0.0
    """How often others have filled the pool and the tier."""

    @property
    def cached_share(self) -> float:
        """The share of known tokens that was found."""
        return self.num_found / max(1, self.num_known)


def ask_engine(
    engine: ServingEngine, name: str, prompt: list[int], tenant: str, *, ends_in_call: bool
) -> tuple[float, Sequence]:
    """Return the seconds until an answer's first token, and the request after its end."""
    begun_s = time.perf_counter()
    seq = Sequence(
        name, prompt, blocks=engine.hash_prompt(tenant, prompt), sampling=GREEDY, seed=0, tenant=tenant,
        max_new_tokens=ANSWER_TOKENS, was_handed_off=False,
    )  # fmt: skip
    engine.add_request(seq)
    first_s = 0.0
    while seq.num_output_tokens < ANSWER_TOKENS:
        list(engine.collect_events())
        if not engine.begin_step():
            engine.wait_for_event()
            continue
        if engine.finish_step() and not first_s:
            first_s = time.perf_counter() - begun_s
        engine.store_full_blocks()
    stored = engine.finish_request(name, ends_in_call=ends_in_call)
    if stored is not None:
        stored.result(60)
    while engine.is_moving_blocks():
        list(engine.collect_events())
        engine.wait_for_event()
    time.sleep(0.02)  # the retention follows the last blocks on the same thread
    return first_s, seq


def play_agents(core: Engine, load: Load, seed: int, side: str) -> Seen:
    """Let all agents take their turns, among others."""
    seen, names, vocabulary = Seen(), name_others(), range(300, core.model.vocab_size)
    prompts: dict[int, list[int]] = {}
    core.pool.free_blocks(core.pool.allocate_blocks(core.pool.num_free_blocks))  # what was cached is not kept
    tier_mb = -(-2 * load.count_blocks(BLOCK_TOKENS) * core.block_bytes // 2**20) + 2
    payload = memoryview(bytes(core.block_bytes))
    with ExitStack() as exits:
        memory = exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-agents-", dir=SHM))
        kv = KVSettings(shared_mb=tier_mb, shared_dir=memory, redis_mb=0, call_retention_s=RETENTION_S[side])
        engine = exits.enter_context(open_serving_engine(core, kv, "", "agents"))
        (tier,) = engine.store.tiers
        assert isinstance(tier, HostTier)
        before_s = 0.0
        for number, turn in enumerate(list_turns(load, seed)):
            times = FILLS * (turn.at_s - before_s) / MEAN_TOOL_S
            fill_with_others(core.pool, tier, names, times, payload)
            seen.num_fills += times
            before_s, chance = turn.at_s, Random(f"{seed} {turn.agent} {turn.number}")
            other = draw_tokens(Random(f"other {seed} {number}"), OTHER_TOKENS, vocabulary)
            seen.other_s.append(ask_engine(engine, f"other-{number}", other, "others", ends_in_call=False)[0])
            known = prompts.get(turn.agent, [])
            prompt = known + draw_tokens(chance, turn.num_tokens - len(known), vocabulary)
            first_s, seq = ask_engine(
                engine, f"{turn.agent}-{turn.number}", prompt, "agents", ends_in_call=not turn.is_last
            )
            if turn.number:
                seen.turn_s.append(first_s)
                seen.num_known += (len(known) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                seen.num_found += seq.num_cached_tokens
            prompts[turn.agent] = [*prompt, *seq.output_token_ids]
        engine.close()
    return seen


def play_many_agents(load: Load, seed: int, side: str) -> Seen:
    """Let many agents take their turns over a pool and a tier alone, whose blocks have a few bytes."""
    size, payload, names, seen = MANY_BLOCK_TOKENS, memoryview(bytes(64)), name_others(), Seen()
    num_blocks = load.count_blocks(size)
    pool, form = BlockPool(num_blocks // 5, size), BlockFormat(bytes(32), bytes(16), len(payload))
    retentions = Retentions(num_blocks * len(payload), len(payload))
    with tempfile.TemporaryDirectory(prefix="penstock-agents-", dir=SHM) as memory:
        tier = HostTier.open_shared(form, "agents", Geometry(len(payload), 2 * num_blocks).total_bytes, memory)
        before_s = 0.0
        for turn in list_turns(load, seed):
            fill_with_others(pool, tier, names, FILLS * (turn.at_s - before_s) / MEAN_TOOL_S, payload)
            before_s = turn.at_s
            keys = [
                BlockKey(hashlib.sha256(f"{turn.agent} {place}".encode()).digest(), size, bytes(16))
                for place in range((turn.num_tokens + ANSWER_TOKENS) // size)
            ]
            hashes = [key.hash for key in keys]
            num_held = pool.count_cached_prefix(hashes)
            here = tier.has_blocks(hashes[num_held:])
            num_here = num_held + (here.index(False) if False in here else len(here))
            name = f"{turn.agent}-{turn.number}"
            _, change = retentions.take_over("agents", name, keys, num_here)
            if turn.number:
                step = (load.last_tokens - load.first_tokens) // load.num_turns[1]
                num_known = (turn.num_tokens - step + ANSWER_TOKENS) // size
                seen.num_known += num_known
                seen.num_found += min(num_here, num_known)
            pinned = pool.pin_cached_prefix(hashes)
            new = pool.allocate_blocks(min(len(keys) - len(pinned), pool.num_free_blocks))
            for block, key in zip(new, hashes[len(pinned) :], strict=False):
                pool.register_block(block, key)
            tier.put([Block(key, payload) for key in keys])
            seconds = 0.0 if turn.is_last else RETENTION_S[side]
            for one in (change, retentions.replace_retention("agents", name, keys, seconds, turn.num_tokens // size)):
                for some, for_s in ((one.retained, one.seconds), (one.released, 0.0)):
                    pool.retain_blocks([key.hash for key in some], for_s)
                    tier.retain_blocks([key.hash for key in some], for_s)
            pool.free_blocks([*pinned, *new])
        tier.close()
    return seen


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    name = given.choose_size("small", "small", "smoke")
    shape = replace(SHAPES[name], name=f"{name}_long", max_length=8192)
    load = given.choose_size(Load(40, 2000, 8000), Load(4, 1500, 2500, (3, 3)), Load(2, 200, 300, (2, 2)))
    many = given.choose_size(Load(2000, 2000, 8000), Load(100, 2000, 8000), Load(3, 512, 1024, (2, 2)))
    block_bytes = BLOCK_TOKENS * 2 * 2 * shape.layers * shape.kv_heads * shape.head_size
    pool_mb = (
        8 + max(2 * load.last_tokens // BLOCK_TOKENS, load.count_blocks(BLOCK_TOKENS) // 10) * block_bytes // 2**20
    )
    seen: dict[str, list[Seen]] = {WITH: [], WITHOUT: []}
    core = open_shape(shape, threads=2, pool_mb=pool_mb, max_step_tokens=512)
    core.pool_mapping.wait_until_done()
    for number, side in take_turns([WITH, WITHOUT], given.choose_size(3, 1, 1), "agents"):
        seen[side].append(play_agents(core, load, number, side))
    print_table({f"agents, {side}": [1000 * statistics.median(one.turn_s) for one in found]
                 for side, found in seen.items()}, "ms to a turn's first token, median")  # fmt: skip
    typical = {side: [statistics.median(one.turn_s) for one in found] for side, found in seen.items()}
    tails = {side: [float(np.percentile(one.other_s, 99)) for one in found] for side, found in seen.items()}
    shares = {side: statistics.median(one.cached_share for one in found) for side, found in seen.items()}
    return {
        "agent_turn_ttft_p50_vs_no_retention": compute_ratio(typical, WITH, WITHOUT),
        "agent_cached_share": shares[WITH],
        "agent_cached_share_no_retention": shares[WITHOUT],
        "other_ttft_p99_ratio": compute_ratio(tails, WITH, WITHOUT),
        "others_filled_times": statistics.median(one.num_fills for one in seen[WITH]),
        "agent_cached_share_many": play_many_agents(many, 0, WITH).cached_share,
        "agent_cached_share_many_no_retention": play_many_agents(many, 0, WITHOUT).cached_share,
    }


if __name__ == "__main__":
    run_benchmark(__doc__, run)
