"""The first run on a GPU, in parts that take eight minutes at most. docs/gpu.md says what each part is to find.

python -m benchmarks.gpu --part N [--json FILE] [--model DIRECTORY] [--device cpu] [--quick]

    1 tests       the tests marked `gpu`
    2 load        seconds of a load, the layers that paged attention computes, trials with 30,000 tokens
    3 equality    tokens against `generate()`, and of each prompt alone against the same in a batch
    4 decode      milliseconds of a decode step by number of sequences, greedy and at random
    5 prefill     prompt tokens per second by length, for a new length and one that was computed before
    6 blocks      bytes per second of KV blocks to the host and back, and what the engine's thread waits for
    7 pipeline    a prefill and a decode worker with all that is between them: tokens per second
    8 kills       the decode worker is killed while it answers: results lost, and with other tokens

Each part adds its figures to the file. Without `--model` a GPU runs the shape of Qwen3-0.6B with random weights, which
are written first. With `--device cpu` each part runs the demo model: that tries the code, and its figures mean nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import describe_machine
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.write import make_model_directory
from penstock.cli.up import build_share_environment
from penstock.client.sync import Client
from penstock.config.settings import EngineSettings
from penstock.engine.cuda import trial
from penstock.engine.cuda.backend import CudaBackend, CudaRunner, describe_device
from penstock.engine.engine import Engine
from penstock.engine.files import find_model
from penstock.engine.loading import open_engine
from penstock.engine.sequence import Sequence
from penstock.engine.staging import PinnedPoolBlock
from penstock.local.stack import Stack
from penstock.messages import Sampling

GREEDY, RANDOM = Sampling(temperature=0.0, ignore_eos=True), Sampling(temperature=1.0, ignore_eos=True)
LONG_TRIAL_TOKENS = 30_000
PATIENCE_S = 240.0

Figures = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What the command line says."""

    part: int
    json: Path | None
    model: Path | None
    device: str
    quick: bool

    @property
    def is_small(self) -> bool:
        """Whether the part only tries its code."""
        return self.quick or self.device == "cpu"

    def find_model(self) -> str:
        """Return the model to run."""
        if self.model is not None:
            return str(self.model)
        return "demo" if self.device == "cpu" else str(make_model_directory(SHAPES["q06"], DIRECTORY / "models"))

    def make_settings(self) -> EngineSettings:
        """Return the settings of an engine; on a GPU it chooses what they leave open."""
        given: dict[str, Any] = {"model": self.find_model(), "device": self.device}
        small: dict[str, Any] = {"pool_mb": 64, "max_batch": 8} if self.device == "cpu" else {}
        return EngineSettings(**given, **small)

    def make_environment(self) -> dict[str, str]:
        """Return the variables of two workers that share the device."""
        given = {"PENSTOCK_ENGINE_MODEL": self.find_model(), "PENSTOCK_ENGINE_DEVICE": self.device}
        if self.device == "cpu":
            return given | {"PENSTOCK_ENGINE_POOL_MB": "64"}
        return given | build_share_environment(2) | {"PENSTOCK_KV_STORE_SHARED_MB": "8192"}


def make_prompts(engine: Engine, count: int, length: int) -> list[list[int]]:
    """Return prompts of random tokens, as long as the model's context lets them be."""
    length = max(1, min(length, engine.model.context_length // 2))
    chance = np.random.default_rng(count * 100_003 + length)
    return [chance.integers(0, engine.model.vocab_size, length).tolist() for _ in range(count)]


def make_sequence(name: str, prompt: list[int], num_new: int, sampling: Sampling = GREEDY) -> Sequence:
    """Return a sequence of a prompt, whose blocks have names so that they can be handed over."""
    size = 16
    keys = [f"{name} {end}".encode() for end in range(size, len(prompt) + 1, size)]
    return Sequence(name, prompt, sampling=sampling, seed=7, max_new_tokens=num_new, block_keys=keys)


def run_sequences(engine: Engine, seqs: list[Sequence]) -> None:
    """Run sequences to their ends."""
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        for one in engine.step():
            if one.seq.num_output_tokens == one.seq.max_new_tokens:
                engine.remove_sequence(one.seq)


def synchronize(engine: Engine) -> None:
    """Wait until the device has done all its work."""
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)


def run_tests(run: Run) -> Figures:
    """Part 1: run the tests."""
    chosen = ["-k", "sizes_of_recorded_steps"] if run.device == "cpu" else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--timeout", "240", *chosen, "tests/engine/test_gpu.py"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=460)
    print(done.stdout[-12_000:], done.stderr[-2_000:])
    return {"status": done.returncode, "summary": done.stdout.strip().rsplit("\n", 1)[-1]}


def measure_load(run: Run) -> Figures:
    """Part 2: load, and try the attention of a layer of each kind over long sequences."""
    phases: dict[str, float] = {}
    begun_s = time.perf_counter()

    def report(what: str, done: float) -> None:
        phases[what] = round(time.perf_counter() - begun_s, 2)

    engine = open_engine(run.make_settings(), report)
    found: Figures = {"load_s": time.perf_counter() - begun_s, "phase_ends_s": phases, "num_blocks": engine.num_blocks}
    found |= {"max_batch": engine.settings.max_batch, "max_step_tokens": engine.settings.max_step_tokens}
    model, runner = engine.model, engine.runner
    found["layers"] = len(model.layout.layers)
    if isinstance(runner, CudaRunner) and isinstance(model.backend, CudaBackend):
        found["layers_with_paged_attention"] = len(model.backend.windows)
        found["recorded_sizes"] = runner.graphs.list_recorded_sizes() if runner.graphs is not None else []
        found["arithmetic"] = model.backend.name
    del engine, runner
    if run.device == "cuda":
        torch.cuda.empty_cache()
        for length in (129, 4_097, LONG_TRIAL_TOKENS):
            with patch.object(trial, "MAX_TRIAL_TOKENS", length):
                begun_s = time.perf_counter()
                found[f"layers_right_at_{length}"] = len(trial.find_varlen_windows(model))
                found[f"trial_s_at_{length}"] = time.perf_counter() - begun_s
    return found


@torch.inference_mode()
def compare_tokens(run: Run) -> Figures:
    """Part 3: compare tokens. In float32 all must be equal; in 16 bits near ties may fall otherwise."""
    num_new, found = 24, Figures()
    for dtype in ("float32", "bfloat16") if not run.is_small else ("float32",):
        settings = run.make_settings().model_copy(update={"dtype": dtype})
        engine = open_engine(settings)
        prompts = [make_prompts(engine, 2, length)[which] for length in (5, 40, 300) for which in (0, 1)]
        together = [make_sequence(f"t{number}", prompt, num_new) for number, prompt in enumerate(prompts)]
        run_sequences(engine, together)
        alone = [make_sequence(f"a{number}", prompt, num_new) for number, prompt in enumerate(prompts)]
        for seq in alone:
            run_sequences(engine, [seq])
        device = engine.model.device
        del engine
        directory = find_model(settings.model, lambda what, done: None)
        module: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        module.to(device)
        module.generation_config.eos_token_id = None
        right = [
            module.generate(torch.tensor([prompt], device=device), max_new_tokens=num_new, do_sample=False)[0].tolist()
            for prompt in prompts
        ]
        found[f"{dtype}_prompts"] = len(prompts)
        found[f"{dtype}_equal_to_generate"] = sum(
            seq.token_ids == tokens for seq, tokens in zip(together, right, strict=True)
        )
        found[f"{dtype}_equal_alone_and_together"] = sum(
            a.token_ids == b.token_ids for a, b in zip(alone, together, strict=True)
        )
    return found


def measure_decode(run: Run) -> Figures:
    """Part 4: time decode steps. The first steps of each number of sequences are not counted."""
    engine, found = open_engine(run.make_settings()), Figures()
    context, num_steps = (64, 8) if run.is_small else (1024, 60)
    for count in (1, 4) if run.is_small else (1, 8, 32, 64, 128, 256):
        if count > engine.settings.max_batch:
            continue
        for name, sampling in (("greedy", GREEDY), ("random", RANDOM)):
            seqs = [
                make_sequence(f"{count} {name} {number}", prompt, num_steps + 50, sampling)
                for number, prompt in enumerate(make_prompts(engine, count, context))
            ]
            for seq in seqs:
                engine.add_sequence(seq)
            while min(seq.num_output_tokens for seq in seqs) < 4:
                engine.step()
            times_s = []
            for _ in range(num_steps):
                begun_s = time.perf_counter()
                if len(engine.step()) == count:
                    times_s.append(time.perf_counter() - begun_s)
            for seq in seqs:
                engine.remove_sequence(seq)
            if times_s:
                found[f"step_ms_b{count}_{name}"] = statistics.median(times_s) * 1e3
                found[f"step_ms_b{count}_{name}_p99"] = float(np.quantile(times_s, 0.99)) * 1e3
                found[f"tokens_per_s_b{count}_{name}"] = count / statistics.median(times_s)
    found |= profile_step(engine, context) if run.device == "cuda" else {}
    return found


def profile_step(engine: Engine, context: int) -> Figures:
    """Count the kernels of a decode step of 32 sequences, and name those that take the longest."""
    seqs = [make_sequence(f"profile {n}", prompt, 40) for n, prompt in enumerate(make_prompts(engine, 32, context))]
    for seq in seqs:
        engine.add_sequence(seq)
    while min(seq.num_output_tokens for seq in seqs) < 4:
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.step()
        synchronize(engine)
    events = [event for event in profiler.key_averages() if event.device_time_total > 0]
    events.sort(key=lambda event: -event.device_time_total)
    for seq in seqs:
        engine.remove_sequence(seq)
    return {
        "kernels_b32": sum(event.count for event in events),
        "kernel_ms_b32": sum(event.device_time_total for event in events) / 1e3,
        "longest_kernels_b32": [[event.key[:80], event.count, event.device_time_total] for event in events[:15]],
    }


def measure_prefill(run: Run) -> Figures:
    """Part 5: time prompts. A new combination of sizes may cost a plan, so the first prompt is given by itself."""
    engine, found = open_engine(run.make_settings()), Figures()
    for length in (40, 100) if run.is_small else (128, 512, 2048, 8192, 16_384):
        times_s = []
        for number in range(2 if run.is_small else 6):
            (prompt,) = make_prompts(engine, 1, length)
            seq = make_sequence(f"{length} {number}", [number, *prompt[1:]], 1)
            begun_s = time.perf_counter()
            run_sequences(engine, [seq])
            synchronize(engine)
            times_s.append(time.perf_counter() - begun_s)
        found[f"first_s_{length}"] = times_s[0]
        found[f"tokens_per_s_{length}"] = len(prompt) / statistics.median(times_s[1:])
    # Steps of many sizes, as traffic has them: what a size costs that was not computed before.
    chance, times_s = np.random.default_rng(4), []
    for number in range(4 if run.is_small else 150):
        prompts = make_prompts(engine, int(chance.integers(1, 6)), int(chance.integers(2, 1500)))
        seqs = [make_sequence(f"mixed {number} {n}", prompt, 3) for n, prompt in enumerate(prompts)]
        begun_s = time.perf_counter()
        run_sequences(engine, seqs)
        times_s.append(time.perf_counter() - begun_s)
    found["mixed_s_median"], found["mixed_s_max"] = statistics.median(times_s), max(times_s)
    found["mixed_longer_than_0.3_s"] = sum(one > 0.3 for one in times_s)
    return found


def measure_blocks(run: Run) -> Figures:
    """Part 6: copy the blocks of a sequence to the host, and into another sequence's place."""
    engine, found = open_engine(run.make_settings()), Figures()
    (prompt,) = make_prompts(engine, 1, 100 if run.is_small else 16_384)
    seq = make_sequence("blocks", prompt, 2)
    seq.block_keys = []  # so that the copies do not find the blocks in the pool
    engine.add_sequence(seq)
    while not seq.num_output_tokens:
        engine.step()
    count = len(prompt) // engine.settings.block_size
    for name, wanted in (("1", 1), ("16", 16), ("all", count)):
        out_s, waited_s, in_s = [], [], []
        num_blocks = min(wanted, count)
        for number in range(2 if run.is_small else 5):
            synchronize(engine)
            begun_s = time.perf_counter()
            pinned: list[PinnedPoolBlock] = [engine.pin_block(seq, index) for index in range(num_blocks)]
            waited_s.append(time.perf_counter() - begun_s)
            payloads = [block.payload for block in pinned]
            out_s.append(time.perf_counter() - begun_s)
            content = [bytes(payload) for payload in payloads]
            for block in pinned:
                engine.unpin_block(block)
            staged = engine.stage_blocks([f"{name} {number} {index}".encode() for index in range(num_blocks)])
            assert staged is not None, "nothing else is loaded"
            for view, payload in zip(staged.views, content, strict=True):
                view[:] = payload
            begun_s = time.perf_counter()
            engine.commit_staged_blocks(staged, len(staged.views))
            synchronize(engine)
            in_s.append(time.perf_counter() - begun_s)
        num_bytes = num_blocks * engine.block_bytes
        found[f"out_gb_per_s_{name}"] = num_bytes / statistics.median(out_s) / 1e9
        found[f"in_gb_per_s_{name}"] = num_bytes / statistics.median(in_s) / 1e9
        found[f"engine_us_per_block_out_{name}"] = statistics.median(waited_s) / num_blocks * 1e6
    found["block_bytes"] = engine.block_bytes
    engine.remove_sequence(seq)
    return found


@contextmanager
def open_pipeline(run: Run) -> Iterator[tuple[Stack, Client]]:
    """Start a prefill and a decode worker as `penstock up` does."""
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as directory:
        stack = Stack(Path(directory), pipeline="gpu", environment=run.make_environment())
        with stack, Client(stack.addresses) as client:
            stack.wait_until_ready(PATIENCE_S)
            yield stack, client


def submit_requests(client: Client, run: Run, name: str) -> list[str]:
    """Send requests, half of them greedy. Return their ids."""
    count, length, num_new = (6, 20, 24) if run.is_small else (256, 512, 128)
    chance = np.random.default_rng(8)
    return [
        client.submit(
            id=f"{name}-{number}",
            token_ids=chance.integers(3, 250, length).tolist(),
            max_tokens=num_new,
            temperature=float(number % 2),
            seed=number,
            ignore_eos=True,
        )
        for number in range(count)
    ]


def collect_tokens(client: Client, ids: list[str]) -> list[list[int]]:
    """Return the tokens of each request's answer."""
    return [list(client.result(one, timeout_s=PATIENCE_S).token_ids) for one in ids]


def measure_pipeline(run: Run) -> Figures:
    """Part 7: answer requests through the whole pipeline."""
    with open_pipeline(run) as (_, client):
        collect_tokens(client, submit_requests(client, run, "warm")[:2])
        begun_s = time.perf_counter()
        tokens = collect_tokens(client, submit_requests(client, run, "load"))
        spent_s = time.perf_counter() - begun_s
    return {"requests": len(tokens), "output_tokens_per_s": sum(map(len, tokens)) / spent_s, "all_s": spent_s}


def kill_workers(run: Run) -> Figures:
    """Part 8: kill each worker once while requests run, and compare with answers that nothing disturbed."""
    with open_pipeline(run) as (stack, client):
        right = collect_tokens(client, submit_requests(client, run, "calm"))
        ids = submit_requests(client, run, "killed")
        for worker in stack.workers[::-1]:  # decode first
            time.sleep(0.3)
            assert worker.child is not None
            worker.child.kill()
            while not stack.restart_dead():
                time.sleep(0.05)
        stack.wait_until_ready(PATIENCE_S)
        begun_s = time.perf_counter()
        found = collect_tokens(client, ids)
    return {
        "requests": len(ids),
        "kills": len(stack.workers),
        "answered_in_full": sum(len(a) == len(b) for a, b in zip(found, right, strict=True)),
        "equal": sum(a == b for a, b in zip(found, right, strict=True)),
        "end_s_after_restart": time.perf_counter() - begun_s,
    }


PARTS: dict[int, tuple[str, Callable[[Run], Figures]]] = {
    1: ("tests", run_tests),
    2: ("load", measure_load),
    3: ("equality", compare_tokens),
    4: ("decode", measure_decode),
    5: ("prefill", measure_prefill),
    6: ("blocks", measure_blocks),
    7: ("pipeline", measure_pipeline),
    8: ("kills", kill_workers),
}


def add_figures(file: Path, name: str, figures: Figures) -> None:
    """Write a part's figures into a file that may have those of other parts."""
    there = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(there | {name: figures}, indent=2) + "\n")


def parse_run(arguments: list[str] | None = None) -> Run:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=PARTS, required=True)
    parser.add_argument("--json", type=Path, help="add the figures to this file")
    parser.add_argument("--model", type=Path, help="the directory of a model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="try the code only")
    return Run(**vars(parser.parse_args(arguments)))


def main(arguments: list[str] | None = None) -> None:
    """Run a part, print its figures, and write them."""
    run = parse_run(arguments)
    if run.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: --device cpu tries the code without one")
    name, measure = PARTS[run.part]
    machine = describe_machine() if run.device == "cpu" else describe_device(torch.device("cuda"))
    begun_s = time.perf_counter()
    figures: Figures = {"machine": machine, "model": run.find_model()} | measure(run)
    figures["part_s"] = time.perf_counter() - begun_s
    if run.device == "cpu":
        figures["note"] = "On a CPU: this tried the code, and the figures mean nothing."
    print(json.dumps(figures, indent=2))
    if run.json is not None:
        add_figures(run.json, f"{run.part} {name}", figures)


if __name__ == "__main__":
    main()
