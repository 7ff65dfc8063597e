"""What workers with vLLM lose against vLLM alone: first tokens after a known prefix, prefill, and throughput.

.venv-vllm/bin/python -m benchmarks.vllm_engine [--quick | --smoke] [--json FILE]

The first figures come from this process, on one core and with one thread: vLLM's own engine as its library has it, and
vLLM in the engine of a worker, over a KV store. For the throughput an `auto` worker with two threads, as `penstock up`
starts it, takes turns with vLLM's own engine with two threads in a process beside it. Then there is a pipeline with a
prefill and a decode worker of one thread each, and Kafka beside them on the same cores. Weights are random, in
bfloat16, in the shape of a model of 135 million weights, and without `--quick` also in that of Qwen3-0.6B (`q06`).

    ttft_hit_vs_own_cache     first token of a prompt whose prefix lies in shared memory, to that with the prefix in
                              vLLM's own memory
    ttft_hit_vs_lmcache       with the prefix in a Redis on this host, to vLLM with the prefix in its own memory plus
                              the time that LMCache's remote backend takes to read as many bytes from that Redis; where
                              LMCache is installed (`benchmarks.peers.setup`)
    kv_save_overhead_prefill  a prompt until its blocks are stored, to its prefill in vLLM alone
    throughput_vs_bare_vllm_auto  output tokens a second of an `auto` worker, to those of vLLM alone
    throughput_vs_bare_vllm       those of a prefill and a decode worker, whose start a quick run leaves out
"""

import itertools
import multiprocessing
import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, print_table
from benchmarks.peers.process import Side, SideFailed, start_lmcache
from benchmarks.peers.shapes import SHAPES
from benchmarks.pipeline import PipelineSide, make_prompts
from benchmarks.systems import PipedProcess, answer_prompt, open_stack, write_shape
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings, KVSettings
from penstock.engine.opening import open_serving_engine
from penstock.engine.serving import ServingEngine
from penstock.engine_vllm.core import VllmCore
from penstock.engine_vllm.opening import ENVIRONMENT, open_vllm_core
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from sim.kafka_server import find_or_start_kafka

BLOCK, BYTES = 32, range(250)
"""Tokens of a block, and the tokens of prompts."""
NEW_TOKENS = 16
"""Tokens of a prompt behind those that are known."""
POOL_MB = 768
PROMPT_TOKENS, ANSWER_TOKENS = (64, 96), 64
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

    def __init__(self, model: Path, threads: int, **more: Any) -> None:
        os.environ |= {"OMP_NUM_THREADS": str(threads)} | ENVIRONMENT
        import torch
        from vllm import EngineArgs, LLMEngine

        torch.set_num_threads(threads)
        settings = make_settings(model, threads)
        shaping = {"enforce_eager": True, "max_num_seqs": settings.max_batch} | more
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model), dtype="bfloat16", block_size=BLOCK, seed=0,
                max_num_batched_tokens=max(settings.max_step_tokens, shaping["max_num_seqs"]),
                kv_cache_memory_bytes=POOL_MB * 2**20, async_scheduling=False, disable_log_stats=True, **shaping,
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


@dataclass
class PrefixSides:
    """vLLM alone and in the engine of a worker, with a store in shared memory and one in Redis, in this process."""

    core: VllmCore
    bare: BareEngine
    prefix_tokens: int
    near: ServingEngine
    far: ServingEngine
    lmcache: Side | None = None
    """With as many bytes as the prefix has, in chunks of 256 tokens, its own size."""

    def measure_round(self, number: int) -> dict[str, float]:
        """Return the seconds of each measurement, all with prompts that are new in this round."""
        alone, saved, prefix = make_prompts(random.Random(number), 3, self.prefix_tokens, self.prefix_tokens, BYTES)
        tails = iter(make_prompts(random.Random(-number), 3, NEW_TOKENS, NEW_TOKENS, BYTES))
        times = {}
        for name in ("alone", "saved") if number % 2 else ("saved", "alone"):
            is_alone = name == "alone"
            times[name] = self.bare.answer([alone], 1) if is_alone else self._answer(self.near, saved, stores=True)
        self.bare.answer([prefix], 1)
        for worker in (self.near, self.far):
            self.core.drop_cache()  # both have the same memory of blocks
            self._answer(worker, prefix, stores=True)
        firsts: dict[str, Callable[[Prompt], float]] = {
            "own": lambda prompt: self.bare.answer([prompt], 1),
            "memory": lambda prompt: self._answer(self.near, prompt),
            "redis": lambda prompt: self._answer(self.far, prompt),
        }
        for name in firsts if number % 2 else reversed(firsts):
            self.core.drop_cache()
            times[name] = firsts[name]([*prefix, *next(tails)])
        if self.lmcache is not None:
            self.lmcache.ask("put", number=number)
            times["lmcache"] = times["own"] + float(self.lmcache.ask("get", number=number))
        return times

    def _answer(self, worker: ServingEngine, prompt: Prompt, *, stores: bool = False) -> float:
        """Return the seconds to the first token, or with `stores` those until the prompt's blocks are stored."""
        return answer_prompt(worker, prompt, uuid.uuid4().hex, stores=stores)[1]


def measure_prefixes(model: Path, prefix_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round, by what is measured. In this process, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    core = open_vllm_core(make_settings(model, 1))
    megabytes = 4 * core.model.layout.block_bytes * (prefix_tokens // BLOCK + 1) // 2**20 + 16
    with ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(dir=SHM)))
        server = exits.enter_context(ValkeyServer(directory / "valkey"))
        near = KVSettings(shared_mb=megabytes, shared_dir=str(directory), redis_mb=0)
        far = KVSettings(shared_mb=0, redis_mb=megabytes)
        sides = PrefixSides(
            core, BareEngine(model, 1), prefix_tokens,
            exits.enter_context(open_serving_engine(core, near, "", "bench")),
            exits.enter_context(open_serving_engine(core, far, server.url, "bench")),
        )  # fmt: skip
        layout = core.model.layout
        try:
            sides.lmcache = start_lmcache(
                exits, directory, server.url, threads=1, layers=layout.num_layers, kv_heads=layout.num_heads,
                head_size=layout.vector_size // 2, chunk=256, chunks=prefix_tokens // 256,
            )  # fmt: skip
        except SideFailed as failed:
            print(f"without LMCache: {failed}")
        measured = [sides.measure_round(number) for number in range(1, rounds + 2)][1:]  # the first one warms up
    os.sched_setaffinity(0, cores)
    found = {name: [times[name] for times in measured] for name in measured[0]}
    print_table(found, "ms", 1e3)
    return found


def serve_bare(connection: Connection, model: Path, more: dict[str, Any]) -> None:
    """Run vLLM alone in a process of its own, on two threads: answer each load with its seconds."""
    engine = BareEngine(model, 2, **more)
    connection.send(0.0)
    while (load := connection.recv()) is not None:
        connection.send(engine.answer(*load))


def make_loads(count: int, rounds: int, sign: int) -> list[list[Prompt]]:
    """Return `count` prompts for each round, and before them those of one that warms up."""
    return [make_prompts(random.Random(sign * number), count, *PROMPT_TOKENS, BYTES) for number in range(rounds + 1)]


@contextmanager
def open_pipeline(model: Path, **numbers: Any) -> Iterator[Callable[[list[Prompt]], float]]:
    """Start a pipeline of these workers; yield what measures its output tokens a second."""
    environment = {
        "PENSTOCK_ENGINE_KIND": "vllm", "PENSTOCK_ENGINE_MODEL": str(model), "PENSTOCK_ENGINE_DTYPE": "bfloat16",
        "PENSTOCK_ENGINE_BLOCK_SIZE": str(BLOCK), "PENSTOCK_ENGINE_POOL_MB": str(POOL_MB),
        "PENSTOCK_ENGINE_MAX_STEP_TOKENS": "512", "PENSTOCK_ENGINE_DEVICE": "cpu",
    }  # fmt: skip
    with open_stack(Stack, environment, **numbers) as stack, Client(stack.addresses) as client:
        yield lambda prompts: PipelineSide(client).measure_tokens_per_s(prompts, ANSWER_TOKENS)


def measure_throughput(model: Path, count: int, rounds: int, *, in_stages: bool) -> dict[str, list[float]]:
    """Return the output tokens a second of each round: an `auto` worker takes turns with vLLM alone, and then, where
    wanted, a pipeline of two stages through Kafka has the cores for itself. `count`: prompts of a round; with few of
    them most of a round has less than a full batch.
    """
    found: dict[str, list[float]] = {"vLLM alone": [], "auto": []}
    with (
        closing(PipedProcess(multiprocessing.get_context("spawn"), serve_bare, model, {})) as bare,
        open_pipeline(model, prefill=0, decode=0, auto=1) as measure_auto,
    ):
        for number, (prompts, others) in enumerate(
            zip(make_loads(count, rounds, 1), make_loads(count, rounds, -1), strict=True)
        ):
            for is_auto in (True, False) if number % 2 else (False, True):
                if is_auto:
                    found["auto"].append(measure_auto(others))
                else:
                    seconds = bare.ask((prompts, ANSWER_TOKENS))
                    found["vLLM alone"].append(count * ANSWER_TOKENS / seconds)
    if in_stages:
        with (
            tempfile.TemporaryDirectory(prefix="penstock-benchmark-") as directory,
            find_or_start_kafka(Path(directory)) as kafka,
            open_pipeline(model, kafka=kafka) as measure_stages,
        ):
            found["two stages"] = [measure_stages(prompts) for prompts in make_loads(count, rounds, -1)]
    return {side: rates[1:] for side, rates in found.items()}


def run(given: Arguments) -> dict[str, float]:
    """Measure, and return the figures."""
    figures: dict[str, float] = {}
    for name in given.choose_size(("small", "q06"), ("small",), ("smoke",)):
        model, end = write_shape(name), "" if name == "small" else f"_{name}"
        print(f"{name}: {SHAPES[name].read_bytes / 2**20:.0f} MiB of weights, bfloat16")
        times = measure_prefixes(model, given.choose_size(2048, 1024, 256), given.choose_size(7, 2, 1))
        figures[f"ttft_hit_vs_own_cache{end}"] = compute_ratio(times, "memory", "own")
        if "lmcache" in times:
            figures[f"ttft_hit_vs_lmcache{end}"] = compute_ratio(times, "redis", "lmcache")
        figures[f"kv_save_overhead_prefill{end}"] = compute_ratio(times, "saved", "alone")
        rates = measure_throughput(
            model, given.choose_size(96, 32, 8), given.choose_size(5, 2, 1), in_stages=given.size != "quick"
        )
        print_table(rates, "output tokens/s")
        figures[f"throughput_vs_bare_vllm_auto{end}"] = compute_ratio(rates, "auto", "vLLM alone")
        if "two stages" in rates:
            figures[f"throughput_vs_bare_vllm{end}"] = compute_ratio(rates, "two stages", "vLLM alone")
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
