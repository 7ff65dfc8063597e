"""Weights in fewer bits: what each form brings, against bf16 and against other engines with as many bits.

python -m benchmarks.weights [--quick] [--json FILE]

Random bf16 weights in the shape of Qwen3-0.6B, two threads for everybody. Each side has a process of its own, which is
stopped while another is measured; they take turns, and ratios are formed within a round. Ours has the weights as they
are stored, in 8 and in 4 bits (`PENSTOCK_ENGINE_WEIGHTS`); llama.cpp has Q8_0 and Q4_0, its embedding in Q8_0; OpenVINO
has int8, and int4 in groups of 128. What is not installed (`python -m benchmarks.peers.setup`) is left out.

    int8_decode_b1, …          tokens a second to those of ours in bf16: 1, 8 and 32 sequences, and a prompt of 2,048
    int8_vs_best_peer_b1, …    to the best of the other engines with 8 bits; int4 likewise

`--quick` takes the shape with 135 million weights, without the others.
"""

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.common import Arguments, describe_machine, parse_arguments, report_figures, save_plot
from benchmarks.engine import POOL_MB, THREADS
from benchmarks.peers.process import is_available
from benchmarks.peers.rounds import OURS, Results, Rounds
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.workload import CELLS
from benchmarks.peers.write import make_model_directory

FORMS = ("int8", "int4")
PEERS = {
    "int8": {"llamacpp Q8_0": ("llamacpp", "Q8_0"), "openvino int8": ("openvino", "int8")},
    "int4": {"llamacpp Q4_0": ("llamacpp", "Q4_0"), "openvino int4": ("openvino", "int4")},
}
"""By number of bits and name of the side: the engine, and what it calls the form."""
MEASURED = ("decode_b1", "decode_b8", "decode_b32", "prefill_2048")


def measure(quick: bool) -> Results:
    """Run all rounds."""
    shape = SHAPES["small" if quick else "q06"]
    model, logs = make_model_directory(shape, DIRECTORY / "models"), DIRECTORY / "logs"
    logs.mkdir(exist_ok=True)
    cells = tuple(cell for cell in CELLS if cell.name in MEASURED)
    rounds = Rounds(shape, cells, say=lambda line: print(f"{shape.name} {line}", flush=True))
    pool_mb = POOL_MB[shape.name]

    def load(name: str, engine: str, **form: str) -> None:
        log = logs / f"{name.replace(' ', '-')}.log"
        rounds.load_side(name, model, log, engine=engine, threads=THREADS, pool_mb=pool_mb, device="cpu", **form)

    try:
        load("bf16", OURS, weights="auto")
        for form in FORMS:
            load(form, OURS, weights=form)
            for name, (engine, own_form) in ({} if quick else PEERS[form]).items():
                if is_available(engine):
                    load(name, engine, form=own_form)
                else:
                    print(f"{name}: left out, not installed")
        rounds.warm_up()
        for number in range(3 if quick else 5):
            rounds.run_round(number)
    finally:
        rounds.close()
    return rounds.results


def compare(results: Results) -> dict[str, float]:
    """Return the figures."""
    figures: dict[str, float] = {}
    for form in FORMS:
        for cell in MEASURED:
            if (ratio := results.compare_sides(cell, form, "bf16")) is not None:
                figures[f"{form}_{cell}"] = ratio
            peers = [results.compare_sides(cell, form, name) for name in PEERS[form]]
            if known := [ratio for ratio in peers if ratio is not None]:
                figures[f"{form}_vs_best_peer_{cell.removeprefix('decode_')}"] = min(known)
    return figures


def draw_plot(results: Results) -> None:
    """Draw tokens a second of each side, relative to ours in bf16."""
    figure = Figure(figsize=(11, 3.4))
    for axis, cell in zip(figure.subplots(1, len(MEASURED)), MEASURED, strict=True):
        ratios = {name: results.compare_sides(cell, name, "bf16") or 0.0 for name in results.list_sides()}
        colours = ["#1f6f8b" if name in (*FORMS, "bf16") else "#b8b8b8" for name in ratios]
        axis.barh(list(ratios), list(ratios.values()), color=colours)
        axis.invert_yaxis()
        axis.set_title(cell)
        axis.set_xlabel("to ours in bf16")
        if cell != MEASURED[0]:
            axis.set_yticks([])
    save_plot(figure, "weights")


def run(given: Arguments) -> dict[str, float]:
    """Measure, draw and return the figures."""
    Path(DIRECTORY).mkdir(parents=True, exist_ok=True)
    results = measure(given.quick)
    if not given.quick:
        draw_plot(results)
    return compare(results)


def main() -> None:
    """Print the figures."""
    given = parse_arguments(__doc__ or "")
    print(describe_machine())
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
