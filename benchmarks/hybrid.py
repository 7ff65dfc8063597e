"""A model whose layers keep a state: what snapshots cost a prefill, and what a prefix that is found saves.

`python -m benchmarks.hybrid` builds a random model like Qwen3.5 of about 0.6 billion parameters: three layers with a
gated delta rule to one with attention. It computes prompts of 2,000 shared tokens and a few of their own on this
project's engine over a store in shared memory.
"""

import random
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from benchmarks.common import SHM, Arguments, run_benchmark
from benchmarks.comparison import compute_ratios, measure_in_turns
from benchmarks.systems import GREEDY, answer_prompt, run_sequences
from penstock.config.settings import EngineSettings, KVSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.model import LoadedModel
from penstock.engine.probe import probe_layout
from penstock.engine.sequence import Sequence
from penstock.engine.serving import ServingEngine
from penstock.kvstore.store import KVStore, StoreLayout

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


def build_model(sizes: dict[str, Any], settings: EngineSettings, kind: str = "qwen3_5_text") -> tuple[LoadedModel, int]:
    """Return a random model of these sizes on the fastest backend for this machine, and its number of parameters."""
    config: Any = CONFIG_MAPPING[kind](**sizes, dtype=settings.dtype)
    dtype, device = getattr(torch, settings.dtype), torch.device("cpu")
    torch.manual_seed(1)
    make: Any = AutoModelForCausalLM.from_config
    module = make(config, dtype=dtype).eval().requires_grad_(False)
    make = GenerationConfig
    module.generation_config = make(pad_token_id=0)
    num_parameters = sum(one.numel() for one in module.parameters())  # packed ones are none
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
        self._random, self._vocab_size, self._prefix_tokens = random.Random(7), vocab_size, prefix_tokens
        self.replace_prefix()

    def replace_prefix(self) -> None:
        """Give the prompts another prefix, which nothing has seen."""
        self.prefix = self._draw_tokens(self._prefix_tokens)

    def draw_prompt(self) -> list[int]:
        """Return the prefix with other tokens behind it."""
        return self.prefix + self._draw_tokens(OWN_TOKENS)

    def _draw_tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]


def measure_prefill(engine: Engine, prompts: Prompts) -> float:
    """Return the seconds of a prompt that is removed afterwards; without names, so that it is computed as a whole."""
    prompt = prompts.draw_prompt()
    seq = Sequence("prefill", prompt, sampling=GREEDY, seed=0, max_new_tokens=1)
    seq.block_keys = [random.randbytes(32) for _ in range(len(prompt) // engine.settings.block_size)]
    seq.prompt_key = random.randbytes(32)
    begun_s = time.perf_counter()
    run_sequences(engine, [seq])
    taken_s = time.perf_counter() - begun_s
    engine.remove_sequence(seq)
    return taken_s


def measure_snapshots(model: LoadedModel, settings: EngineSettings, prompts: Prompts, rounds: int) -> dict[str, float]:
    """Return the seconds of a prefill with snapshots and without, taken in turn."""
    engines = {"with": Engine(model, settings), "without": Engine(model, settings)}
    states = engines["without"].states
    assert states is not None
    states.reserve_snapshots = lambda seq, num_tokens: {}  # type: ignore[method-assign]
    sides = {name: lambda _, engine=engine: measure_prefill(engine, prompts) for name, engine in engines.items()}
    times = measure_in_turns(sides, rounds, "snapshots", num_warm=1)
    found = {f"prefill_{name}_s": statistics.median(some) for name, some in times.items()}
    return found | {"snapshot_share": statistics.median(compute_ratios(times, "with", "without")) - 1}


def measure_hits(
    model: LoadedModel, settings: EngineSettings, store: KVStore, prompts: Prompts, rounds: int
) -> dict[str, float]:
    """Return the seconds until a first token, with a prefix that is new, in the pool, and in shared memory."""
    times: dict[str, list[float]] = {"cold": [], "pool": [], "shared": []}
    for number in range(rounds):
        prompts.replace_prefix()
        with ExitStack() as exits:
            first, second = (
                exits.enter_context(closing(ServingEngine(Engine(model, settings), store))) for _ in range(2)
            )
            for name, serving in (("cold", first), ("pool", first), ("shared", second)):
                taken_s, _, num_cached = answer_prompt(serving, prompts.draw_prompt(), f"{name} {number}")
                times[name].append(taken_s)
                assert (num_cached == 0) == (name == "cold"), f"{name}: {num_cached} tokens found"
    return {f"{name}_s": statistics.median(some) for name, some in times.items()}


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    layers, rounds = given.choose_size((24, ROUNDS), (8, 1), (4, 1))
    large = (PREFIX_TOKENS, "bfloat16", 2048, SIZES)
    prefix_tokens, dtype, pool_mb, sizes = given.choose_size(large, large, (400, "float32", 64, SMOKE_SIZES))
    settings = EngineSettings(dtype=dtype, pool_mb=pool_mb, max_batch=8, max_step_tokens=512)
    model, num_parameters = build_model(sizes | {"num_hidden_layers": layers}, settings)
    states = model.layout.states
    assert states is not None
    found: dict[str, float] = {
        "parameters": num_parameters,
        "state_bytes": states.row_bytes, "interval_tokens": states.interval_tokens,
        "kv_bytes_per_token": model.layout.block_bytes // model.layout.block_size,
    }  # fmt: skip
    print(f"a state has {states.row_bytes:,} bytes; a snapshot every {states.interval_tokens} tokens")
    new_prompts = partial(Prompts, model.vocab_size, prefix_tokens)
    found |= measure_snapshots(model, settings, new_prompts(), rounds)
    print(f"snapshots take {found['snapshot_share']:+.1%} of a prefill of {found['prefill_without_s']:.2f} s")
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        kv = KVSettings(shared_mb=1024, shared_dir=directory, redis_mb=0)
        with closing(KVStore.open(StoreLayout.from_model(model), kv, "", "hybrid")) as store:
            found |= measure_hits(model, settings, store, new_prompts(), rounds)
    for name in ("pool", "shared"):
        found[f"ratio_{name}"] = found["cold_s"] / found[f"{name}_s"]
        print(f"a prefix found in {name}: first token {found[f'ratio_{name}']:.1f} times as fast")
    return found


if __name__ == "__main__":
    run_benchmark(__doc__, run)
