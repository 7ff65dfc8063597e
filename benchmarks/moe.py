"""Mixtures of experts: the engine against others, and whether tokens depend on the batch.

python -m benchmarks.moe [--quick | --smoke] [--json FILE]

A billion random bf16 weights in the form of Qwen3-MoE, of which each token is multiplied by a quarter; two threads for
everybody. Each engine has a process of its own, which is stopped while another is measured; they take turns, and ratios
are formed within a round. What is not installed (`python -m benchmarks.peers.setup`) is left out.

    moe_decode_b1_vs_best_peer, …_b8   tokens a second of 1 and 8 sequences, to the best of the others
    moe_prefill_512_vs_best_peer       prompt tokens by the time to the first token
    moe_decode_b1_bandwidth_share      bytes of the weights that a token needs, to what memory gives
    moe_flips_bf16                     share of tokens that are other ones than those of each prompt on its own
    moe_load_memory_ratio              memory at most while it loads, to that in the end

`--quick` has four of 18 layers, and of the others those that start at once.
"""

from dataclasses import dataclass, replace
from functools import partial

from benchmarks.common import Arguments, describe_machine, parse_arguments, report_figures
from benchmarks.engine import PEERS, QUICK_PEERS, THREADS, format_table, measure_loads
from benchmarks.peers.process import is_available
from benchmarks.peers.rounds import OURS, Results, Rounds
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.workload import CELLS
from benchmarks.peers.write import make_model_directory

MEASURED = ("decode_b1", "decode_b8", "prefill_512")


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    shape: Shape
    others: tuple[str, ...]
    rounds: int
    flip_prompts: int
    pool_mb: int = 1024
    is_forked: bool = False
    """Whether processes of ours are forked, as `Side` has it."""


FULL = Extent(SHAPES["moe"], tuple(name for name in PEERS if name != "vllm"), rounds=5, flip_prompts=32)
QUICK = Extent(replace(SHAPES["moe"], name="moe_quick", layers=4), QUICK_PEERS, rounds=2, flip_prompts=8)
SMOKE = Extent(
    replace(SHAPES["smoke"], name="moe_smoke", architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", tied=True,
            normed_heads=True, experts=4, experts_per_token=2),
    (), rounds=1, flip_prompts=2, pool_mb=64, is_forked=True,
)  # fmt: skip


def measure(extent: Extent) -> tuple[Results, dict[str, float]]:
    """Run all rounds; return their results, and the figures that only our engine has."""
    shape, logs = extent.shape, DIRECTORY / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    model = make_model_directory(shape, DIRECTORY / "models")
    how = {"threads": THREADS, "pool_mb": extent.pool_mb, "device": "cpu"}
    loads = measure_loads(shape, model, 1, logs, dict(how), is_forked=extent.is_forked)
    figures = {f"moe_{name}": value for name, value in loads.items() if name == "load_memory_ratio"}
    cells = tuple(cell for cell in CELLS if cell.name in MEASURED)
    say = partial(print, shape.name, flush=True)
    rounds = Rounds(shape, cells, say, is_forked=extent.is_forked)
    try:
        for name in ("limits", OURS, *extent.others):
            if is_available(name):
                rounds.load_side(name, model, logs / f"{shape.name}-{name}.log", **how)  # type: ignore[arg-type]
            else:
                rounds.say(f"{name}: left out, not installed; python -m benchmarks.peers.setup installs it")
        rounds.check_tokens()
        rounds.warm_up()
        for number in range(extent.rounds):
            rounds.run_round(number)
        prompts = [prompt for prompt, _ in next(c for c in CELLS if c.is_mixed).make_requests(shape.vocabulary, -3)]
        flips = rounds.ask_ours("flips", prompts=prompts[: extent.flip_prompts], num_new=32)
        if flips:
            figures["moe_flips_bf16"] = max(flips.values())
    finally:
        rounds.close()
    return rounds.results, figures


def make_figures(results: Results) -> dict[str, float]:
    """Return the ratios to the best of the others, and the share of the memory's speed."""
    figures = {}
    for cell in MEASURED:
        if (ratio := results.compute_best_ratio(cell)) is not None:
            figures[f"moe_{cell}_vs_best_peer"] = ratio
    if (per_byte := results.compute_ratio("decode_b1", "bandwidth")) is not None:
        figures["moe_decode_b1_bandwidth_share"] = per_byte * results.shape.read_bytes
    return figures


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    results, figures = measure(given.choose_size(FULL, QUICK, SMOKE))
    print(f"\n{describe_machine()}; {THREADS} threads, bf16, random weights; medians of the rounds (ours to theirs)")
    print(format_table(results))
    return figures | make_figures(results)


def main() -> None:
    """Print the figures."""
    given = parse_arguments(__doc__ or "")
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
