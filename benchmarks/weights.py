"""Weights in fewer bits: what each form brings, against bf16 and against other engines with as many bits.

python -m benchmarks.weights [--quick | --smoke] [--json FILE]

First the linear layers of a few decoder layers, more bytes than the caches hold, each form right after the other:

    p12_linear_m1, …           time in bf16 to that in 12 bits, for as many rows; int8, int4, and the blocks of a GGUF
                               file (gguf_q8_0, gguf_q4_k, gguf_q6_k) likewise
    bf16_gb_per_s_m1, …        bytes of bf16 a second: below the memory's speed, computing takes longer than reading
    p12_bits_per_weight_demo   of the demo model, with palettes and exceptions
    p12_identical              1: every result has the bits of that in bf16

    p12_memory_ratio           bytes of these layers' weights to those in bf16

Then K and V in 8 bits (`PENSTOCK_ENGINE_KV_DTYPE`), in the shape of Qwen3-0.6B:

    kv_int8_tokens_ratio       tokens that fit into a pool, to those in bf16
    kv_int8_decode_b32_long    time of a decode step of 32 sequences with 2,048 tokens in bf16 to that in 8 bits
    kv_int8_flips              of the demo model's greedy tokens up to an answer's first other one, how many are another

Then whole engines. Random bf16 weights in the shape of Qwen3-0.6B, two threads for everybody. Each side has a process
of its own, which is stopped while another is measured; they take turns, and ratios are formed within a round. Ours has
the weights as they are stored, in 12, 8 and 4 bits (`PENSTOCK_ENGINE_WEIGHTS`); llama.cpp has Q8_0 and Q4_0, its
embedding in Q8_0; OpenVINO has int8, and int4 in groups of 128. What is not installed (`python -m
benchmarks.peers.setup`) is left out.

    int8_decode_b1, …          tokens a second to those of ours in bf16: 1, 8 and 32 sequences, and a prompt of 2,048
    load_s_q06_packed          seconds from the call that loads to a proved engine, from a file of packed weights
    load_s_q06                 from the checkpoint, its files in the page cache and all else noted by an earlier start
    load_vs_llamacpp           the former to llama.cpp's start in the same round
    int8_vs_best_peer_b1, …    to the best of the other engines with 8 bits; int4 likewise
    gguf_q8_0_vs_llamacpp_b1, _b8  to the best of llama.cpp's builds and orders, with the same GGUF file; q4_k_m too

`--quick` takes the shape with 135 million weights, without the others.
"""

import itertools
import math
import statistics
import time
from contextlib import closing
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.common import Arguments, run_benchmark, save_plot
from benchmarks.comparison import compute_ratio, measure_in_turns
from benchmarks.engine import POOL_MB, THREADS
from benchmarks.peers.process import is_available
from benchmarks.peers.rounds import OURS, Results, Rounds
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.workload import CELLS
from benchmarks.systems import write_shape
from benchmarks.weights_kv import measure_kv
from penstock.config.settings import EngineSettings
from penstock.engine.gguf_file import BLOCKS, GgufTensor
from penstock.engine.gguf_weights import GgufMatrix, GgufSlice
from penstock.engine.kernels.library import Library, load_library
from penstock.engine.kernels.packed import PackedLinears, WeightForm
from penstock.engine.loading import load_model, pack_model

FORMS = ("p12", "int8", "int4")
Form = WeightForm | str
"""A string is GGUF's name of a type."""
NAMES: dict[Form, str] = {
    WeightForm.COMPRESSED: "p12", WeightForm.INT8: "int8", WeightForm.INT4: "int4",
    **{kind: f"gguf_{kind.lower()}" for kind in ("Q8_0", "Q4_K", "Q6_K")},
}  # fmt: skip
ALL_FORMS: tuple[Form, ...] = (WeightForm.STORED, *NAMES)
GGUF_FILES = ("Q8_0", "Q4_K_M")
LLAMACPP_SIDES = {
    "llamacpp": ("llamacpp", "own"), "llamacpp file": ("llamacpp", "file"), "llamacpp avx2": ("llamacpp_avx2", "own"),
}  # fmt: skip
"""Its order for AMX ends with a violation of memory on some machines: that side is left out then."""
ROWS = (1, 2, 4, 8, 12, 16, 32, 64)
NUM_LAYERS = 4
LOAD_POOL_MB = 64
"""Of engines whose start is timed: ours writes zeros to its pool there, others when they first answer."""
LINEAR_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Layers with the same input."""
PEERS: dict[str, dict[str, tuple[str, str]]] = {
    "p12": {},
    "int8": {"llamacpp Q8_0": ("llamacpp", "Q8_0"), "openvino int8": ("openvino", "int8")},
    "int4": {"llamacpp Q4_0": ("llamacpp", "Q4_0"), "openvino int4": ("openvino", "int4")},
}
"""By number of bits and name of the side: the engine, and what it calls the form."""
MEASURED = ("decode_b1", "decode_b8", "decode_b32", "prefill_2048")


def make_groups(native: Library, shape: Shape) -> list[dict[Form, PackedLinears]]:
    """Return the groups of linear layers of a few decoder layers, in each form."""
    chance, groups = torch.Generator().manual_seed(0), []
    sizes = shape.linear_shapes()
    for _, names in itertools.product(range(NUM_LAYERS), LINEAR_GROUPS):
        linears = []
        for outputs, inputs in (sizes[name] for name in names):
            linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            linear.weight.copy_(torch.randn(outputs, inputs, generator=chance) / inputs**0.5)
            linears.append(linear)
        groups.append({form: pack_linears(native, linears, form) for form in ALL_FORMS})
    return groups


def pack_linears(native: Library, linears: list[nn.Linear], form: Form) -> PackedLinears:
    """Return a group of linear layers in a form; in one of GGUF with other numbers."""
    if isinstance(form, WeightForm):
        return PackedLinears(native, linears, lambda _: None, form=form)
    size, num_bytes = BLOCKS[form]
    shapes = [list(linear.weight.shape) for linear in linears]
    tensors = [GgufTensor(form, shape, 0, math.prod(shape) // size * num_bytes) for shape in shapes]
    matrices = [GgufMatrix(GgufSlice(torch.full((one.num_bytes,), 17, dtype=torch.uint8), one)) for one in tensors]
    return PackedLinears(native, linears, lambda _: None, form=WeightForm.GGUF, matrices=matrices)


def time_linears(
    groups: list[dict[Form, PackedLinears]], rows: int, num_rounds: int
) -> tuple[dict[Form, list[float]], bool]:
    """Return the seconds of all groups in all forms, by round, and whether the lossless form has the bits of bf16.

    A group has its turn in all forms, one right after the other, the order reversed every other round.
    """
    times: dict[Form, list[float]] = {form: [] for form in ALL_FORMS}
    given = {
        size: torch.randn(rows, size).to(torch.bfloat16) for size in {one[WeightForm.STORED].inputs for one in groups}
    }
    is_identical = True
    for number in range(num_rounds + 1):
        spent = dict.fromkeys(ALL_FORMS, 0.0)
        for group in groups:
            outs = {}
            for form in ALL_FORMS if number % 2 else reversed(ALL_FORMS):
                x, begun_s = given[group[form].inputs], time.perf_counter()
                outs[form] = group[form](x)
                spent[form] += time.perf_counter() - begun_s
            is_identical &= all(map(torch.equal, outs[WeightForm.STORED], outs[WeightForm.COMPRESSED]))
        if number:  # the first one warms up
            for form, seconds in spent.items():
                times[form].append(seconds)
    return times, is_identical


def measure_linears(shape: Shape, row_counts: tuple[int, ...], num_rounds: int) -> dict[str, float]:
    """Return the figures of linear layers by themselves, on two threads."""
    native = load_library()
    assert native is not None, "the kernels are not built"
    native.set_threads(THREADS)
    groups, figures, identical = make_groups(native, shape), dict[str, float](), True
    bytes_of = {form: sum(group[form].num_bytes for group in groups) for form in ALL_FORMS}
    for rows in row_counts:
        times, is_identical = time_linears(groups, rows, num_rounds)
        identical &= is_identical
        ratios = {name: compute_ratio(times, WeightForm.STORED, form) for form, name in NAMES.items()}
        speed = bytes_of[WeightForm.STORED] / statistics.median(times[WeightForm.STORED]) / 1e9
        found = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        print(f"{rows:3} rows: {found}; bf16 reads {speed:.1f} GB/s", flush=True)
        figures |= {f"{name}_linear_m{rows}": ratio for name, ratio in ratios.items()}
        figures[f"bf16_gb_per_s_m{rows}"] = speed
    native.set_threads(1)
    figures["p12_memory_ratio"] = bytes_of[WeightForm.COMPRESSED] / bytes_of[WeightForm.STORED]
    return {"p12_identical": float(identical), "p12_bits_per_weight_demo": count_demo_bits(native)} | figures


def count_demo_bits(native: Library) -> float:
    """Return the bits of a weight of the demo model in 12 bits, with all that belongs to it."""
    module = load_model(EngineSettings(dtype="bfloat16")).module
    linears = [part for part in module.modules() if type(part) is nn.Linear]
    packed = [PackedLinears(native, [one], lambda _: None, form=WeightForm.COMPRESSED) for one in linears]
    return 8 * sum(one.num_bytes for one in packed) / sum(one.weight.numel() for one in linears)


def measure(shape: Shape, measured: tuple[str, ...], num_rounds: int, *, with_peers: bool, is_forked: bool) -> Results:
    """Run all rounds. Processes of ours are forked, if `is_forked`, as `Side` has it."""
    cells = tuple(cell for cell in CELLS if cell.name in measured)
    with Rounds(shape, cells, POOL_MB[shape.name], is_forked=is_forked) as rounds:
        rounds.load_side("bf16", OURS, weights="bf16")
        for form in FORMS:
            rounds.load_side(form, OURS, weights=form)
            for name, (engine, own_form) in (PEERS[form] if with_peers else {}).items():
                rounds.load_side(name, engine, form=own_form)
        rounds.run_rounds(num_rounds)
        return rounds.results


def measure_gguf(shape: Shape, num_rounds: int, *, is_forked: bool) -> dict[str, float]:
    """Return how ours compares with llama.cpp, which makes the files, and so is asked first."""
    cells, figures = tuple(cell for cell in CELLS if cell.name in ("decode_b1", "decode_b8")), dict[str, float]()
    if not is_available("llamacpp"):
        print("GGUF files: left out, llama.cpp is not installed (python -m benchmarks.peers.setup)")
        return figures
    for form in GGUF_FILES:
        with Rounds(shape, cells, POOL_MB[shape.name], is_forked=is_forked) as rounds:
            for name, (engine, order) in LLAMACPP_SIDES.items():
                rounds.load_side(name, engine, form=form, order=order)
            rounds.load_side(OURS, form=form, dtype="auto")
            rounds.run_rounds(num_rounds)
            for cell in cells:
                ratios = [rounds.results.compute_ratio(cell.name, name) for name in LLAMACPP_SIDES]
                if known := [ratio for ratio in ratios if ratio is not None]:
                    figures[f"gguf_{form.lower()}_vs_llamacpp_{cell.name.removeprefix('decode_')}"] = min(known)
    return figures


def measure_loads(shape: Shape, num_rounds: int, *, is_forked: bool) -> dict[str, float]:
    """Return how long a start takes: with a file of packed weights, without one, and llama.cpp's, by turns."""
    packed = DIRECTORY / f"{shape.name}.packed"
    pack_model(EngineSettings(model=str(write_shape(shape)), dtype="bfloat16", threads=THREADS), packed)
    rounds = Rounds(shape, (), LOAD_POOL_MB, is_forked=is_forked)

    def start(name: str, engine: str = OURS, **given: Any) -> float:
        side, answer = rounds.start_side(f"load-{name}", engine, **given)
        with closing(side):
            return answer["load_s"]

    sides = {
        "packed": lambda _: start("packed", packed=str(packed)),
        "checkpoint": lambda _: start("checkpoint"),
        "llamacpp": lambda _: start("llamacpp", "llamacpp"),
    }
    if not is_available("llamacpp"):
        print("loads: llama.cpp is left out, not installed (python -m benchmarks.peers.setup)")
        del sides["llamacpp"]
    taken = measure_in_turns(sides, num_rounds - 1, "loads", num_warm=1)  # the first start notes what it finds out
    median = {name: statistics.median(own) for name, own in taken.items()}
    figures = {f"load_s_{shape.name}_packed": median["packed"], f"load_s_{shape.name}": median["checkpoint"]}
    return figures | ({"load_vs_llamacpp": compute_ratio(taken, "packed", "llamacpp")} if "llamacpp" in taken else {})


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
    is_smoke = given.size == "smoke"
    shape = SHAPES[given.choose_size("q06", "small", "smoke")]
    rows, num_linear_rounds = given.choose_size((ROWS, 60), (ROWS[::3], 7), (ROWS[:1], 1))
    figures = measure_linears(SHAPES["smoke" if is_smoke else "q06"], rows, num_linear_rounds)
    figures |= measure_kv(write_shape(shape), *given.choose_size((2048, 12, 40), (512, 2, 40), (64, 2, 2)))
    figures |= measure_loads(shape, given.choose_size(6, 2, 2), is_forked=is_smoke)
    figures |= measure_gguf(shape, given.choose_size(5, 3, 1), is_forked=is_smoke)
    cells, num_rounds = given.choose_size((MEASURED, 3), (MEASURED, 1), (MEASURED[:1], 1))
    results = measure(shape, cells, num_rounds, with_peers=given.is_full, is_forked=is_smoke)
    if given.is_full:
        draw_plot(results)
    return figures | compare(results)


if __name__ == "__main__":
    run_benchmark(__doc__, run)
