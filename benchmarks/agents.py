"""The KV that an agent finds again when its tool has worked, among chats of others: with retention, without, and in
vLLM.

python -m benchmarks.agents [--quick | --smoke] [--json FILE]

Agents take 3 to 8 turns with contexts that grow from 2,000 tokens to 8,000 at most (`--quick`: fewer agents, 2,500). A
turn's prompt is the one before, its answer, and a tool's result; the tool works for 1 to 30 s, log-normal. Two sides
are the same engine with retention and without, over an empty pool and an empty tier in shared memory. All agents ask
with retention. The other sides compute most prompts whole, so of five agents one asks them, and times are compared by
its turns; the rest makes their caches roomier, not ours.

**The engine.** A worker's engine with the 134M shape in bfloat16 and random weights, two threads. The tier has room for
twice the KV of all agents, the pool for a tenth, or two agents. The clock is that of the agents, so tools are not
waited for: between two turns come the chats that others have meanwhile. Within the mean time of a tool they fill the
pool and the tier three times over. Most of their blocks are written as if other workers had computed them; one chat a
turn is asked here. Each question is alone in the engine, so its time to the first token is that of loading and
computing its prompt.

    agent_turn_ttft_p50                    of agents' later turns, in seconds
    agent_turn_ttft_p50_vs_no_retention    with retention to without
    agent_cached_share, …_no_retention     tokens that were found, of those that the turn before had
    other_ttft_p99_ratio                   of the others' chats: with retention to without
    others_filled_times                    how often their blocks filled the tier, all in all

**vLLM.** Where it is installed (`make test-vllm`), its engine takes its turn in a process of its own: the same weights,
threads and tokens of a step, not compiled, and its prefix cache on. The cache has as many bytes as our pool and tier
together, and others write as many tokens to it as to our tier, each block with a name of its own.

    vllm_agent_turn_ttft_p50, vllm_agent_cached_share, agent_turn_ttft_p50_vs_vllm

**Many agents.** 2,000 agents of one tenant over the same pool and tier, whose blocks have a few bytes, and no engine:
`agent_cached_share_many`, `agent_cached_share_many_no_retention`.
"""

import hashlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from benchmarks.common import SHM, TIMEOUT_S, Arguments, run_benchmark
from benchmarks.comparison import print_table, take_turns
from benchmarks.peers.engines.vllm import CACHE_BLOCK_TOKENS, CACHE_STEP_TOKENS
from benchmarks.peers.process import ROOT, SideFailed
from benchmarks.peers.process import Side as PeerProcess
from benchmarks.peers.setup import environment_python, is_installed
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.systems import GREEDY, draw_tokens, open_shape, write_shape
from penstock.config.settings import KVSettings
from penstock.engine.engine import Engine
from penstock.engine.memory.pool import BlockPool
from penstock.engine.opening import open_serving_engine
from penstock.engine.sequence import Sequence
from penstock.engine.serving import ServingEngine
from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.arena.layout import Geometry
from penstock.kvstore.block import Block, BlockFormat, BlockKey
from penstock.kvstore.retention import Retentions
from penstock.kvstore.tiers.host import HostTier
from penstock.waiting import wait_until

WITH, WITHOUT, VLLM = "retention", "no retention", "vLLM"
RETENTION_S = 3600.0
"""No tool takes longer than the default of 60 s, but the machine does for what happens meanwhile."""
TOOL_S, TOOL_SPREAD, TOOL_LIMITS_S = 5.0, 0.9, (1.0, 30.0)
"""Median and spread of the log-normal times of tools."""
MEAN_TOOL_S = TOOL_S * math.exp(TOOL_SPREAD**2 / 2)
NUM_TURNS, FIRST_TOKENS, ANSWER_TOKENS, OTHER_TOKENS = (3, 8), 2000, 24, 500
FILLS = 3
"""How often others fill the pool and the tier within the mean time of a tool."""
MAX_WRITTEN = 32
BLOCK_TOKENS = 16
THREADS, STEP_TOKENS = 2, CACHE_STEP_TOKENS
MANY_BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Load:
    """The agents of a run."""

    num_agents: int
    first_tokens: int
    last_tokens: int
    """Tokens of the first and of the longest prompt."""
    num_turns: tuple[int, int] = NUM_TURNS
    compared_every: int = 1
    """Every so many agents one is compared: the others ask only with retention."""

    def count_blocks(self, block_tokens: int) -> int:
        """Return how many blocks all agents have at most."""
        return self.num_agents * -(-(self.last_tokens + ANSWER_TOKENS) // block_tokens)


class Sizes(NamedTuple):
    """How large the caches of a side are."""

    block_bytes: int
    pool_mb: int
    tier_mb: int

    @classmethod
    def choose(cls, load: Load, block_bytes: int) -> Self:
        """Return sizes for a load: the tier has room for twice the KV of all agents, the pool for a tenth, or two."""
        num_blocks = load.count_blocks(BLOCK_TOKENS)
        pool_blocks = max(2 * load.last_tokens // BLOCK_TOKENS, num_blocks // 10)
        tier_mb = -(-2 * num_blocks * block_bytes // 2**20) + 2
        return cls(block_bytes, 8 + pool_blocks * block_bytes // 2**20, tier_mb)


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

    turn_s: dict[Turn, float] = field(default_factory=dict)
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


class Answered(NamedTuple):
    """An answer of an engine."""

    first_s: float
    """Seconds until its first token."""
    token_ids: list[int]
    num_cached: int
    """Tokens of the prompt whose KV was found."""


class Side(Protocol):
    """An engine with a cache, which answers one request at a time."""

    block_tokens: int

    def fill(self, times: float) -> None:
        """Let others write so many times as many blocks as the tier has room for."""

    def ask(self, name: str, prompt: list[int], tenant: str, num_new: int, *, ends_in_call: bool) -> Answered:
        """Answer a request. `ends_in_call`: a tool works next, and then the answer's agent asks again."""


class OwnSide:
    """A worker's engine over an empty pool and an empty tier in shared memory."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, core: Engine, engine: ServingEngine) -> None:
        core.pool.free_blocks(core.pool.allocate_blocks(core.pool.num_free_blocks))  # what was cached is not kept
        (tier,) = engine.store.tiers
        assert isinstance(tier, HostTier)
        self._core, self._engine, self._tier = core, engine, tier
        self._names, self._payload = name_others(), memoryview(bytes(core.block_bytes))

    def fill(self, times: float) -> None:
        """Implement `Side.fill`."""
        fill_with_others(self._core.pool, self._tier, self._names, times, self._payload)

    def ask(self, name: str, prompt: list[int], tenant: str, num_new: int, *, ends_in_call: bool) -> Answered:
        """Implement `Side.ask`. All blocks are written, and what is to be retained is, when it returns."""
        engine, begun_s = self._engine, time.perf_counter()
        seq = Sequence(
            name, prompt, blocks=engine.hash_prompt(tenant, prompt), sampling=GREEDY, seed=0, tenant=tenant,
            max_new_tokens=num_new, was_handed_off=False,
        )  # fmt: skip
        engine.add_request(seq)
        first_s = 0.0
        while seq.num_output_tokens < num_new:
            list(engine.collect_events())
            if not engine.begin_step():
                engine.wait_for_event()
                continue
            if engine.finish_step() and not first_s:
                first_s = time.perf_counter() - begun_s
            engine.store_full_blocks()
        stored = engine.finish_request(name, ends_in_call=ends_in_call)
        if stored is not None:
            stored.result(TIMEOUT_S)
        while engine.is_moving_blocks():
            list(engine.collect_events())
            engine.wait_for_event()
        wait_until(self._has_retained, TIMEOUT_S, "the tier retains what the worker does", every_s=0.001)
        return Answered(first_s, seq.output_token_ids, seq.num_cached_tokens)

    def _has_retained(self) -> bool:
        """Return whether the tier retains as much as the worker: retentions follow the last blocks on their thread."""
        told: Any = self._engine.report_state()["retention"]
        return bool(self._tier.read_usage().retained == sum(told["bytes"].values()) // self._core.block_bytes)


@contextmanager
def open_own_side(core: Engine, sizes: Sizes, retention_s: float) -> Iterator[Side]:
    """Open a worker's engine; afterwards its tier is removed."""
    with tempfile.TemporaryDirectory(prefix="penstock-agents-", dir=SHM) as memory:
        kv = KVSettings(shared_mb=sizes.tier_mb, shared_dir=memory, redis_mb=0, call_retention_s=retention_s)
        with open_serving_engine(core, kv, "", "agents") as engine:
            yield OwnSide(core, engine)
            engine.close()


class VllmSide:
    """vLLM's engine in a process of its own, with one cache as large as our pool and tier together."""

    block_tokens = CACHE_BLOCK_TOKENS

    def __init__(self, process: PeerProcess, tier_tokens: int) -> None:
        self._process, self._tier_tokens = process, tier_tokens

    def fill(self, times: float) -> None:
        """Implement `Side.fill`: others write as many tokens as they write to our tier."""
        self._process.ask("fill", num_tokens=int(times * self._tier_tokens))

    def ask(self, name: str, prompt: list[int], tenant: str, num_new: int, *, ends_in_call: bool) -> Answered:
        """Implement `Side.ask`. vLLM knows no tenants, and is not told what comes next."""
        told = self._process.ask("ask", prompt=prompt, num_new=num_new)
        return Answered(told["first_s"], told["tokens"], told["num_cached"])


@contextmanager
def open_vllm_side(shape: Shape, sizes: Sizes, python: Path) -> Iterator[Side]:
    """Start vLLM on the same weights. Raises `SideFailed` if it does not start."""
    cache_mb = sizes.pool_mb + sizes.tier_mb
    with ExitStack() as exits:
        log = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-"))) / "vllm.log"
        process = PeerProcess("vllm", log, THREADS, cache_mb, python=python)
        exits.callback(process.close)
        try:
            process.ask(
                "load", model=str(write_shape(shape)), threads=THREADS, pool_mb=cache_mb, cache_mb=cache_mb,
                max_length=shape.max_length,
            )  # fmt: skip
        except SideFailed as failed:
            raise SideFailed(f"{failed}\n{log.read_text(errors='replace')[-2000:]}") from None
        yield VllmSide(process, sizes.tier_mb * 2**20 // sizes.block_bytes * BLOCK_TOKENS)


def find_vllm() -> Path | None:
    """Return the Python of an environment with vLLM, that of `make test-vllm` or of the peers; None without one."""
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return own if own.exists() else environment_python("vllm") if is_installed("vllm") else None


def play_agents(
    side: Side, load: Load, seed: int, vocabulary: range, *, compared_only: bool = False, with_others: bool = True
) -> Seen:
    """Let agents take their turns, all or those that are compared, and others `with_others` ask a chat at each turn."""
    seen, prompts, before_s = Seen(), dict[int, list[int]](), 0.0
    for number, turn in enumerate(list_turns(load, seed)):
        times = FILLS * (turn.at_s - before_s) / MEAN_TOOL_S
        side.fill(times)
        seen.num_fills += times
        before_s, chance = turn.at_s, Random(f"{seed} {turn.agent} {turn.number}")
        if with_others:
            other = draw_tokens(Random(f"other {seed} {number}"), OTHER_TOKENS, vocabulary)
            seen.other_s.append(side.ask(f"other-{number}", other, "others", 1, ends_in_call=False).first_s)
        if compared_only and turn.agent % load.compared_every:
            continue
        known = prompts.get(turn.agent, [])
        prompt = known + draw_tokens(chance, turn.num_tokens - len(known), vocabulary)
        name = f"{turn.agent}-{turn.number}"
        answered = side.ask(name, prompt, "agents", ANSWER_TOKENS, ends_in_call=not turn.is_last)
        if turn.number:
            seen.turn_s[turn] = answered.first_s
            seen.num_known += (len(known) - 1) // side.block_tokens * side.block_tokens
            seen.num_found += answered.num_cached
        prompts[turn.agent] = [*prompt, *answered.token_ids]
    return seen


def play_many_agents(load: Load, seed: int, retention_s: float) -> Seen:
    """Let many agents take their turns over a pool and a tier alone, whose blocks have a few bytes."""
    size, payload, names, seen = MANY_BLOCK_TOKENS, memoryview(bytes(64)), name_others(), Seen()
    num_blocks = load.count_blocks(size)
    pool, form = BlockPool(num_blocks // 5, size), BlockFormat(bytes(32), bytes(16), len(payload))
    retentions = Retentions(num_blocks * len(payload), len(payload))
    with tempfile.TemporaryDirectory(prefix="penstock-agents-", dir=SHM) as memory:
        tier = HostTier(Arena.open(form, "agents", Geometry(len(payload), 2 * num_blocks).total_bytes, memory))
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
            seconds = 0.0 if turn.is_last else retention_s
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
    load = given.choose_size(
        Load(40, 2000, 8000, compared_every=5), Load(4, 1500, 2500, (3, 3)), Load(2, 200, 300, (2, 2))
    )
    many = given.choose_size(Load(2000, 2000, 8000), Load(100, 2000, 8000), Load(3, 512, 1024, (2, 2)))
    sizes = Sizes.choose(load, BLOCK_TOKENS * 2 * 2 * shape.layers * shape.kv_heads * shape.head_size)
    core = open_shape(shape, threads=THREADS, pool_mb=sizes.pool_mb, max_step_tokens=STEP_TOKENS)
    core.pool_mapping.wait_until_done()
    assert core.block_bytes == sizes.block_bytes
    sides: dict[str, Callable[[], AbstractContextManager[Side]]] = {
        WITH: partial(open_own_side, core, sizes, RETENTION_S), WITHOUT: partial(open_own_side, core, sizes, 0.0)
    }  # fmt: skip
    if given.size != "smoke" and (python := find_vllm()) is not None:
        sides[VLLM] = partial(open_vllm_side, shape, sizes, python)
    else:
        print("without vLLM: it is not installed (`make test-vllm`), or this is a smoke run")
    seen: dict[str, Seen] = {}
    for seed, side in take_turns(list(sides), 1, "agents"):
        words, limits = range(300, core.model.vocab_size), {"compared_only": side != WITH, "with_others": side != VLLM}
        try:
            with sides[side]() as opened:
                seen[side] = play_agents(opened, load, seed, words, **limits)
        except SideFailed as failed:
            print(f"without {side}: {failed}")
    compared = {name: [one.turn_s[turn] for turn in seen[WITHOUT].turn_s] for name, one in seen.items()}
    print_table(compared, "ms to a turn's first token", 1e3)
    typical = {name: statistics.median(found) for name, found in compared.items()}
    tails = {name: float(np.percentile(one.other_s, 99)) for name, one in seen.items() if one.other_s}
    figures = {
        "agent_turn_ttft_p50": typical[WITH],
        "agent_turn_ttft_p50_vs_no_retention": typical[WITH] / typical[WITHOUT],
        "agent_cached_share": seen[WITH].cached_share,
        "agent_cached_share_no_retention": seen[WITHOUT].cached_share,
        "other_ttft_p99_ratio": tails[WITH] / tails[WITHOUT],
        "others_filled_times": seen[WITH].num_fills,
        "agent_cached_share_many": play_many_agents(many, 0, RETENTION_S).cached_share,
        "agent_cached_share_many_no_retention": play_many_agents(many, 0, 0.0).cached_share,
    }
    if VLLM in seen:
        figures |= {
            "vllm_agent_turn_ttft_p50": typical[VLLM],
            "vllm_agent_cached_share": seen[VLLM].cached_share,
            "agent_turn_ttft_p50_vs_vllm": typical[WITH] / typical[VLLM],
        }
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
