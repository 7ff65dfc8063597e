"""Whether workers on a GPU give the tokens that workers on a CPU give, what they survive, and how fast they are.

`make gpu-check` runs it with `--device cuda`, where torch, transformers and the packages of `penstock[worker,embedded]`
are installed; no network is needed. With `--device cpu` every part runs on the CPU, which tries the code.

1. Tokens: the same requests, greedy and at random, are answered by a prefill and a decode worker on a CPU; by both on
   the device, with KV blocks in shared memory; by a prefill worker on the device and a decode worker on a CPU, and the
   other way round, with KV blocks in Redis alone. All in float32: every answer has to be the same.
2. Kills: two prefill and two decode workers on the device are killed while they answer these requests.
3. Speed, in bfloat16: decode steps and prompts of the engine alone, and tokens per second through the pipeline.

With `--engine vllm` it is vLLM behind the same workers, and each part's figures are written as it ends; one begins only
if the rest of `--minutes` is enough for it. Tokens have to be the same with VLLM_BATCH_INVARIANT=1 on a GPU, and in
float32 on a CPU.

1. `auto`: a worker of both stages starts, and gives the same answers one by one and all at once.
2. `alone`: tokens per second of vLLM's own engine, with 1, 32 and 256 requests.
3. `apart`: a prefill and a decode worker give these answers.
4. `kills`: as above.
5. `rates`: tokens per second of an `auto` worker, with as many requests as vLLM alone.
6. `rates_b8`: 2 and 5 with 8 billion weights, which vLLM draws.
"""

import itertools
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import TIMEOUT_S, Arguments, run_benchmark
from benchmarks.peers.shapes import Shape
from benchmarks.peers.write import write_directory
from benchmarks.pipeline import PipelineSide, make_prompts
from benchmarks.systems import (
    GREEDY,
    PipedProcess,
    answer_requests,
    draw_tokens,
    make_request,
    open_shape,
    open_stack,
    run_sequences,
    time_decode_steps,
    write_shape,
)
from penstock.client.sync import Client
from penstock.engine.device import describe_device
from penstock.engine.sequence import Sequence
from penstock.local.stack import SHARED_DIR_VARIABLE, Stack
from penstock.names import Pipeline
from penstock.ops.status import read_heartbeats
from penstock.redis.client import redis_client
from penstock.waiting import wait_until

START_S, VOCABULARY = 240.0, range(3, 250)
VLLM_ENVIRONMENT = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
"""vLLM finds its own address and interface by these on a machine without a network."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Recorded decode steps, and nothing compiled, which starts sooner."""
WAYS = {
    "device_device_shared": ("device", "device", "shared"),
    "device_cpu_redis": ("device", "cpu", "redis"),
    "cpu_device_redis": ("cpu", "device", "redis"),
}
"""By the figure's name: where prompts are computed, where answers are, and the tier by which KV blocks go."""


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, where which engine computes, and how long parts begin."""

    device: str = "cpu"
    engine: str = "own"
    minutes: float = 10.0


def make_requests(count: int, max_tokens: int, longest: int) -> list[dict[str, Any]]:
    """Return requests with prompts of 5 to `longest` random tokens, every other one at temperature 1."""
    chance, found = random.Random(count), []
    for number in range(count):
        prompt = draw_tokens(chance, 5 + number * (longest - 5) // max(1, count - 1), VOCABULARY)
        found.append(make_request(prompt, max_tokens, temperature=float(number % 2), seed=number))
    return found


@contextmanager
def open_workers(
    given: Options, prompts: str, answers: str, tier: str, count: int = 1, more: dict[str, str] | None = None
) -> Iterator[list[Stack]]:
    """Start `count` prefill workers on one device and `count` decode workers on another, with the demo model, or with
    what `more` says.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-", dir="/dev/shm") as shared:
        both = {
            "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_POOL_MB": "256", SHARED_DIR_VARIABLE: shared,
            "PENSTOCK_KV_STORE_SHARED_MB": "256" if tier == "shared" else "0",
            "PENSTOCK_KV_STORE_REDIS_MB": "256" if tier == "redis" else "0",
        }  # fmt: skip
        first, second = (
            both | {"PENSTOCK_ENGINE_DEVICE": given.device if where == "device" else "cpu"} | (more or {})
            for where in (prompts, answers)
        )
        how = given.choose_stack()
        with (
            open_stack(how, first, prefill=count, decode=0) as one,
            open_stack(how, second, redis=one.addresses.first_url, prefill=0, decode=count) as other,
        ):
            yield [one, other]


def answer_all(stacks: list[Stack], requests: list[dict[str, Any]]) -> list[list[int]]:
    """Return the tokens of each request's answer; all are submitted at once."""
    with Client(stacks[0].addresses) as client:
        return [answer.token_ids for _, answer in answer_requests(client, requests, len(requests))]


def count_hits(stacks: list[Stack], tier: str) -> int:
    """Return how many KV blocks the decode workers have found in a tier, once their heartbeats say it."""
    found = [0]

    def has_hits() -> int:
        beats = read_heartbeats(client, Pipeline(stacks[0].addresses.pipeline))
        found[0] = sum(beat["kv"].get(tier, {}).get("hits", 0) for beat in beats if beat["stage"] == "decode")
        return found[0]

    with redis_client(stacks[0].addresses.first_url) as client, suppress(TimeoutError):
        wait_until(has_hits, 10.0, "blocks are found", every_s=0.2)
    return found[0]


def compare_devices(given: Options, requests: list[dict[str, Any]]) -> tuple[list[list[int]], dict[str, float]]:
    """Return the tokens of workers on a CPU, and in how many answers those on the device agree."""
    with open_workers(given, "cpu", "cpu", "shared") as stacks:
        right = answer_all(stacks, requests)
    figures: dict[str, float] = {"answers": len(right)}
    for name, (prompts, answers, tier) in WAYS.items():
        with open_workers(given, prompts, answers, tier) as stacks:
            found = answer_all(stacks, requests)
            hits = count_hits(stacks, tier)
        figures[f"equal_{name}"] = sum(one == other for one, other in zip(found, right, strict=True))
        figures[f"blocks_loaded_{name}"] = hits
        print(f"{name}: {figures[f'equal_{name}']:.0f} of {len(right)} answers equal, {hits} blocks loaded", flush=True)
    return right, figures


def kill_workers(
    given: Options,
    requests: list[dict[str, Any]],
    right: list[list[int]],
    num_kills: int,
    more: dict[str, str] | None = None,
) -> dict[str, float]:
    """Kill workers one after another while requests run; each round of four kills answers all requests."""
    chance, lost, wrong, kills = random.Random(7), 0, 0, 0
    with open_workers(given, "device", "device", "shared", given.choose_size(2, 2, 1), more) as stacks:
        answer_all(stacks, requests)
        slots = [(stack, slot) for stack in stacks for slot in stack.workers]
        with Client(stacks[0].addresses) as client:
            while kills < num_kills:
                ids = [client.submit(**request) for request in requests]
                for stack, slot in chance.sample(slots, len(slots)):
                    time.sleep(chance.uniform(0.02, 0.4))
                    assert slot.child is not None
                    slot.child.kill()
                    kills += 1
                    stack.restart_dead()
                for stack in stacks:
                    stack.wait_until_ready(START_S)
                for request_id, tokens in zip(ids, right, strict=True):
                    try:
                        wrong += client.result(request_id, timeout_s=TIMEOUT_S).token_ids != tokens
                    except TimeoutError:
                        lost += 1
                print(f"{kills} kills: {lost} answers lost, {wrong} wrong", flush=True)
    return {"kills": kills, "lost": lost, "wrong": wrong}


def measure_engine(given: Options, shape: str) -> dict[str, float]:
    """Return milliseconds of a decode step by the number of sequences, and prompt tokens per second by length."""
    engine = open_shape(shape, device=given.device, pool_mb=given.choose_size(4096, 512, 64))
    numbers, figures = itertools.count(), dict[str, float]()
    for count in given.choose_size((1, 8, 32), (1, 8), (1, 2)):
        context, num_steps = given.choose_size((512, 40), (128, 10), (16, 4))
        seqs = [make_sequence(next(numbers), context, num_steps + 50) for _ in range(count)]
        times_s = time_decode_steps(engine, seqs, num_steps)
        for seq in seqs:
            engine.remove_sequence(seq)
        figures[f"decode_step_ms_b{count}"] = statistics.median(times_s) * 1e3
        figures[f"decode_tokens_s_b{count}"] = count / statistics.median(times_s)
    for length in given.choose_size((512, 2048), (512,), (64,)):
        times_s = []
        for _ in range(4):
            seq = make_sequence(next(numbers), length, 1)
            begun_s = time.perf_counter()
            run_sequences(engine, [seq])
            times_s.append(time.perf_counter() - begun_s)
            engine.remove_sequence(seq)
        figures[f"prefill_tokens_s_{length}"] = length / statistics.median(times_s[1:])
    return figures


def make_sequence(number: int, length: int, num_new: int) -> Sequence:
    """Return a sequence with a prompt that no other number has."""
    prompt = draw_tokens(random.Random(number), length, VOCABULARY)
    return Sequence(f"{number}", prompt, sampling=GREEDY, seed=7, max_new_tokens=num_new)


def measure_pipeline(given: Options, shape: str) -> dict[str, float]:
    """Return output tokens per second through a prefill and a decode worker on the device."""
    environment: Mapping[str, str] = {
        "PENSTOCK_ENGINE_MODEL": str(write_shape(shape)), "PENSTOCK_ENGINE_DEVICE": given.device,
        "PENSTOCK_ENGINE_DTYPE": "bfloat16", "PENSTOCK_ENGINE_POOL_MB": given.choose_size("4096", "512", "64"),
        "PENSTOCK_KV_STORE_SHARED_MB": given.choose_size("4096", "1024", "64"),
    }  # fmt: skip
    requests = make_requests(*given.choose_size((64, 64, 480), (8, 16, 100), (2, 4, 20)))
    with open_stack(given.choose_stack(), environment) as stack:
        answer_all([stack], requests[:2])
        begun_s = time.perf_counter()
        tokens = answer_all([stack], requests)
        spent_s = time.perf_counter() - begun_s
    return {"pipeline_tokens_s": sum(map(len, tokens)) / spent_s}


EIGHT_BILLION = Shape(
    "b8", "LlamaForCausalLM", "llama",
    layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, intermediate=14336, vocabulary=128256,
    tied=False, normed_heads=False,
)  # fmt: skip


@dataclass
class VllmCheck:
    """The parts with vLLM, in their order. Those behind the first use what it has found."""

    given: Options
    figures: dict[str, float] = field(default_factory=dict)
    _right: list[list[int]] = field(default_factory=list)

    def run_parts(self) -> dict[str, float]:
        """Run what there is time for. Raises `SystemExit` where a part failed."""
        begun_s, failed = time.monotonic(), list[str]()
        model = write_shape(self.given.choose_size("q06", "small", "smoke"))
        parts: dict[str, tuple[float, Callable[[], dict[str, float]]]] = {
            "auto": (0.0, partial(self.check_auto, model)),
            "alone": (60.0, partial(self.measure_alone, model)),
            "apart": (60.0, partial(self.check_apart, model)),
            "kills": (150.0, partial(self.check_kills, model)),
            "rates": (60.0, partial(self.measure_rates, model)),
        }
        if self.given.is_full:
            parts["rates_b8"] = (300.0, self.measure_eight_billion)
        for name, (needed_s, call) in parts.items():
            part_s = time.monotonic()
            if part_s - begun_s + needed_s > 60 * self.given.minutes:
                print(f"{name}: not enough time is left", flush=True)
                continue
            try:
                found = call()
            except Exception:  # the others are run all the same
                traceback.print_exc()
                failed.append(name)
                continue
            self.figures |= found | {f"{name}_s": time.monotonic() - part_s}
            print(f"{name}: {json.dumps(found)}", flush=True)
            if self.given.json is not None:
                self.given.json.write_text(json.dumps(self.figures, indent=2) + "\n")
        if failed:
            raise SystemExit(f"failed: {', '.join(failed)}")
        return self.figures

    def check_auto(self, model: Path) -> dict[str, float]:
        """Start an `auto` worker; compare its answers one by one with those to all requests at once."""
        requests, begun_s = self._make_requests(), time.monotonic()
        with open_stack(Stack, self._describe(model, is_equal=True), prefill=0, decode=0, auto=1) as stack:
            found = {"start_s": time.monotonic() - begun_s}
            with Client(stack.addresses) as client:
                self._right = [answer.token_ids for _, answer in answer_requests(client, requests, 1)]
            return found | {"answers": len(requests), "equal_auto": self._count_equal(answer_all([stack], requests))}

    def check_apart(self, model: Path) -> dict[str, float]:
        """Compare the answers of a prefill and a decode worker with those."""
        more = self._describe(model, is_equal=True)
        with open_workers(self.given, "device", "device", "shared", more=more) as stacks:
            return {"equal_apart": self._count_equal(answer_all(stacks, self._make_requests()))}

    def check_kills(self, model: Path) -> dict[str, float]:
        """Kill workers of both stages."""
        more, num_kills = self._describe(model, is_equal=True), self.given.choose_size(10, 4, 2)
        return kill_workers(self.given, self._make_requests(), self._right, num_kills, more)

    def measure_alone(self, model: Path, *more: str) -> dict[str, float]:
        """Measure vLLM's own engine."""
        from benchmarks.vllm_engine import serve_bare

        os.environ |= VLLM_ENVIRONMENT
        shaping: dict[str, Any] = {"enforce_eager": True}
        if self.given.device == "cuda":
            shaping = {"enforce_eager": False, "compilation_config": GRAPHS}
        shaping |= {"load_format": "dummy"} if more else {}
        context = multiprocessing.get_context("spawn")
        with closing(PipedProcess(context, serve_bare, model, {"max_num_seqs": 256} | shaping)) as bare:
            return self._measure("alone", lambda prompts: len(prompts) * 128 / bare.ask((prompts, 128)))

    def measure_rates(self, model: Path, *more: str) -> dict[str, float]:
        """Measure an `auto` worker."""
        environment = self._describe(model, *more)
        with (
            open_stack(Stack, environment, prefill=0, decode=0, auto=1) as stack,
            Client(stack.addresses) as client,
        ):
            piped = PipelineSide(client)
            return self._measure("auto", lambda prompts: piped.measure_tokens_per_s(prompts, 128))

    def measure_eight_billion(self) -> dict[str, float]:
        """Measure both with a larger model, whose directory has no weights to speak of."""
        with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as directory:
            model = write_directory(EIGHT_BILLION, Path(directory), {"model.norm.weight": (EIGHT_BILLION.hidden,)})
            found = self.measure_alone(model, "--load-format dummy")
            found |= self.measure_rates(model, "--load-format dummy")
        return {f"{name}_b8": value for name, value in found.items()}

    def _make_requests(self) -> list[dict[str, Any]]:
        return make_requests(*self.given.choose_size((24, 40, 400), (12, 24, 200), (4, 8, 60)))

    def _count_equal(self, found: list[list[int]]) -> int:
        return sum(one == other for one, other in zip(found, self._right, strict=True))

    def _measure(self, side: str, measure: Callable[[list[list[int]]], float]) -> dict[str, float]:
        """Return tokens per second with so many requests, each time with prompts that are new."""
        measure(make_prompts(random.Random(0), 2, 100, 100, VOCABULARY))
        return {
            f"{side}_tokens_s_{count}": measure(make_prompts(random.Random(count), count, 100, 400, VOCABULARY))
            for count in self.given.choose_size((1, 32, 256), (1, 8), (1, 2))
        }

    def _describe(self, model: Path, *more: str, is_equal: bool = False) -> dict[str, str]:
        """Return the settings of workers; with `is_equal` of those whose tokens do not depend on the batch."""
        is_cpu = self.given.device == "cpu"
        shaping = "--enforce-eager" if is_equal else f"--compilation-config '{json.dumps(GRAPHS)}'"
        # vLLM wants nine tenths of the GPU to be free, although the size of its pool is given.
        arguments = () if is_cpu else ("--gpu-memory-utilization 0.05", shaping)
        return VLLM_ENVIRONMENT | {
            "PENSTOCK_ENGINE_KIND": "vllm", "PENSTOCK_ENGINE_MODEL": str(model),
            "PENSTOCK_ENGINE_DEVICE": self.given.device,
            "PENSTOCK_ENGINE_DTYPE": "float32" if is_cpu and is_equal else "bfloat16",
            "PENSTOCK_ENGINE_BLOCK_SIZE": "32", "PENSTOCK_ENGINE_MAX_BATCH": "256",
            "PENSTOCK_ENGINE_MAX_STEP_TOKENS": self.given.choose_size("2048", "512", "256"),
            "PENSTOCK_ENGINE_POOL_MB": self.given.choose_size("8192", "512", "64"),
            "PENSTOCK_KV_STORE_SHARED_MB": self.given.choose_size("4096", "512", "64"),
            "PENSTOCK_ENGINE_VLLM_ARGS": " ".join([*arguments, *more]),
            "VLLM_BATCH_INVARIANT": "1" if is_equal and not is_cpu else "0",
        }  # fmt: skip


def run(given: Options) -> dict[str, float]:
    """Run all parts and return their figures."""
    if given.engine == "vllm":
        return VllmCheck(given).run_parts()
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here: --device cpu tries every part without one")
    if given.device == "cuda":
        print(describe_device(torch.device("cuda")))
    shape = given.choose_size("q06", "small", "smoke")
    requests = make_requests(*given.choose_size((24, 40, 400), (12, 24, 200), (4, 8, 60)))
    right, figures = compare_devices(given, requests)
    figures |= kill_workers(given, requests, right, given.choose_size(20, 8, 2))
    figures |= measure_engine(given, shape)
    return figures | measure_pipeline(given, shape)


if __name__ == "__main__":
    where = {"choices": ("cpu", "cuda"), "default": "cpu", "help": "where the engines compute"}
    which = {"choices": ("own", "vllm"), "default": "own", "help": "the workers' engine"}
    limit = {"type": float, "default": 10.0, "help": "with vLLM, a part begins only if so many suffice (10)"}
    run_benchmark(__doc__, run, Options, device=where, engine=which, minutes=limit)
