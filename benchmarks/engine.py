"""The engine by rows of one table: against other engines, and by shape, form of weights, instruction set and step.

python -m benchmarks.engine [--row NAME …] [--quick | --smoke] [--json FILE]

Weights are random, and everybody has two threads. Sides are processes of their own, each stopped while another is
measured; they take turns, and ratios are formed within a round. Other engines are installed by `python -m
benchmarks.peers.setup`; what is not installed is left out. The rows, of which `bf16` is measured if none is named:

bf16: two shapes in bf16 (`--quick`: the small one, greedy, to those that start at once), also at temperature 1 (_t1)
    small_decode_b1_vs_best_peer, …    tokens a second of 1, 8, 32 sequences behind their first token; 64 new ones each
    …_prefill_512_vs_best_peer, …      prompt tokens by the time to the first token
    …_continuous_vs_best_peer          tokens a second of 64 requests at once, prompts 32 to 512, outputs 16 to 128
    …_decode_b1_bandwidth_share, …_prefill_2048_gemm_share    of what the machine's memory and multiplications give
    bf16_flip_share                    share of tokens that are other ones than those of each prompt on its own
moe: a billion weights in the form of Qwen3-MoE, a quarter of them for each token (`--quick`: four of 18 layers)
    moe_decode_b1_vs_best_peer, …, moe_flips_bf16    as above
avx2: every side limited to AVX2; torch's side is this engine without its kernels (`PENSTOCK_ENGINE_ISA=torch`)
    avx2_decode_vs_torch_b1, …, avx2_prefill_vs_torch    the least of all shapes and dtypes; each also alone
    avx2_int8_vs_float32_b1, …         with weights in 8 bits to ours in float32; int4 likewise
    avx2_vs_llamacpp_b1, …             ours in bfloat16 to llama.cpp, built for AVX2
forms: the 0.6B shape with weights in 12, 8 and 4 bits (`PENSTOCK_ENGINE_WEIGHTS`; `--quick`: the small one, no others)
    int8_decode_b1, …                  tokens a second to those of ours in bf16
    int8_vs_best_peer_b1, …            to the best of the others with 8 bits: llama.cpp's Q8_0, OpenVINO's int8
gguf: gguf_q8_0_vs_llamacpp_b1, …      the same GGUF file in ours and the best of llama.cpp's builds and orders
loads: seconds from the call that loads to a proved engine
    load_s_q06_packed, load_s_q06      from a file of packed weights; from the checkpoint, its files in the page cache
    load_vs_llamacpp                   the former to llama.cpp's start in the same round
linears: linear layers of the 0.6B shape by themselves, more bytes than the caches hold
    p12_linear_m1, …                   time in bf16 to that in 12 bits, for as many rows; int8 and int4 likewise
    bf16_gb_per_s_m1, …                bytes of bf16 a second: below the memory's speed, computing takes longer
kv_int8: K and V in 8 bits (`PENSTOCK_ENGINE_KV_DTYPE`)
    kv_int8_tokens_ratio               tokens that fit into a pool, to those in bf16
    kv_int8_decode_b32_long            a decode step of 32 sequences with 2,048 tokens in bf16 to that in 8 bits
    kv_int8_flips                      of the demo model's greedy tokens up to an answer's first other one, how many
hybrid: a model like Qwen3.5 of 0.6 billion weights, three layers with a gated delta rule to one with attention
    hybrid_step_b1_ms, …, hybrid_batch_gain, …_vs_dense    a decode step of 1 and 16 sequences, beside a dense model
drafts: one thread, processor time of decode steps; the tool model's answers are what is drawn
    acceptance, tokens_a_step_copy     share of drafts accepted; tokens a step where text is copied, one at a time
    itl_speedup_copy_b1, …             time between tokens without drafts to that with them, N sequences at once
    itl_speedup_other_b1, …, _worst    the same for random text of 64 words, where guesses are always there and fail
    verify_4_rows, …                   time of a step with N rows of one sequence to that of a step with one
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Values
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from benchmarks.common import Arguments, format_spread, run_benchmark
from benchmarks.comparison import compute_ratio, compute_ratios, draw_bars, measure_in_turns, print_table
from benchmarks.peers.process import is_available
from benchmarks.peers.rounds import LIMITS, OURS, Results, Rounds
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.workload import CELLS, DRAWN_CELLS, Cell
from benchmarks.systems import GREEDY, count_same_tokens, draw_tokens, run_sequences, time_decode_steps, write_shape
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.library import Library, load_library
from penstock.engine.kernels.packed import PackedLinears, WeightForm
from penstock.engine.loading.loading import load_model
from penstock.engine.loading.packed import pack_model
from penstock.engine.loading.probe import probe_layout
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sampling.sampler import SamplingParams, sample_tokens
from penstock.engine.sequence import Sequence
from penstock.engine.steps.step_batch import StepBatch
from tools.tool_corpus import TOOL_MODEL, make_conversation, render_conversation

Figures = dict[str, float]
Sides = dict[str, dict[str, str]]
"""By name: the arguments of `Rounds.load_side`, which are the engine and the form that it has its weights in."""
THREADS = 2
POOL_MB = {"smoke": 64, "moe_smoke": 64, "small": 1024, "q06": 2048}
BY_NAME = {cell.name: cell for cell in (*CELLS, *DRAWN_CELLS)}


@dataclass(frozen=True)
class EngineArguments(Arguments):
    """The arguments, and the rows to measure."""

    row: list[str]

    @property
    def is_forked(self) -> bool:
        """Whether processes of ours are forked, as `Side` has it."""
        return self.size == "smoke"


class Extent(NamedTuple):
    """How much is measured of a shape."""

    cells: tuple[Cell, ...]
    num_rounds: int
    rounds_s: float = 9e9
    """No new round begins after this time."""
    flips: tuple[int, int] | None = None
    """The prompts and tokens of each with which we look whether ours depend on the batch."""
    pool_mb: int = 0
    """MiB of our engine's KV pool; 0: the size that the shape has in `POOL_MB`."""


def measure_sides(shape: Shape, sides: Sides, extent: Extent, given: EngineArguments) -> tuple[Results, Figures]:
    """Run the rounds of one shape. Return them, and what only our engine can be asked."""
    pool_mb = extent.pool_mb or POOL_MB.get(shape.name, 1024)
    with Rounds(shape, extent.cells, pool_mb, is_forked=given.is_forked) as rounds:
        for name, how in sides.items():
            rounds.load_side(name, **how)
        if extent.flips is not None:
            rounds.check_tokens()
        rounds.run_rounds(extent.num_rounds, extent.rounds_s)
        return rounds.results, {} if extent.flips is None else count_batch_flips(rounds, *extent.flips)


def count_batch_flips(rounds: Rounds, num_prompts: int, num_new: int) -> Figures:
    """Return the share of our tokens that depend on the batch, in the worst of several ways to run."""
    mixed = BY_NAME["continuous"].make_requests(rounds.shape.vocabulary, -3)
    prompts = [prompt for prompt, _ in mixed[:num_prompts]]
    if not (flips := rounds.ask_ours("flips", prompts=prompts, num_new=num_new)):
        return {}
    told = ", ".join(f"{way} {share:.2%}" for way, share in flips.items())
    rounds.say(f"tokens that differ from those alone, of {len(prompts) * num_new:,}: {told}")
    return {"bf16_flip_share": max(flips.values())}


def compare_peers(results: Results) -> Figures:
    """Return the ratios to the best of the others, and the shares of the machine's limits."""
    shape = results.shape
    ratios = {f"{shape.name}_{cell}_vs_best_peer": results.compute_best_ratio(cell) for cell in BY_NAME}
    # A ratio is ours to a side: tokens by bytes (or operations) a second.
    per_byte, per_flop = (results.compute_ratio(cell, limit) for cell, limit in LIMITS.items())
    if per_byte is not None:
        ratios[f"{shape.name}_decode_b1_bandwidth_share"] = per_byte * shape.read_bytes
    if per_flop is not None:
        ratios[f"{shape.name}_prefill_2048_gemm_share"] = per_flop * shape.count_prefill_flops(2048) / 2048
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def format_results(results: Results) -> str:
    """Return the medians, and in brackets our ratio to each."""
    lines = [f"\n{results.shape.name:16}" + "".join(f"{side:>18}" for side in results.list_sides())]
    for cell in (name for name in BY_NAME if name in results.values):
        line = f"{cell:16}"
        for side in results.list_sides():
            value, ratio = results.compute_median(cell, side), results.compute_ratio(cell, side)
            text = "-" if value is None else f"{value:,.4g}"
            line += f"{text if ratio is None or side == OURS else f'{text} ({ratio:.2f})':>18}"
        lines.append(line)
    for beside, limit in LIMITS.items():
        if (value := results.compute_median(beside, limit)) is not None:
            unit, scale = ("GB/s", 1e9) if limit == "bandwidth" else ("TFLOP/s", 1e12)
            lines.append(f"{limit:16}{value / scale:>18.3g} {unit}")
    return "\n".join(lines)


PEERS = ("generate", "openvino", "llamacpp", "llamacpp_avx512", "vllm")
QUICK_PEERS = ("generate", "openvino")


def measure_bf16(given: EngineArguments) -> Figures:
    """Compare with the other engines."""
    shapes, peers, extent = given.choose_size(
        ((SHAPES["small"], SHAPES["q06"]), PEERS, Extent((*CELLS, *DRAWN_CELLS), 5, 480.0, (48, 48))),
        ((SHAPES["small"],), QUICK_PEERS, Extent(CELLS, 3, 15.0, (12, 32))),
        ((SHAPES["smoke"],), (), Extent(CELLS[:1], 1, 0.0, (2, 4))),
    )
    return measure_peers(shapes, peers, extent, given)


def measure_moe(given: EngineArguments) -> Figures:
    """Compare a mixture of experts with the other engines."""
    smoke = replace(
        SHAPES["smoke"], name="moe_smoke", architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", tied=True,
        normed_heads=True, experts=4, experts_per_token=2,
    )  # fmt: skip
    cells = tuple(BY_NAME[name] for name in ("decode_b1", "decode_b8", "prefill_512"))
    shape, peers, extent = given.choose_size(
        (SHAPES["moe"], PEERS[:-1], Extent(cells, 5, flips=(32, 32))),
        (replace(SHAPES["moe"], layers=4, name="moe_quick"), QUICK_PEERS, Extent(cells, 2, flips=(8, 32))),
        (smoke, (), Extent(cells, 1, flips=(2, 32))),
    )
    figures = measure_peers((shape,), peers, extent, given)
    if "bf16_flip_share" in figures:
        figures["moe_flips_bf16"] = figures.pop("bf16_flip_share")
    return {f"moe_{name.removeprefix(f'{shape.name}_').removeprefix('moe_')}": figures[name] for name in figures}


def measure_peers(shapes: Values[Shape], peers: Values[str], extent: Extent, given: EngineArguments) -> Figures:
    """Compare with the other engines on some shapes, print it, and draw what a full run of several shapes found."""
    print(f"this run leaves out {', '.join({*PEERS} - {*peers}) or 'nobody'}")
    figures, found = Figures(), list[Results]()
    for shape in shapes:
        results, own = measure_sides(shape, {name: {} for name in ("limits", OURS, *peers)}, extent, given)
        figures |= own | compare_peers(results)
        found.append(results)
    print(f"\n{THREADS} threads, bf16, random weights; medians of the rounds (ours to theirs)")
    print(*map(format_results, found), sep="\n")
    if given.is_full and len(found) > 1:
        charts = {
            f"{one.shape.name} to {side}": {cell: one.compute_ratio(cell, side) or 0.0 for cell in one.values}
            for one in found for side in one.list_sides() if side != OURS
        }  # fmt: skip
        draw_bars("engine", charts, "our tokens/s to theirs")
    return figures


AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2",
}  # fmt: skip
"""The variables from which torch's libraries read the instruction set. Our engine gets it as a setting."""
LLAMACPP_AVX2 = "llamacpp_avx2"
AVX2_CELLS = (
    *(Cell(f"decode_b{batch}", batch, (16, 16), (24, 24)) for batch in (1, 8, 16, 32, 64)),
    Cell("prefill", 1, (512, 512), (1, 1)),
)
AVX2_GOALS = {
    **{f"avx2_decode_vs_torch_b{batch}": f"avx2_decode_vs_torch_b{batch}" for batch in (1, 8, 16, 64)},
    "avx2_prefill_vs_torch": "avx2_prefill_vs_torch",
    **{f"avx2_vs_llamacpp_b{batch}": f"avx2_decode_vs_llamacpp_b{batch}" for batch in (1, 8, 32)},
    **{f"avx2_{form}_vs_float32_b{batch}": f"avx2_{form}_decode_vs_float32_b{batch}"
       for form in ("int8", "int4") for batch in (1, 64)},
}  # fmt: skip
"""The figures that goals are set for, and how those end of which each is the least."""


def measure_avx2(given: EngineArguments) -> Figures:
    """Compare on AVX2 alone."""
    shapes, cells, num_rounds, rounds_s, pool_mb = given.choose_size(
        (("small", "q06"), AVX2_CELLS, 3, 240.0, 1024), (("small",), AVX2_CELLS, 3, 60.0, 1024),
        (("smoke",), (AVX2_CELLS[0], AVX2_CELLS[-1]), 1, 0.0, 64),
    )  # fmt: skip
    figures = Figures()
    for shape, dtype in itertools.product(shapes, ("float32",) if given.is_forked else ("float32", "bfloat16")):
        forms = ("int8", "int4") if dtype == "float32" else ()
        ours = {"engine": OURS, "dtype": dtype, "isa": "avx2"}
        sides: Sides = {"kernels": ours, "torch": ours | {"isa": "torch"}} | {
            form: ours | {"weights": form} for form in forms
        }
        sides |= {} if forms else {LLAMACPP_AVX2: {}}
        with patch.dict(os.environ, AVX2):
            extent = Extent(cells, num_rounds, rounds_s, pool_mb=pool_mb)
            results, _ = measure_sides(SHAPES[shape], sides, extent, given)
        compared = {f"{dtype}_avx2_{{}}_vs_torch": ("kernels", "torch")}
        compared |= {"avx2_{}_vs_llamacpp": ("kernels", LLAMACPP_AVX2)}
        compared |= {f"avx2_{form}_{{}}_vs_float32": (form, "kernels") for form in forms}
        for (name, pair), cell in itertools.product(compared.items(), cells):
            if (ratio := results.compare_sides(cell.name, *pair)) is not None:
                kind, _, batch = cell.name.partition("_")
                figures[f"{shape}_{name.format(kind)}{'_' + batch if batch else ''}"] = ratio
    found = {
        goal: [figure for name, figure in figures.items() if name.endswith(f"_{ending}")]
        for goal, ending in AVX2_GOALS.items()
    }
    return figures | {goal: min(those) for goal, those in found.items() if those}


FORMS = {"p12": WeightForm.COMPRESSED, "int8": WeightForm.INT8, "int4": WeightForm.INT4}
FORM_PEERS: dict[str, Sides] = {
    "p12": {},
    **{form: {f"{engine} {own}": {"engine": engine, "form": own} for engine, own in
              (("llamacpp", gguf), ("llamacpp_avx512", gguf), ("openvino", form))}
       for form, gguf in (("int8", "Q8_0"), ("int4", "Q4_0"))},
}  # fmt: skip
"""The sides of the others by the form of ours, each with what it calls the form."""


def choose_shape(given: EngineArguments) -> Shape:
    """Return the shape of rows about forms."""
    return SHAPES[given.choose_size("q06", "small", "smoke")]


def measure_forms(given: EngineArguments) -> Figures:
    """Compare weights in fewer bits with bf16, and with others."""
    cells = tuple(BY_NAME[name] for name in ("decode_b1", "decode_b8", "decode_b32", "prefill_2048"))
    sides: Sides = {"bf16": {"engine": OURS, "weights": "bf16"}}
    for form, others in FORM_PEERS.items():
        sides |= {form: {"engine": OURS, "weights": form}} | (others if given.is_full else {})
    extent = given.choose_size(Extent(cells, 3), Extent(cells, 1), Extent(cells[:1], 1))
    results, _ = measure_sides(choose_shape(given), sides, extent, given)
    figures: dict[str, float | None] = {}
    for form, cell in itertools.product(FORMS, results.values):
        figures[f"{form}_{cell}"] = results.compare_sides(cell, form, "bf16")
        best = results.compute_best_ratio(cell, form, tuple(FORM_PEERS[form]))
        figures[f"{form}_vs_best_peer_{cell.removeprefix('decode_')}"] = best
    if given.is_full:
        names = [name for name in results.list_sides() if name != "bf16"]
        charts = {
            cell: {name: results.compare_sides(cell, name, "bf16") or 0.0 for name in names} for cell in results.values
        }
        draw_bars("weights", charts, "tokens/s to ours in bf16")
    return {name: figure for name, figure in figures.items() if figure is not None}


def measure_gguf(given: EngineArguments) -> Figures:
    """Compare with llama.cpp, which makes the files, and so is asked first."""
    # Its order for AMX ends with a violation of memory on some machines: that side is left out then.
    builds = {"llamacpp": ("llamacpp", "own"), "llamacpp file": ("llamacpp", "file"),
              "llamacpp avx512": ("llamacpp_avx512", "own"), "llamacpp avx2": (LLAMACPP_AVX2, "own")}  # fmt: skip
    figures = Figures()
    if not is_available("llamacpp"):
        print("GGUF files: left out, llama.cpp is not installed (python -m benchmarks.peers.setup)")
        return figures
    extent = Extent((BY_NAME["decode_b1"], BY_NAME["decode_b8"]), given.choose_size(5, 3, 1))
    for form in ("Q8_0", "Q4_K_M"):
        sides: Sides = {
            name: {"engine": engine, "form": form, "order": order} for name, (engine, order) in builds.items()
        }
        results, _ = measure_sides(choose_shape(given), sides | {OURS: {"form": form, "dtype": "auto"}}, extent, given)
        for cell in extent.cells:
            if (ratio := results.compute_best_ratio(cell.name)) is not None:
                figures[f"gguf_{form.lower()}_vs_llamacpp_{cell.name.removeprefix('decode_')}"] = ratio
    return figures


def measure_loads(given: EngineArguments) -> Figures:
    """Measure how long a start takes: with a file of packed weights, without one, and llama.cpp's, by turns."""
    shape, packed = choose_shape(given), DIRECTORY / f"{choose_shape(given).name}.packed"
    pack_model(EngineSettings(model=str(write_shape(shape)), dtype="bfloat16", threads=THREADS), packed)
    # Ours writes zeros to its pool at the start, others when they first answer: the pool is small.
    rounds = Rounds(shape, (), 64, is_forked=given.is_forked)

    def start(name: str, engine: str, how: dict[str, str], _: int) -> float:
        side, answer = rounds.start_side(f"load-{name}", engine, **how)
        with closing(side):
            return answer["load_s"]

    sides = {"packed": partial(start, "packed", OURS, {"packed": str(packed)})}
    sides["checkpoint"] = partial(start, "checkpoint", OURS, {})
    if is_available("llamacpp"):
        sides["llamacpp"] = partial(start, "llamacpp", "llamacpp", {})
    # The first start notes what it finds out.
    taken = measure_in_turns(sides, given.choose_size(5, 1, 1), "loads", num_warm=1)
    figures = {
        f"load_s_{shape.name}_packed": statistics.median(taken["packed"]),
        f"load_s_{shape.name}": statistics.median(taken["checkpoint"]),
    }
    return figures | ({"load_vs_llamacpp": compute_ratio(taken, "packed", "llamacpp")} if "llamacpp" in taken else {})


LINEAR_GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
"""Layers with the same input."""


def make_groups(native: Library, shape: Shape) -> list[dict[WeightForm, PackedLinears]]:
    """Return the groups of linear layers of four decoder layers, in each form."""
    chance, groups, sizes = torch.Generator().manual_seed(0), [], shape.linear_shapes()
    for _, names in itertools.product(range(4), LINEAR_GROUPS):
        linears = []
        for outputs, inputs in (sizes[name] for name in names):
            linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            linear.weight.copy_(torch.randn(outputs, inputs, generator=chance) / inputs**0.5)
            linears.append(linear)
        forms = (WeightForm.STORED, *FORMS.values())
        groups.append({form: PackedLinears.pack(native, linears, lambda _: None, form=form) for form in forms})
    return groups


def measure_linears(given: EngineArguments) -> Figures:
    """Measure linear layers by themselves."""
    rows = (1, 2, 4, 8, 12, 16, 32, 64)
    row_counts, num_rounds = given.choose_size((rows, 60), (rows[::3], 7), (rows[:1], 1))
    native = load_library()
    assert native is not None, "the kernels are not built"
    native.set_threads(THREADS)
    groups, figures = make_groups(native, SHAPES["smoke" if given.is_forked else "q06"]), Figures()
    num_bytes = sum(group[WeightForm.STORED].tensors["memory"].nbytes for group in groups)

    def run_form(form: WeightForm, inputs: dict[int, Tensor], _: int) -> float:
        begun_s = time.perf_counter()
        for group in groups:
            group[form](inputs[group[form].inputs])
        return time.perf_counter() - begun_s

    for count in row_counts:
        widths = {group[WeightForm.STORED].inputs for group in groups}
        inputs = {width: torch.randn(count, width).to(torch.bfloat16) for width in widths}
        sides = {form: partial(run_form, form, inputs) for form in (WeightForm.STORED, *FORMS.values())}
        times = measure_in_turns(sides, num_rounds, num_warm=1)
        ratios = {f"{name}_linear_m{count}": compute_ratio(times, WeightForm.STORED, FORMS[name]) for name in FORMS}
        figures |= ratios | {f"bf16_gb_per_s_m{count}": num_bytes / statistics.median(times[WeightForm.STORED]) / 1e9}
    native.set_threads(1)
    return figures


KV_DTYPES: tuple[Literal["auto", "int8"], ...] = ("auto", "int8")
NUM_LONG, NUM_FLIP_TOKENS = 32, 48


def make_block(layout: BlockLayout) -> Tensor:
    """Return the elements of a block with random vectors."""
    if not layout.is_int8:
        return torch.randn(layout.block_elements).to(layout.dtype)
    block = torch.randint(-127, 128, (layout.block_elements,), dtype=torch.int8)
    for offset, heads, width in layout.parts[1::2]:
        scales = torch.full((heads * layout.block_size,), 0.02)
        block[offset : offset + heads * layout.block_size * width] = scales.view(torch.int8)
    return block


def fill_contexts(model: LoadedModel, settings: EngineSettings, context: int) -> Callable[[int], float]:
    """Return what times a decode step of sequences whose blocks are random: computing them would take minutes."""
    blocks_each = context // settings.block_size + 1
    pool_mb = NUM_LONG * blocks_each * model.layout.block_bytes // 2**20 + 1
    engine = Engine(model, settings.model_copy(update={"pool_mb": pool_mb}))
    engine.storage.data.copy_(make_block(model.layout))
    seqs = []
    for number in range(NUM_LONG):
        ids = [(7 * place + number) % model.vocab_size for place in range(context + 1)]
        seqs.append(
            Sequence(str(number), ids[:-1], sampling=GREEDY, seed=0, max_new_tokens=2, output_token_ids=ids[-1:])
        )
        seqs[-1].block_table = engine.pool.allocate_blocks(blocks_each)
        seqs[-1].num_computed_tokens = context
    batch = StepBatch([(seq, 1) for seq in seqs], settings.block_size, model.device)

    @torch.inference_mode()
    def time_step(_: int) -> float:
        begun_s = time.perf_counter()
        engine.runner.run_step(batch)
        return time.perf_counter() - begun_s

    return time_step


def measure_kv_int8(given: EngineArguments) -> Figures:
    """Compare K and V in 8 bits with bf16: tokens that fit, long decode steps, and tokens that change."""
    context, num_rounds = given.choose_size((2048, 11), (512, 1), (64, 1))
    steps, num_bytes = dict[str, Callable[[int], float]](), dict[str, int]()
    for kv_dtype in KV_DTYPES:
        model = str(write_shape(choose_shape(given)))
        settings = EngineSettings(model=model, dtype="bfloat16", kv_dtype=kv_dtype, threads=THREADS)
        loaded = accelerate_model(load_model(settings))
        steps[kv_dtype], num_bytes[kv_dtype] = fill_contexts(loaded, settings, context), loaded.layout.block_bytes
    seconds = measure_in_turns(steps, num_rounds, "long contexts", num_warm=1)
    print_table(seconds, "s")
    answers = [answer_greedily(kv_dtype, given.choose_size(40, 40, 2)) for kv_dtype in KV_DTYPES]
    same = [count_same_tokens(one, other) for one, other in zip(*answers, strict=True)]
    num_flips = sum(count < NUM_FLIP_TOKENS for count in same)
    return {
        "kv_int8_tokens_ratio": num_bytes["auto"] / num_bytes["int8"],
        "kv_int8_decode_b32_long": compute_ratio(seconds, *KV_DTYPES),
        "kv_int8_flips": num_flips / (sum(same) + num_flips),
    }


def answer_greedily(kv_dtype: Literal["auto", "int8"], num_prompts: int) -> list[list[int]]:
    """Return the demo model's answers with K and V of that form."""
    settings = EngineSettings(dtype="bfloat16", kv_dtype=kv_dtype)
    engine = Engine(accelerate_model(load_model(settings)), settings)
    text, seqs = "And the king said unto the people of the land: ", list[Sequence]()
    for number in range(num_prompts):
        ids = engine.model.tokenizer(text * (1 + number % 5) + "Go" * number)["input_ids"]
        seqs.append(Sequence(str(number), ids, sampling=GREEDY, seed=0, max_new_tokens=NUM_FLIP_TOKENS))
    run_sequences(engine, seqs)
    return [seq.output_token_ids for seq in seqs]


HYBRID_SIZES: dict[str, Any] = {
    "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
HYBRID_SMOKE_SIZES: dict[str, Any] = HYBRID_SIZES | {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
NUM_AT_ONCE, NUM_HYBRID_STEPS = 16, 6


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


def measure_hybrid(given: EngineArguments) -> Figures:
    """Compare a model whose layers keep a state with a dense one, by what a batch gains."""
    layers, num_rounds = given.choose_size((24, 5), (8, 3), (4, 1))
    large = (1024, "bfloat16", HYBRID_SIZES)
    pool_mb, dtype, sizes = given.choose_size(large, large, (64, "float32", HYBRID_SMOKE_SIZES))
    settings = EngineSettings(dtype=dtype, pool_mb=pool_mb, max_batch=NUM_AT_ONCE)
    dense = {name: value for name, value in sizes.items() if not name.startswith("linear_")}
    models = {  # a dense layer has four fifths of the other's weights
        "hybrid": build_model(sizes | {"num_hidden_layers": layers}, settings, "qwen3_5_text"),
        "dense": build_model(dense | {"num_hidden_layers": layers * 5 // 4}, settings, "qwen3"),
    }

    def time_step(model: LoadedModel, count: int, _: int) -> float:
        how: Any = {"sampling": GREEDY, "seed": 0, "max_new_tokens": NUM_HYBRID_STEPS + 9}
        seqs = [Sequence(f"seq-{number}", [number, *range(8)], **how) for number in range(count)]
        return statistics.median(time_decode_steps(Engine(model, settings), seqs, NUM_HYBRID_STEPS))

    turns = {
        (name, count): partial(time_step, model, count)
        for name, (model, _) in models.items() for count in (1, NUM_AT_ONCE)
    }  # fmt: skip
    times = measure_in_turns(turns, num_rounds, "decode", num_warm=1)
    print_table({f"{name}, {count} at once": some for (name, count), some in times.items()}, "ms a step", 1e3)
    figures = {f"{name}_parameters": float(num_parameters) for name, (_, num_parameters) in models.items()}
    figures |= {f"{name}_step_b{count}_ms": 1e3 * statistics.median(some) for (name, count), some in times.items()}
    gains = {name: compute_ratios(times, (name, 1), (name, NUM_AT_ONCE)) for name in models}
    figures |= {f"{name}_batch_gain": NUM_AT_ONCE * statistics.median(some) for name, some in gains.items()}
    return figures | {"hybrid_batch_gain_vs_dense": compute_ratio(gains, "hybrid", "dense")}


OTHER_BATCHES, VERIFIED_ROWS = (1, 4, 16, 32), (1, 4, 8)
TRIAL_CONTEXT_TOKENS = 128


class Exchange(NamedTuple):
    """A prompt and the answer that is given to it."""

    prompt: list[int]
    answer: list[int]


def record_answers(count: int) -> list[Exchange]:
    """Return the tool model's own answers to prompts that ask for copies and for extraction, in turns."""
    model = accelerate_model(load_model(EngineSettings(model=str(TOOL_MODEL), dtype="float32")))
    engine = Engine(model, EngineSettings(max_batch=1))
    found: dict[str, list[Exchange]] = {"repetition": [], "extraction": []}
    for number in itertools.count():
        if all(len(exchanges) == count // 2 for exchanges in found.values()):
            break
        conversation = make_conversation(f"speculative {number}", held_out=True, repetitions=0.5)
        if len(found.get(conversation.kind, range(count // 2))) == count // 2:
            continue
        text = render_conversation(model.tokenizer, conversation, whole=False)
        prompt = model.tokenizer.encode(text, add_special_tokens=False)
        seq = Sequence("copy", prompt, sampling=GREEDY, seed=0, max_new_tokens=120)
        engine.add_sequence(seq)
        while seq.num_output_tokens < 120 and not model.eos_token_ids & {*seq.output_token_ids}:
            engine.step()
        engine.remove_sequence(seq)
        if len(seq.output_token_ids) >= 24:
            found[conversation.kind].append(Exchange(prompt, seq.output_token_ids))
    return [exchange for pair in zip(*found.values(), strict=True) for exchange in pair]


def make_other_text(count: int, num_tokens: int) -> list[Exchange]:
    """Return texts in which every token has come before, and what came behind it says nothing."""
    chance, words = Random(7), range(300, 364)
    return [Exchange(draw_tokens(chance, 48, words), draw_tokens(chance, num_tokens, words)) for _ in range(count)]


def decode_answers(engine: Engine, exchanges: Values[Exchange]) -> tuple[float, int]:
    """Give all answers at once; return the seconds, and the steps, from when all have their first token to the end."""

    def draw_given(logits: Tensor, draws: Values[SamplingParams]) -> list[int]:
        sample_tokens(logits, draws)
        answers = [exchanges[draw.seed].answer for draw in draws]
        return [answer[min(draw.position, len(answer) - 1)] for answer, draw in zip(answers, draws, strict=True)]

    # Some more tokens, so that none ends before all have begun.
    seqs = [
        Sequence(f"s{seed}", one.prompt, sampling=GREEDY, seed=seed, max_new_tokens=len(one.answer) + 64)
        for seed, one in enumerate(exchanges)
    ]
    with patch("penstock.engine.engine.sample_tokens", draw_given):
        for seq in seqs:
            engine.add_sequence(seq)
        while any(seq.num_output_tokens == 0 for seq in seqs):
            engine.step()
        for seq, one in zip(seqs, exchanges, strict=True):
            seq.max_new_tokens = max(len(one.answer), seq.num_output_tokens + 1)
        started_s, num_steps = time.process_time(), 0
        while engine.has_work():
            engine.step()
            num_steps += 1
        elapsed_s = time.process_time() - started_s
    for seq, one in zip(seqs, exchanges, strict=True):
        assert seq.output_token_ids[: len(one.answer)] == one.answer, "an answer is not the given one"
        engine.remove_sequence(seq)
    return elapsed_s, num_steps


@torch.inference_mode()
def time_rows(engine: Engine, chance: Random, num_rows: int, _: int) -> float:
    """Return the seconds of a step of one sequence with a draft, so that it has so many rows, whatever it costs."""
    prompt = [chance.randrange(300, 900) for _ in range(TRIAL_CONTEXT_TOKENS)]
    seq = Sequence("trial", prompt, sampling=GREEDY, seed=0, max_new_tokens=16)
    seq.block_table = engine.pool.allocate_blocks(TRIAL_CONTEXT_TOKENS // 16 + 1)
    seq.num_computed_tokens = len(prompt) - 1
    seq.draft = [chance.randrange(300, 900) for _ in range(num_rows - 1)]
    started_s = time.process_time()
    engine._run_plan([(seq, 1)])  # noqa: SLF001 - a step with a draft of this length
    taken_s = time.process_time() - started_s
    engine.pool.free_blocks(seq.block_table)
    return taken_s


def measure_drafts(given: EngineArguments) -> Figures:
    """Compare the engine with drafts and the one without, on the same weights."""
    num_copies, num_other_tokens, num_rounds = given.choose_size((16, 96, 6), (4, 16, 2), (2, 4, 1))
    copies = record_answers(num_copies)
    lengths = [len(one.answer) for one in copies]
    print(f"{len(copies)} copies of {min(lengths)} to {max(lengths)} tokens, one thread", flush=True)
    model = accelerate_model(load_model(EngineSettings(model=str(write_shape(choose_shape(given))), dtype="bfloat16")))
    plain, drafting = (Engine(model, EngineSettings(pool_mb=512, speculate=does)) for does in (False, True))
    for engine in (plain, drafting):
        engine.measure_speed()
    print(drafting.scheduler.cost, flush=True)
    steps = {rows: partial(time_rows, plain, Random(3), rows) for rows in VERIFIED_ROWS}
    seconds = {rows: statistics.median(found) for rows, found in measure_in_turns(steps, 15).items()}
    figures = {f"verify_{rows}_rows": seconds[rows] / seconds[1] for rows in VERIFIED_ROWS[1:]}
    groups: dict[str, list[list[Exchange]]] = {"copy_b1": [[one] for one in copies]}
    num_steps = sum(decode_answers(drafting, group)[1] for group in groups["copy_b1"])
    figures["acceptance"] = drafting.num_accepted_tokens / drafting.num_drafted_tokens
    figures["tokens_a_step_copy"] = sum(length - 1 for length in lengths) / num_steps
    groups["copy_b4"] = [copies[first : first + 4] for first in range(0, len(copies), 4)]
    groups |= {f"other_b{batch}": [make_other_text(batch, num_other_tokens)] for batch in OTHER_BATCHES}

    def decode(engine: Engine, name: str, _: int) -> float:
        return sum(decode_answers(engine, group)[0] for group in groups[name])

    for name in groups:
        sides = {"plain": partial(decode, plain, name), "drafting": partial(decode, drafting, name)}
        ratios = compute_ratios(measure_in_turns(sides, num_rounds, name), "plain", "drafting")
        print(f"{name}: {format_spread(ratios)}", flush=True)
        figures[f"itl_speedup_{name}"] = statistics.median(ratios)
    figures["itl_speedup_other_worst"] = min(figures[f"itl_speedup_other_b{batch}"] for batch in OTHER_BATCHES)
    return figures


ROWS: Mapping[str, Callable[[EngineArguments], Figures]] = {
    "bf16": measure_bf16, "moe": measure_moe, "avx2": measure_avx2, "forms": measure_forms, "gguf": measure_gguf,
    "loads": measure_loads, "linears": measure_linears, "kv_int8": measure_kv_int8, "hybrid": measure_hybrid,
    "drafts": measure_drafts,
}  # fmt: skip


def run(given: EngineArguments) -> Figures:
    """Measure the rows; return their figures."""
    figures = Figures()
    for name in given.row:
        figures |= ROWS[name](given)
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run, EngineArguments, row={"nargs": "+", "choices": [*ROWS], "default": ["bf16"]})
