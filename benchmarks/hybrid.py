"""A model whose layers keep a state: what snapshots cost a prefill, and what a prefix that is found saves.

`python -m benchmarks.hybrid` builds a random model like Qwen3.5 of about 0.6 billion parameters: three layers with a
gated delta rule to one with attention. It computes prompts of 2,000 shared tokens and a few of their own on this
project's engine over a store in shared memory.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from benchmarks.common import parse_arguments, report_figures
from penstock.config.settings import EngineSettings, KVSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.model import LoadedModel
from penstock.engine.probe import probe_layout
from penstock.engine.sequence import Sequence
from penstock.engine.serving import ServingEngine
from penstock.kvstore.store import KVStore, StoreLayout
from penstock.messages import Sampling

PREFIX_TOKENS, OWN_TOKENS, ROUNDS = 2000, 24, 5
SIZES: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 3584,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip
SMOKE_SIZES: dict[str, Any] = SIZES | {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_GREEDY = Sampling(temperature=0.0, max_tokens=1)


def build_model(sizes: dict[str, Any], settings: EngineSettings) -> tuple[LoadedModel, int]:
    """Return a random model of these sizes on the fastest backend for this machine, and its number of parameters."""
    config: Any = CONFIG_MAPPING["qwen3_5_text"](**sizes, dtype=settings.dtype)
    dtype, auto, plain = getattr(torch, settings.dtype), AutoModelForCausalLM, GenerationConfig
    torch.manual_seed(1)
    make: Any = auto.from_config
    module = make(config, dtype=dtype).eval().requires_grad_(False)
    make = plain
    module.generation_config = make(pad_token_id=0)
    device, num_parameters = torch.device("cpu"), sum(p.numel() for p in module.parameters())
    model = accelerate_model(
        LoadedModel(
            name="hybrid", config=config, tokenizer=None, response_template=None, context_length=4096,
            eos_token_ids=frozenset(), dtype=dtype, device=device, content_fingerprint="5a" * 32, module=module,
            layout=probe_layout(module, settings.block_size, dtype, device), vocab_size=config.vocab_size,
            stock_attention=config._attn_implementation,  # noqa: SLF001 - transformers has no public name for it
        )
    )  # fmt: skip
    return model, num_parameters


class Prompts:
    """Prompts with one prefix and tokens of their own."""

    def __init__(self, vocab_size: int, prefix_tokens: int) -> None:
        self._random, self._vocab_size = random.Random(7), vocab_size
        self.prefix = self.draw_tokens(prefix_tokens)

    def draw_tokens(self, count: int) -> list[int]:
        """Return random tokens."""
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def draw_prompt(self) -> list[int]:
        """Return the prefix with other tokens behind it."""
        return self.prefix + self.draw_tokens(OWN_TOKENS)


def measure_first_token(serving: ServingEngine, prompt: list[int], number: int) -> tuple[float, int]:
    """Return the seconds until a request's first token is sampled, and how many prompt tokens were found."""
    begun_s = time.perf_counter()
    blocks = serving.hash_prompt("bench", prompt)
    request = Sequence(
        f"request {number}", prompt, blocks=blocks, sampling=_GREEDY, seed=0, max_new_tokens=1,
        lease_owner=f"job {number}", tenant="bench",
    )  # fmt: skip
    serving.add_request(request)
    while True:
        list(serving.collect_events())
        if not serving.begin_step():
            serving.wait_for_event()
        elif serving.finish_step():
            break
        else:
            serving.store_full_blocks()
    taken_s = time.perf_counter() - begun_s
    stored = serving.finish_request(request.id)
    while serving.is_moving_blocks():
        list(serving.collect_events())
        serving.wait_for_event()
    assert stored is not None
    stored.result()
    serving.release_leases(request.lease_owner, blocks)
    return taken_s, request.num_cached_tokens


def measure_prefill(engine: Engine, prompt: list[int]) -> float:
    """Return the seconds of a prompt that is removed afterwards; without names, so that it is computed as a whole."""
    seq = Sequence("prefill", prompt, sampling=_GREEDY, seed=0, max_new_tokens=1)
    size = engine.settings.block_size
    seq.block_keys = [random.randbytes(32) for _ in range(len(prompt) // size)]
    seq.prompt_key = random.randbytes(32)
    begun_s = time.perf_counter()
    engine.add_sequence(seq)
    while engine.has_work():
        engine.step()
    taken_s = time.perf_counter() - begun_s
    engine.remove_sequence(seq)
    return taken_s


def measure_snapshots(model: LoadedModel, settings: EngineSettings, prompts: Prompts, rounds: int) -> dict[str, float]:
    """Return the seconds of a prefill with snapshots and without, taken in turn."""
    with_snapshots, without = Engine(model, settings), Engine(model, settings)
    assert without.states is not None
    without.states.reserve_snapshots = lambda seq, num_tokens: {}  # type: ignore[method-assign]
    times: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds + 1):
        for name, engine in (("with", with_snapshots), ("without", without)):
            taken_s = measure_prefill(engine, prompts.draw_prompt())
            if number:  # the first warms up
                times[name].append(taken_s)
    found = {f"prefill_{name}_s": statistics.median(some) for name, some in times.items()}
    pairs = zip(times["with"], times["without"], strict=True)
    return found | {"snapshot_share": statistics.median(one / other - 1 for one, other in pairs)}


def run_benchmark(*, is_smoke: bool, layers: int, rounds: int, say: Callable[[str], None]) -> dict[str, float]:
    """Return the figures."""
    prefix_tokens = 400 if is_smoke else PREFIX_TOKENS
    dtype = "float32" if is_smoke else "bfloat16"
    settings = EngineSettings(dtype=dtype, pool_mb=64 if is_smoke else 2048, max_batch=8, max_step_tokens=512)
    sizes = (SMOKE_SIZES if is_smoke else SIZES) | {"num_hidden_layers": layers}
    model, num_parameters = build_model(sizes, settings)
    states = model.layout.states
    assert states is not None
    found: dict[str, float] = {
        "parameters": num_parameters,
        "state_bytes": states.row_bytes, "interval_tokens": states.interval_tokens,
        "kv_bytes_per_token": model.layout.block_bytes // model.layout.block_size,
    }  # fmt: skip
    say(f"a state has {states.row_bytes:,} bytes; a snapshot every {states.interval_tokens} tokens")
    found |= measure_snapshots(model, settings, Prompts(model.vocab_size, prefix_tokens), rounds)
    say(f"snapshots take {found['snapshot_share']:+.1%} of a prefill of {found['prefill_without_s']:.2f} s")
    prompts = Prompts(model.vocab_size, prefix_tokens)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        kv = KVSettings(shared_mb=1024, shared_dir=directory, redis_mb=0)
        store = KVStore.open(StoreLayout.from_model(model), kv, "", "hybrid")
        try:
            found |= _measure_hits(model, settings, store, prompts, rounds)
        finally:
            store.close()
    for name in ("pool", "shared"):
        found[f"ratio_{name}"] = found["cold_s"] / found[f"{name}_s"]
        say(f"a prefix found in {name}: first token {found[f'ratio_{name}']:.1f} times as fast")
    return found


def _measure_hits(
    model: LoadedModel, settings: EngineSettings, store: KVStore, prompts: Prompts, rounds: int
) -> dict[str, float]:
    times: dict[str, list[float]] = {"cold": [], "pool": [], "shared": []}
    for number in range(rounds):
        others = replace_prefix(prompts)
        first, second = (ServingEngine(Engine(model, settings), store) for _ in range(2))
        for name, serving in (("cold", first), ("pool", first), ("shared", second)):
            taken_s, num_cached = measure_first_token(serving, others.draw_prompt(), 10 * number + len(times[name]))
            times[name].append(taken_s)
            assert (num_cached == 0) == (name == "cold"), f"{name}: {num_cached} tokens found"
        first.close()
        second.close()
    return {f"{name}_s": statistics.median(some) for name, some in times.items()}


def replace_prefix(prompts: Prompts) -> Prompts:
    """Give the prompts another prefix, which nothing has seen."""
    prompts.prefix = prompts.draw_tokens(len(prompts.prefix))
    return prompts


def main() -> None:
    """Measure, and print the figures or write them to a file."""
    given = parse_arguments(__doc__)
    layers, rounds = given.choose_size((24, ROUNDS), (8, 1), (4, 1))
    figures = run_benchmark(is_smoke=given.size == "smoke", layers=layers, rounds=rounds, say=print)
    report_figures(figures, given)


if __name__ == "__main__":
    main()
