"""The engine against other engines and against the machine: tokens a second.

python -m benchmarks.engine [--quick | --smoke] [--json FILE]

Two shapes with random bf16 weights, two threads for everybody. Each engine has a process of its own, which is stopped
while another is measured; they take turns, and ratios are formed within a round. The others are installed by
`python -m benchmarks.peers.setup`; what is not installed is left out. Cells:

    decode_b1 … b32      tokens a second of 1, 8, 32 sequences once all have their first token; prompt 64, 64 new ones
    prefill_512, _2048   prompt tokens by the time to the first token
    continuous           output tokens a second of 64 requests sent at once, prompts 32 to 512, outputs 16 to 128
    …_t1                 the same at temperature 1, where the others are greedy

`--quick` takes the small shape only, greedy, and of the others those that start at once.
`bf16_flip_share` is of the largest shape measured.
"""

from dataclasses import dataclass

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import draw_bars
from benchmarks.peers.rounds import LIMITS, OURS, Results, Rounds
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.workload import CELLS, DRAWN_CELLS, Cell

THREADS = 2
PEERS = ("generate", "openvino", "llamacpp", "llamacpp_avx512", "vllm")
QUICK_PEERS = ("generate", "openvino")
POOL_MB = {"smoke": 64, "small": 1024, "q06": 2048}


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    shapes: tuple[Shape, ...]
    others: tuple[str, ...]
    rounds: int
    rounds_s: float
    """No new round begins after this time."""
    flip_prompts: int
    flip_new: int
    cells: tuple[Cell, ...]
    is_forked: bool = False
    """Whether processes of ours are forked, as `Side` has it."""


FULL = Extent((SHAPES["small"], SHAPES["q06"]), PEERS, 5, 480.0, 48, 48, CELLS + DRAWN_CELLS)
QUICK = Extent((SHAPES["small"],), QUICK_PEERS, 3, 15.0, 12, 32, CELLS)
SMOKE = Extent((SHAPES["smoke"],), (), 1, 0.0, 2, 4, CELLS[:1], is_forked=True)


def measure_shape(shape: Shape, extent: Extent, pool_mb: int) -> tuple[Results, dict[str, float]]:
    """Measure one shape: all rounds, and the figures that only our engine has."""
    with Rounds(shape, extent.cells, pool_mb, is_forked=extent.is_forked) as rounds:
        for name in ("limits", OURS, *extent.others):
            rounds.load_side(name)
        rounds.check_tokens()
        rounds.run_rounds(extent.rounds, extent.rounds_s)
        return rounds.results, count_flips(rounds, extent)


def count_flips(rounds: Rounds, extent: Extent) -> dict[str, float]:
    """Return the share of our tokens that depend on the batch, in the worst of several ways to run."""
    mixed = next(cell for cell in CELLS if cell.is_mixed).make_requests(rounds.shape.vocabulary, -3)
    prompts = [prompt for prompt, _ in mixed[: extent.flip_prompts]]
    if not (flips := rounds.ask_ours("flips", prompts=prompts, num_new=extent.flip_new)):
        return {}
    told = ", ".join(f"{way} {share:.2%}" for way, share in flips.items())
    rounds.say(f"tokens that differ from those alone, of {len(prompts) * extent.flip_new:,}: {told}")
    return {"bf16_flip_share": max(flips.values())}


def make_figures(results: Results) -> dict[str, float]:
    """Return the ratios to the best of the others, and the shares of the machine's limits."""
    shape, figures = results.shape, {}
    for cell in (*CELLS, *DRAWN_CELLS):
        if (ratio := results.compute_best_ratio(cell.name)) is not None:
            figures[f"{shape.name}_{cell.name}_vs_best_peer"] = ratio
    # ratio() is ours to a side: tokens by bytes (or operations) a second.
    if (per_byte := results.compute_ratio("decode_b1", "bandwidth")) is not None:
        figures[f"{shape.name}_decode_b1_bandwidth_share"] = per_byte * shape.read_bytes
    if (per_flop := results.compute_ratio("prefill_2048", "gemm")) is not None:
        figures[f"{shape.name}_prefill_2048_gemm_share"] = per_flop * shape.count_prefill_flops(2048) / 2048
    return figures


def format_table(results: Results) -> str:
    """Return the medians, and in brackets our ratio to each."""
    lines = [f"\n{results.shape.name:16}" + "".join(f"{side:>18}" for side in results.list_sides())]
    for cell in (*CELLS, *DRAWN_CELLS):
        if cell.name not in results.values:
            continue
        line = f"{cell.name:16}"
        for side in results.list_sides():
            value, ratio = results.compute_median(cell.name, side), results.compute_ratio(cell.name, side)
            text = "-" if value is None else f"{value:,.4g}"
            line += f"{text if ratio is None or side == OURS else f'{text} ({ratio:.2f})':>18}"
        lines.append(line)
    for beside, limit in LIMITS.items():
        if (value := results.compute_median(beside, limit)) is not None:
            unit, scale = ("GB/s", 1e9) if limit == "bandwidth" else ("TFLOP/s", 1e12)
            lines.append(f"{limit:16}{value / scale:>18.3g} {unit}")
    return "\n".join(lines)


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    extent = given.choose_size(FULL, QUICK, SMOKE)
    print(f"this run leaves out {', '.join({*PEERS} - {*extent.others}) or 'nobody'}")
    figures, all_results = dict[str, float](), list[Results]()
    for shape in extent.shapes:
        results, own = measure_shape(shape, extent, POOL_MB[shape.name])
        figures |= own | make_figures(results)
        all_results.append(results)
    print(f"\n{THREADS} threads, bf16, random weights; medians of the rounds (ours to theirs)")
    print(*map(format_table, all_results), sep="\n")
    if given.is_full:
        charts = {
            f"{results.shape.name} to {side}": {
                cell: results.compute_ratio(cell, side) or 0.0 for cell in results.values
            }
            for results in all_results
            for side in results.list_sides()
            if side != OURS
        }
        draw_bars("engine", charts, "our tokens/s to theirs")
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
