"""The engine on processors with AVX2 alone: its native kernels against torch's products, and forms of weights.

python -m benchmarks.engine_avx2 [--quick | --smoke] [--json FILE]

Every side is limited to AVX2, by what torch's libraries and ours read from the environment. Each has a process of its
own; they take turns, and ratios are formed within a round. Torch's side is this engine without its kernels
(`PENSTOCK_ENGINE_ISA=torch`). Two threads for everybody.

    avx2_decode_vs_torch_b1, …      tokens a second of 1, 8, 16 and 64 sequences to those of torch, the least of all
                                    shapes in float32 and bfloat16; each also by shape and dtype
    avx2_prefill_vs_torch           the same of a prompt of 512 tokens
    avx2_int8_vs_float32_b1, …_b64  with weights in 8 bits to ours in float32; int4 likewise
    avx2_vs_llamacpp_b1, …_b32      ours in bfloat16 to llama.cpp with the same weights, built for AVX2 (`python -m
                                    benchmarks.peers.setup`); without it they are left out

`--quick` takes the small shape only.
"""

import os
from collections.abc import Iterator
from unittest.mock import patch

from benchmarks.common import Arguments, run_benchmark
from benchmarks.peers.rounds import OURS, Rounds
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.workload import Cell

LIMITED = {
    "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2",
    "PENSTOCK_ENGINE_ISA": "avx2",
}  # fmt: skip
DTYPES = ("float32", "bfloat16")
INTEGERS = ("int8", "int4")
LLAMACPP = "llamacpp_avx2"
CELLS = (
    *(Cell(f"decode_b{batch}", batch, (16, 16), (24, 24)) for batch in (1, 8, 16, 32, 64)),
    Cell("prefill", 1, (512, 512), (1, 1)),
)


def measure_shape(
    shape: Shape, num_rounds: int, rounds_s: float, cells: tuple[Cell, ...], pool_mb: int, *, is_forked: bool
) -> dict[str, float]:
    """Return all figures of one shape, by dtype and cell."""
    figures: dict[str, float] = {}
    for dtype in DTYPES[:1] if is_forked else DTYPES:
        with patch.dict(os.environ, LIMITED), Rounds(shape, cells, pool_mb, is_forked=is_forked) as rounds:
            rounds.load_side("kernels", OURS, dtype=dtype, isa="avx2")
            rounds.load_side("torch", OURS, dtype=dtype, isa="torch")
            for form in INTEGERS if dtype == "float32" else ():
                rounds.load_side(form, OURS, dtype=dtype, isa="avx2", weights=form)
            if dtype == "bfloat16":
                rounds.load_side(LLAMACPP)
            rounds.run_rounds(num_rounds, rounds_s)
            compared = {f"{dtype}_avx2_{{}}_vs_torch": ("kernels", "torch")}
            compared |= {"avx2_{}_vs_llamacpp": ("kernels", LLAMACPP)}
            compared |= {f"avx2_{form}_{{}}_vs_float32": (form, "kernels") for form in INTEGERS}
            for name, sides in compared.items():
                for cell in cells:
                    if (ratio := rounds.results.compare_sides(cell.name, *sides)) is not None:
                        kind, _, batch = cell.name.partition("_")
                        figures[f"{shape.name}_{name.format(kind)}{'_' + batch if batch else ''}"] = ratio
    return figures


def find_least(figures: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the figures that goals are set for: the least of all shapes and dtypes."""
    wanted = {f"avx2_decode_vs_torch_b{batch}": f"avx2_decode_vs_torch_b{batch}" for batch in (1, 8, 16, 64)}
    wanted |= {"avx2_prefill_vs_torch": "avx2_prefill_vs_torch"}
    wanted |= {f"avx2_vs_llamacpp_b{batch}": f"avx2_decode_vs_llamacpp_b{batch}" for batch in (1, 8, 32)}
    for form in INTEGERS:
        for batch in (1, 64):
            wanted[f"avx2_{form}_vs_float32_b{batch}"] = f"avx2_{form}_decode_vs_float32_b{batch}"
    for name, ending in wanted.items():
        if found := [value for known, value in figures.items() if known.endswith(f"_{ending}")]:
            yield name, min(found)


def run(given: Arguments) -> dict[str, float]:
    """Measure and return the figures."""
    names, num_rounds, rounds_s, pool_mb = given.choose_size(
        (("small", "q06"), 3, 240.0, 1024), (("small",), 3, 60.0, 1024), (("smoke",), 1, 0.0, 64)
    )
    cells, is_forked = given.choose_size(CELLS, CELLS, (CELLS[0], CELLS[-1])), given.size == "smoke"
    figures: dict[str, float] = {}
    for name in names:
        figures |= measure_shape(SHAPES[name], num_rounds, rounds_s, cells, pool_mb, is_forked=is_forked)
    return figures | dict(find_least(figures))


if __name__ == "__main__":
    run_benchmark(__doc__, run)
