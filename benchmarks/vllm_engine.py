"""What workers with vLLM lose against vLLM alone: first tokens after a known prefix, prefill, and throughput.

.venv-vllm/bin/python -m benchmarks.vllm_engine [--quick | --smoke] [--json FILE]

Sides take turns in one run, with the same prompts. The first figures come from this process, on one core and with one
thread: vLLM's own engine as its library has it, and vLLM in the engine of a worker, over a KV store. For the
throughput there is a pipeline with a prefill and a decode worker of one thread each, and Kafka beside them on the same
cores, against vLLM's own engine with two threads. That one runs before the pipeline is started and after it has ended:
its spinning threads lose most of their speed beside anything else. Weights are random, in bfloat16, in the shape of a
model of 135 million weights (`small` of the engines' benchmark), and without `--quick` also in that of Qwen3-0.6B
(`q06`).

    ttft_hit_vs_own_cache     first token of a prompt whose prefix lies in shared memory, to that with the prefix in
                              vLLM's own memory
    ttft_hit_vs_lmcache       with the prefix in a Redis on this host, to vLLM with the prefix in its own memory plus
                              the time that LMCache's remote backend takes to read as many bytes from that Redis; where
                              LMCache is installed (`benchmarks.peers.setup`)
    kv_save_overhead_prefill  a prompt until its blocks are stored, to its prefill in vLLM alone
    throughput_vs_bare_vllm   output tokens a second, to those of vLLM alone
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.common import SHM, Arguments, describe_machine, format_spread, parse_arguments, report_figures
from benchmarks.peers.process import Side, SideFailed, is_available
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.write import make_model_directory
from benchmarks.pipeline import PipelineSide
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings, KVSettings
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.serving import ServingEngine, open_serving_engine
from penstock.engine_vllm.blocks import VllmLayout
from penstock.engine_vllm.core import VllmCore
from penstock.engine_vllm.opening import ENVIRONMENT, open_vllm_core
from penstock.local.kafka import find_or_start_kafka
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from penstock.messages import Sampling

BLOCK = 32
PREFIX_TOKENS, NEW_TOKENS = 2048, 16
"""Tokens of a prompt: those that are known, and those behind them."""
POOL_MB = 768
NUM_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 96, (64, 96), 64
"""The load of the throughput: prefill and decode take about as long, as there is one worker of each."""
Prompt = list[int]


def make_settings(model: Path, threads: int) -> EngineSettings:
    """Return the settings that both sides have."""
    return EngineSettings(
        kind="vllm", model=str(model), dtype="bfloat16", device="cpu", block_size=BLOCK, pool_mb=POOL_MB,
        threads=threads, max_step_tokens=512,
    )  # fmt: skip


class BareEngine:
    """vLLM's own engine, as its library has it."""

    def __init__(self, model: Path, threads: int) -> None:
        os.environ |= {"OMP_NUM_THREADS": str(threads)} | ENVIRONMENT
        import torch

        torch.set_num_threads(threads)
        from vllm import EngineArgs, LLMEngine

        settings = make_settings(model, threads)
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model), dtype="bfloat16", enforce_eager=True, block_size=BLOCK, seed=0,
                max_num_seqs=settings.max_batch, max_num_batched_tokens=settings.max_step_tokens,
                kv_cache_memory_bytes=POOL_MB * 2**20, async_scheduling=False, disable_log_stats=True,
            )
        )  # fmt: skip
        self._numbers = itertools.count()

    def answer(self, prompts: list[Prompt], max_new: int) -> float:
        """Return the seconds until all prompts have so many tokens."""
        from vllm import SamplingParams

        begun_s = time.perf_counter()
        for prompt in prompts:
            params = SamplingParams(temperature=0.0, max_tokens=max_new, ignore_eos=True, detokenize=False)
            self._engine.add_request(str(next(self._numbers)), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - begun_s


class WorkerEngine:
    """vLLM in the engine of a worker, over a store."""

    def __init__(self, engine: ServingEngine, forget: Callable[[], None]) -> None:
        self._engine = engine
        self.forget = forget
        """Evicts all blocks from the engine's own memory."""
        self._numbers = itertools.count()

    def answer(self, prompt: Prompt, *, stores: bool) -> tuple[float, float]:
        """Return the seconds until a prompt's first token, and until its blocks are stored where they are to be."""
        engine, name = self._engine, str(next(self._numbers))
        begun_s = time.perf_counter()
        blocks = engine.hash_prompt("bench", prompt)
        sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
        owner = f"job {name}" if stores else ""
        request = EngineSequence(
            name, prompt, blocks=blocks, sampling=sampling, seed=0, max_new_tokens=1, tenant="bench", lease_owner=owner
        )
        engine.add_request(request)
        sampled = False
        while not sampled:
            for _ in engine.collect_events():
                pass
            if not engine.begin_step():
                engine.wait_for_event()
                continue
            sampled = bool(engine.finish_step())
            if stores:
                engine.store_full_blocks()
        first_s = time.perf_counter() - begun_s
        if not stores:
            engine.remove_request(name)
            return first_s, first_s
        future = engine.finish_request(name)
        assert future is not None
        future.result(60)
        stored_s = time.perf_counter() - begun_s
        for _ in engine.collect_events():
            pass
        engine.release_leases(owner, blocks)
        return first_s, stored_s


@contextlib.contextmanager
def open_worker_engine(core: VllmCore, kv: KVSettings, url: str) -> Iterator[WorkerEngine]:
    """Open the engine of a worker over a store."""
    with open_serving_engine(core, kv, url, "bench") as engine:
        yield WorkerEngine(engine, core.drop_cache)


def make_prompts(chance: random.Random, count: int, low: int, high: int) -> list[Prompt]:
    """Return prompts of random bytes, all different."""
    return [[chance.randrange(250) for _ in range(chance.randint(low, high))] for _ in range(count)]


@dataclass
class PrefixSides:
    """vLLM alone and in the engine of a worker, with a store in shared memory and one in Redis, in this process."""

    bare: BareEngine
    near: WorkerEngine
    far: WorkerEngine
    lmcache: Side | None

    def measure_round(self, number: int) -> dict[str, float]:
        """Return the seconds of each measurement, all with prompts that are new in this round."""
        alone, saved, prefix = make_prompts(random.Random(number), 3, PREFIX_TOKENS, PREFIX_TOKENS)
        tails = iter(make_prompts(random.Random(-number), 3, NEW_TOKENS, NEW_TOKENS))
        times = {}
        for name in ("alone", "saved") if number % 2 else ("saved", "alone"):
            is_alone = name == "alone"
            times[name] = self.bare.answer([alone], 1) if is_alone else self.near.answer(saved, stores=True)[1]
        self.bare.answer([prefix], 1)
        for worker in (self.near, self.far):
            worker.forget()  # both have the same memory of blocks
            worker.answer(prefix, stores=True)
        firsts: dict[str, Callable[[Prompt], float]] = {
            "own": lambda prompt: self.bare.answer([prompt], 1),
            "memory": lambda prompt: self.near.answer(prompt, stores=False)[0],
            "redis": lambda prompt: self.far.answer(prompt, stores=False)[0],
        }
        for name in firsts if number % 2 else reversed(firsts):
            self.near.forget()
            times[name] = firsts[name]([*prefix, *next(tails)])
        if self.lmcache is not None:
            self.lmcache.ask("put", number=number)
            times["lmcache"] = times["own"] + float(self.lmcache.ask("get", number=number))
        return times


def start_lmcache(exits: contextlib.ExitStack, url: str, layout: VllmLayout, directory: Path) -> Side | None:
    """Start LMCache with as many bytes as the prefix has, in chunks of 256 tokens, its own size."""
    if not is_available("lmcache"):
        print("without LMCache: `python -m benchmarks.peers.setup` installs it")
        return None
    side = Side("lmcache", directory / "lmcache.log", threads=1, pool_mb=0)
    exits.callback(side.close)
    try:
        side.ask(
            "load", model=str(directory), url=url, layers=layout.num_layers, kv_heads=layout.num_heads,
            head_size=layout.vector_size // 2, chunk=256, chunks=PREFIX_TOKENS // 256,
        )  # fmt: skip
    except SideFailed as failed:
        print(f"without LMCache: {failed}")
        return None
    return side


def measure_prefixes(model: Path, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by what is measured. In this process, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    core = open_vllm_core(make_settings(model, 1))
    megabytes = 4 * core.model.layout.block_bytes * (PREFIX_TOKENS // BLOCK + 1) // 2**20 + 16
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(dir=SHM)))
        server = exits.enter_context(ValkeyServer(directory / "valkey"))
        near = KVSettings(shared_mb=megabytes, shared_dir=str(directory), redis_mb=0)
        far = KVSettings(shared_mb=0, redis_mb=megabytes)
        sides = PrefixSides(
            BareEngine(model, 1),
            exits.enter_context(open_worker_engine(core, near, "")),
            exits.enter_context(open_worker_engine(core, far, server.url)),
            start_lmcache(exits, server.url, core.model.layout, directory),
        )
        for number in range(1, rounds + 2):
            times = sides.measure_round(number)
            print(f"  round {number}: " + ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in times.items()))
            if number > 1:  # the first one warms up
                for name, value in times.items():
                    found.setdefault(name, []).append(value)
    os.sched_setaffinity(0, cores)
    return found


def serve_bare(model: Path, connection: Connection) -> None:
    """Run vLLM alone in a process of its own, on two threads: answer each load with its seconds."""
    engine = BareEngine(model, 2)
    connection.send(0.0)
    while (load := connection.recv()) is not None:
        connection.send(engine.answer(*load))


@contextlib.contextmanager
def open_bare_process(model: Path) -> Iterator[Callable[[list[Prompt], int], float]]:
    """Start vLLM alone in a process of its own. Yields what measures its output tokens a second."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_bare, args=(model, there), daemon=True)
    process.start()
    here.recv()

    def measure(prompts: list[Prompt], max_new: int) -> float:
        here.send((prompts, max_new))
        return len(prompts) * max_new / float(here.recv())

    yield measure
    here.send(None)
    process.join(60)


def measure_bare(model: Path, rounds: int) -> list[float]:
    """Return the output tokens a second of vLLM alone, on two threads, with nothing else running."""
    with open_bare_process(model) as measure:
        return [
            measure(make_prompts(random.Random(number), NUM_REQUESTS, *PROMPT_TOKENS), ANSWER_TOKENS)
            for number in range(rounds + 1)
        ][1:]


def measure_pipeline(model: Path, rounds: int) -> list[float]:
    """Return the output tokens a second of a pipeline through Kafka."""
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="penstock-benchmark-")))
        kafka = exits.enter_context(find_or_start_kafka(directory / "kafka"))
        environment = {
            "PENSTOCK_ENGINE_KIND": "vllm", "PENSTOCK_ENGINE_MODEL": str(model), "PENSTOCK_ENGINE_DTYPE": "bfloat16",
            "PENSTOCK_ENGINE_BLOCK_SIZE": str(BLOCK), "PENSTOCK_ENGINE_POOL_MB": str(POOL_MB),
            "PENSTOCK_ENGINE_MAX_STEP_TOKENS": "512", "PENSTOCK_ENGINE_DEVICE": "cpu",
        }  # fmt: skip
        stack = exits.enter_context(Stack(directory / "stack", kafka=kafka, environment=environment))
        stack.wait_until_ready(300)
        piped = PipelineSide(exits.enter_context(Client(stack.addresses)))
        return [
            piped.measure_tokens_per_s(
                make_prompts(random.Random(-number), NUM_REQUESTS, *PROMPT_TOKENS), ANSWER_TOKENS
            )
            for number in range(rounds + 1)
        ][1:]


def compare_medians(one: list[float], other: list[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def run(given: Arguments) -> dict[str, float]:
    """Measure, and return the figures."""
    figures: dict[str, float] = {}
    for name in given.choose_size(("small", "q06"), ("small",), ("smoke",)):
        model, end = make_model_directory(SHAPES[name], DIRECTORY / "models"), "" if name == "small" else f"_{name}"
        print(f"{name}: {SHAPES[name].read_bytes / 2**20:.0f} MiB of weights, bfloat16")
        times = measure_prefixes(model, given.choose_size(7, 2, 1))
        figures[f"ttft_hit_vs_own_cache{end}"] = compare_medians(times["memory"], times["own"])
        if "lmcache" in times:
            figures[f"ttft_hit_vs_lmcache{end}"] = compare_medians(times["redis"], times["lmcache"])
        figures[f"kv_save_overhead_prefill{end}"] = compare_medians(times["saved"], times["alone"])
        num_rates = given.choose_size(3, 1, 1)
        bare = measure_bare(model, num_rates)
        piped = measure_pipeline(model, 2 * num_rates)
        if given.is_full:
            bare += measure_bare(model, num_rates)
        print(f"  vLLM alone {format_spread(bare)}, the pipeline {format_spread(piped)} output tokens/s")
        figures[f"throughput_vs_bare_vllm{end}"] = statistics.median(piped) / statistics.median(bare)
    return figures | {
        "prefix_tokens": PREFIX_TOKENS, "new_tokens": NEW_TOKENS, "block_size": BLOCK,
        "throughput_requests": NUM_REQUESTS, "throughput_prompt_tokens": sum(PROMPT_TOKENS) / 2,
        "throughput_answer_tokens": ANSWER_TOKENS, "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip


def main() -> None:
    """Print the figures."""
    given = parse_arguments(main.__module__)
    print(describe_machine())
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
