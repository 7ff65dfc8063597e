"""Weights in fewer bits: what each form brings, against bf16 and against other engines with as many bits.

python -m benchmarks.weights [--quick | --smoke] [--json FILE]

Linear layers of the 0.6B shape by themselves, more bytes than the caches hold:

    p12_linear_m1, …           time in bf16 to that in 12 bits, for as many rows; int8 and int4 likewise
    bf16_gb_per_s_m1, …        bytes of bf16 a second: below the memory's speed, computing takes longer than reading

K and V in 8 bits (`PENSTOCK_ENGINE_KV_DTYPE`), in the same shape:

    kv_int8_tokens_ratio       tokens that fit into a pool, to those in bf16
    kv_int8_decode_b32_long    time of a decode step of 32 sequences with 2,048 tokens in bf16 to that in 8 bits
    kv_int8_flips              of the demo model's greedy tokens up to an answer's first other one, how many are another

Whole engines with random bf16 weights, two threads, each in a process of its own. Ours has the weights as they are
stored, in 12, 8 and 4 bits (`PENSTOCK_ENGINE_WEIGHTS`); llama.cpp has Q8_0 and Q4_0, its embedding in Q8_0; OpenVINO
has int8, and int4 in groups of 128:

    int8_decode_b1, …          tokens a second to those of ours in bf16: 1, 8 and 32 sequences, and a prompt of 2,048
    int8_vs_best_peer_b1, …    to the best of the other engines with 8 bits; int4 likewise
    load_s_q06_packed          seconds from the call that loads to a proved engine, from a file of packed weights
    load_s_q06                 from the checkpoint, its files in the page cache and all else noted by an earlier start
    load_vs_llamacpp           the former to llama.cpp's start in the same round
    gguf_q8_0_vs_llamacpp_b1, _b8  to the best of llama.cpp's builds and orders, with the same GGUF file; q4_k_m too

`--quick` takes the shape with 135 million weights, without the others.
"""

import itertools
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, draw_bars, measure_in_turns, print_table
from benchmarks.engine import POOL_MB, THREADS
from benchmarks.peers.process import is_available
from benchmarks.peers.rounds import OURS, Results, Rounds
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.workload import CELLS
from benchmarks.systems import GREEDY, count_same_tokens, run_sequences, write_shape
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels.library import Library, load_library
from penstock.engine.kernels.packed import PackedLinears, WeightForm
from penstock.engine.loading.loading import load_model
from penstock.engine.loading.packed import pack_model
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.engine.steps.step_batch import StepBatch

FORMS = {"p12": WeightForm.COMPRESSED, "int8": WeightForm.INT8, "int4": WeightForm.INT4}
KV_DTYPES: tuple[Literal["auto", "int8"], ...] = ("auto", "int8")
NUM_SEQUENCES, NUM_FLIP_TOKENS = 32, 48
GGUF_FILES = ("Q8_0", "Q4_K_M")
LLAMACPP_SIDES = {
    "llamacpp": ("llamacpp", "own"), "llamacpp file": ("llamacpp", "file"),
    "llamacpp avx512": ("llamacpp_avx512", "own"), "llamacpp avx2": ("llamacpp_avx2", "own"),
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
    "int8": {"llamacpp Q8_0": ("llamacpp", "Q8_0"), "llamacpp avx512 Q8_0": ("llamacpp_avx512", "Q8_0"),
             "openvino int8": ("openvino", "int8")},
    "int4": {"llamacpp Q4_0": ("llamacpp", "Q4_0"), "llamacpp avx512 Q4_0": ("llamacpp_avx512", "Q4_0"),
             "openvino int4": ("openvino", "int4")},
}  # fmt: skip
"""By number of bits and name of the side: the engine, and what it calls the form."""
MEASURED = ("decode_b1", "decode_b8", "decode_b32", "prefill_2048")


def make_groups(native: Library, shape: Shape) -> list[dict[WeightForm, PackedLinears]]:
    """Return the groups of linear layers of a few decoder layers, in each form."""
    chance, groups = torch.Generator().manual_seed(0), []
    sizes = shape.linear_shapes()
    for _, names in itertools.product(range(NUM_LAYERS), LINEAR_GROUPS):
        linears = []
        for outputs, inputs in (sizes[name] for name in names):
            linear = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
            linear.weight.copy_(torch.randn(outputs, inputs, generator=chance) / inputs**0.5)
            linears.append(linear)
        forms = (WeightForm.STORED, *FORMS.values())
        groups.append({form: PackedLinears.pack(native, linears, lambda _: None, form=form) for form in forms})
    return groups


def measure_linears(shape: Shape, row_counts: tuple[int, ...], num_rounds: int) -> dict[str, float]:
    """Return the figures of linear layers by themselves, on two threads."""
    native = load_library()
    assert native is not None, "the kernels are not built"
    native.set_threads(THREADS)
    groups, figures = make_groups(native, shape), dict[str, float]()
    num_bytes = sum(group[WeightForm.STORED].tensors["memory"].nbytes for group in groups)

    def run_form(form: WeightForm, given: dict[int, torch.Tensor], _: int) -> float:
        begun_s = time.perf_counter()
        for group in groups:
            group[form](given[group[form].inputs])
        return time.perf_counter() - begun_s

    for rows in row_counts:
        inputs = {group[WeightForm.STORED].inputs for group in groups}
        given = {size: torch.randn(rows, size).to(torch.bfloat16) for size in inputs}
        sides = {form: partial(run_form, form, given) for form in (WeightForm.STORED, *FORMS.values())}
        times = measure_in_turns(sides, num_rounds, num_warm=1)
        ratios = {name: compute_ratio(times, WeightForm.STORED, form) for name, form in FORMS.items()}
        speed = num_bytes / statistics.median(times[WeightForm.STORED]) / 1e9
        found = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        print(f"{rows:3} rows: {found}; bf16 reads {speed:.1f} GB/s", flush=True)
        figures |= {f"{name}_linear_m{rows}": ratio for name, ratio in ratios.items()}
        figures[f"bf16_gb_per_s_m{rows}"] = speed
    native.set_threads(1)
    return figures


@dataclass(frozen=True)
class LongContexts:
    """An engine whose pool holds the context of some sequences, and the batch that decodes one token of each."""

    engine: Engine
    batch: StepBatch

    @torch.inference_mode()
    def time_step(self, _: int = 0) -> float:
        """Return the seconds of a decode step."""
        begun_s = time.perf_counter()
        self.engine.runner.run_step(self.batch)
        return time.perf_counter() - begun_s


def make_block(layout: BlockLayout) -> torch.Tensor:
    """Return the elements of a block with random vectors."""
    if not layout.is_int8:
        return torch.randn(layout.block_elements).to(layout.dtype)
    block = torch.randint(-127, 128, (layout.block_elements,), dtype=torch.int8)
    for offset, heads, width in layout.parts[1::2]:
        scales = torch.full((heads * layout.block_size,), 0.02)
        block[offset : offset + heads * layout.block_size * width] = scales.view(torch.int8)
    return block


def fill_contexts(model: LoadedModel, settings: EngineSettings, context: int) -> LongContexts:
    """Return an engine whose blocks have random content: a context that was computed would take minutes."""
    blocks_each = context // settings.block_size + 1
    num_bytes = NUM_SEQUENCES * blocks_each * model.layout.block_bytes
    engine = Engine(model, settings.model_copy(update={"pool_mb": num_bytes // 2**20 + 1}))
    engine.storage.data.copy_(make_block(model.layout))
    seqs = []
    for number in range(NUM_SEQUENCES):
        tokens = [(7 * place + number) % model.vocab_size for place in range(context + 1)]
        seqs.append(
            Sequence(str(number), tokens[:-1], sampling=GREEDY, seed=0, max_new_tokens=2, output_token_ids=tokens[-1:])
        )
        seqs[-1].block_table = engine.pool.allocate_blocks(blocks_each)
        seqs[-1].num_computed_tokens = context
    return LongContexts(engine, StepBatch([(seq, 1) for seq in seqs], settings.block_size, model.device))


def measure_long_decode(model: Path, context_tokens: int, num_rounds: int) -> dict[str, float]:
    """Return how many more tokens fit, and how much faster 32 sequences decode at a long context."""
    sides: dict[str, LongContexts] = {}
    for kv_dtype in KV_DTYPES:
        settings = EngineSettings(model=str(model), dtype="bfloat16", kv_dtype=kv_dtype, threads=THREADS)
        sides[kv_dtype] = fill_contexts(accelerate_model(load_model(settings)), settings, context_tokens)
    steps = {name: side.time_step for name, side in sides.items()}
    seconds = measure_in_turns(steps, num_rounds - 1, "long contexts", num_warm=1)
    print_table(seconds, "s")
    stored, int8 = (sides[name].engine.model.layout.block_bytes for name in KV_DTYPES)
    return {"kv_int8_tokens_ratio": stored / int8, "kv_int8_decode_b32_long": compute_ratio(seconds, *KV_DTYPES)}


def count_flips(num_prompts: int) -> float:
    """Return the share of the demo model's greedy answers' tokens, up to the first other one, that are another."""
    answers = []
    for kv_dtype in KV_DTYPES:
        settings = EngineSettings(dtype="bfloat16", kv_dtype=kv_dtype)
        engine = Engine(accelerate_model(load_model(settings)), settings)
        text, seqs = "And the king said unto the people of the land: ", list[Sequence]()
        for number in range(num_prompts):
            ids = engine.model.tokenizer(text * (1 + number % 5) + "Go" * number)["input_ids"]
            seqs.append(Sequence(str(number), ids, sampling=GREEDY, seed=0, max_new_tokens=NUM_FLIP_TOKENS))
        run_sequences(engine, seqs)
        answers.append([seq.output_token_ids for seq in seqs])
    same = [count_same_tokens(one, other) for one, other in zip(*answers, strict=True)]
    num_flips = sum(count < NUM_FLIP_TOKENS for count in same)
    return num_flips / (sum(same) + num_flips)


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
                if (ratio := rounds.results.compute_best_ratio(cell.name)) is not None:
                    figures[f"gguf_{form.lower()}_vs_llamacpp_{cell.name.removeprefix('decode_')}"] = ratio
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
            if (ratio := results.compute_best_ratio(cell, form, tuple(PEERS[form]))) is not None:
                figures[f"{form}_vs_best_peer_{cell.removeprefix('decode_')}"] = ratio
    return figures


def run(given: Arguments) -> dict[str, float]:
    """Measure, draw and return the figures."""
    is_smoke = given.size == "smoke"
    shape = SHAPES[given.choose_size("q06", "small", "smoke")]
    rows, num_linear_rounds = given.choose_size((ROWS, 60), (ROWS[::3], 7), (ROWS[:1], 1))
    figures = measure_linears(SHAPES["smoke" if is_smoke else "q06"], rows, num_linear_rounds)
    figures |= measure_long_decode(write_shape(shape), *given.choose_size((2048, 12), (512, 2), (64, 2)))
    figures["kv_int8_flips"] = count_flips(given.choose_size(40, 40, 2))
    figures |= measure_loads(shape, given.choose_size(6, 2, 2), is_forked=is_smoke)
    figures |= measure_gguf(shape, given.choose_size(5, 3, 1), is_forked=is_smoke)
    cells, num_rounds = given.choose_size((MEASURED, 3), (MEASURED, 1), (MEASURED[:1], 1))
    results = measure(shape, cells, num_rounds, with_peers=given.is_full, is_forked=is_smoke)
    if given.is_full:
        sides = [name for name in results.list_sides() if name != "bf16"]
        charts = {cell: {name: results.compare_sides(cell, name, "bf16") or 0.0 for name in sides} for cell in MEASURED}
        draw_bars("weights", charts, "tokens/s to ours in bf16")
    return figures | compare(results)


if __name__ == "__main__":
    run_benchmark(__doc__, run)
