"""Mixtures of experts: the engine against others, and whether tokens depend on the batch.

python -m benchmarks.moe [--quick | --smoke] [--json FILE]

A billion random bf16 weights in the form of Qwen3-MoE, of which each token is multiplied by a quarter; two threads for
everybody. Each engine has a process of its own, which is stopped while another is measured; they take turns, and ratios
are formed within a round. What is not installed (`python -m benchmarks.peers.setup`) is left out.

    moe_decode_b1_vs_best_peer, …_b8   tokens a second of 1 and 8 sequences, to the best of the others
    moe_prefill_512_vs_best_peer       prompt tokens by the time to the first token
    moe_decode_b1_bandwidth_share      bytes of the weights that a token needs, to what memory gives
    moe_flips_bf16                     share of tokens that are other ones than those of each prompt on its own

`--quick` has four of 18 layers, and of the others those that start at once.
"""

from dataclasses import replace

from benchmarks.common import Arguments, run_benchmark
from benchmarks.engine import PEERS, QUICK_PEERS, THREADS, Extent, format_table, make_figures, measure_shape
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.workload import CELLS

CELLS_OF_MOE = tuple(cell for cell in CELLS if cell.name in ("decode_b1", "decode_b8", "prefill_512"))
FULL = Extent((SHAPES["moe"],), tuple(name for name in PEERS if name != "vllm"), 5, 9e9, 32, 32, CELLS_OF_MOE)
QUICK_SHAPE = replace(SHAPES["moe"], layers=4, name="moe_quick")
QUICK = Extent((QUICK_SHAPE,), QUICK_PEERS, 2, 9e9, 8, 32, CELLS_OF_MOE)
SMOKE_SHAPE = replace(
    SHAPES["smoke"], name="moe_smoke", architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", tied=True,
    normed_heads=True, experts=4, experts_per_token=2,
)  # fmt: skip
SMOKE = Extent((SMOKE_SHAPE,), (), 1, 9e9, 2, 32, CELLS_OF_MOE, is_forked=True)


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    extent = given.choose_size(FULL, QUICK, SMOKE)
    (shape,) = extent.shapes
    results, own = measure_shape(shape, extent, given.choose_size(1024, 1024, 64))
    print(f"\n{THREADS} threads, bf16, random weights; medians of the rounds (ours to theirs)")
    print(format_table(results))
    found = {f"moe_{name.removeprefix(f'{shape.name}_')}": value for name, value in make_figures(results).items()}
    return found | {name.replace("bf16_flip_share", "moe_flips_bf16"): share for name, share in own.items()}


if __name__ == "__main__":
    run_benchmark(__doc__, run)
