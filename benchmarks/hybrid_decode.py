"""How fast a model whose layers keep a state answers one sequence and several.

`python -m benchmarks.hybrid_decode` compares a random model like Qwen3.5 of about 0.6 billion parameters, three layers
with a gated delta rule to one with attention, with a dense one of about as many: the time of a decode step of one
sequence and of 16, and what each model gains by the latter.
"""

import statistics
from functools import partial
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, compute_ratios, measure_in_turns, print_table
from benchmarks.systems import GREEDY, time_decode_steps
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.probe import probe_layout
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence

SEVERAL, STEPS, PROMPT_TOKENS = 16, 6, 8
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


def build_model(sizes: dict[str, Any], settings: EngineSettings, kind: str) -> tuple[LoadedModel, int]:
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


def measure_step(model: LoadedModel, settings: EngineSettings, num_sequences: int, _: int) -> float:
    """Return the median of the seconds of some decode steps."""
    prompt = list(range(PROMPT_TOKENS))
    seqs = [
        Sequence(f"seq-{n}", [n, *prompt], sampling=GREEDY, seed=0, max_new_tokens=STEPS + 9)
        for n in range(num_sequences)
    ]
    return statistics.median(time_decode_steps(Engine(model, settings), seqs, STEPS))


def run(given: Arguments) -> dict[str, float]:
    """Measure, and return the figures."""
    layers, rounds = given.choose_size((24, 5), (8, 3), (4, 1))
    large = (1024, "bfloat16", SIZES)
    pool_mb, dtype, sizes = given.choose_size(large, large, (64, "float32", SMOKE_SIZES))
    settings = EngineSettings(dtype=dtype, pool_mb=pool_mb, max_batch=SEVERAL)
    dense = {name: value for name, value in sizes.items() if not name.startswith("linear_")}
    # A dense layer has four fifths of the other's weights.
    models = {
        "hybrid": build_model(sizes | {"num_hidden_layers": layers}, settings, "qwen3_5_text"),
        "dense": build_model(dense | {"num_hidden_layers": layers * 5 // 4}, settings, "qwen3"),
    }
    found = {f"{name}_parameters": float(num_parameters) for name, (_, num_parameters) in models.items()}
    turns = {
        (name, count): partial(measure_step, model, settings, count)
        for name, (model, _) in models.items()
        for count in (1, SEVERAL)
    }
    times = measure_in_turns(turns, rounds, "decode", num_warm=1)
    print_table({f"{name}, {count} at once": some for (name, count), some in times.items()}, "ms a step", 1e3)
    found |= {f"{name}_step_b{count}_ms": 1e3 * statistics.median(some) for (name, count), some in times.items()}
    gains = {name: compute_ratios(times, (name, 1), (name, SEVERAL)) for name in models}
    found |= {f"{name}_batch_gain": SEVERAL * statistics.median(some) for name, some in gains.items()}
    return found | {"hybrid_batch_gain_vs_dense": compute_ratio(gains, "hybrid", "dense")}


if __name__ == "__main__":
    run_benchmark(__doc__, run)
