"""The native kernels by themselves: layers in every form of weights, on every instruction set that this machine has.

Weights as they are stored are held against torch in float64. Those that are made integers are held against the same
arithmetic in numpy, and those in 12 bits against the stored ones, both to the last bit.
"""

import ctypes
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from penstock.config.settings import EngineSettings
from penstock.engine.kernels import build, library
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import (
    GROUP_INPUTS,
    INT4_GROUPS,
    Activation,
    PackedEmbedding,
    PackedLinears,
    WeightForm,
)
from penstock.engine.loading.loading import load_model
from penstock.errors import SettingsError
from tests.draws import draw_cases

F32, BF16 = DTYPES = (torch.float32, torch.bfloat16)
STORED, INT8, INT4, COMPRESSED = WeightForm.STORED, WeightForm.INT8, WeightForm.INT4, WeightForm.COMPRESSED
INTEGERS = (INT8, INT4)
FORMS = [(dtype, form) for form in (STORED, INT8, INT4) for dtype in DTYPES]
KINDS = ("normal", "wide", "odd values")
TOLERANCE = {F32: 2e-6, BF16: 5e-3}
"""Of float64's results, relative to the largest."""
Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler, so no kernels"
)


@pytest.fixture(scope="module")
def built() -> Library:
    native = library.load_library()
    assert native is not None, "there is a compiler, but the library was not built"
    return native


def make_linear(
    outputs: int, inputs: int, dtype: torch.dtype, form: WeightForm = STORED, kind: str = "", *, bias: bool = False
) -> nn.Linear:
    """A random layer: some inputs have large weights where a form rounds; `kind`: how its weights are distributed."""
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)
    if form in INTEGERS:
        linear.weight[:, ::37] *= 12
    if kind:
        linear.weight.normal_(std=0.02)
    if kind == "wide":
        linear.weight *= torch.randn(outputs, inputs).div(2).exp()
    if kind == "odd values":
        for number, value in enumerate((float("inf"), 1e-42, -0.0, 3e38, -1e-30)):
            linear.weight.view(-1)[number * 331 :: 1709] = value
    return linear


def pack(
    native: Library, linears: list[nn.Linear], form: WeightForm = STORED, activation: Activation = Activation.NONE,
    size: int = GROUP_INPUTS,
) -> PackedLinears:  # fmt: skip
    packed = PackedLinears.pack(native, linears, lambda weight: None, activation, form, group_size=size)
    assert packed.form == form
    return packed


def quantize(weight: Floats, form: WeightForm) -> tuple[Floats, Floats]:
    """Return a group's weights as integers, and a scale for each output: [outputs, inputs], [outputs]."""
    at = np.abs(weight).argmax(1)
    most = weight[np.arange(len(weight)), at]
    scale = np.abs(most) / np.float32(127) if form == INT8 else most / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    low, high = (-127, 127) if form == INT8 else (-8, 7)
    return np.clip(np.rint(weight * inverse[:, None]), low, high), scale


def groups_of(inputs: int, size: int = GROUP_INPUTS) -> list[slice]:
    return [slice(first, min(first + size, inputs)) for first in range(0, inputs, size)]


def compute(x: Tensor, linear: nn.Linear, form: WeightForm, size: int = GROUP_INPUTS) -> Tensor:
    """What a layer gives: in float64, or by exact sums of integers, scaled and added group by group in float32."""
    if form == STORED:
        bias = 0 if linear.bias is None else linear.bias.double()
        return x.double() @ linear.weight.double().T + bias
    rows, weight = x.float().numpy(), linear.weight.float().numpy()
    sums = np.zeros((len(rows), len(weight)), np.float32)
    whole, whole_scale = quantize(weight, form) if form == INT8 else (weight, weight[:, 0])
    for group in groups_of(rows.shape[1]):
        top = np.abs(rows[:, group]).max(1)
        inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top != 0)
        inputs, input_scale = np.rint(rows[:, group] * inverse[:, None]), top / np.float32(127)
        for own in groups_of(inputs.shape[1], size):
            at = slice(group.start + own.start, group.start + own.stop)
            codes, scale = (whole[:, at], None) if form == INT8 else quantize(weight[:, at], form)
            part = (inputs[:, own].astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32)
            part *= input_scale[:, None]
            sums += part if scale is None else part * scale
    return torch.from_numpy(sums * whole_scale if form == INT8 else sums)


def compare(mine: Tensor, right: Tensor, form: WeightForm = STORED, times: int = 1) -> None:
    """Of integers every bit is the same, and of others nothing is off by more than the dtype's tolerance."""
    if form in INTEGERS:
        assert torch.equal(mine, right.to(mine.dtype))
        return
    error = (mine.double() - right.double()).abs().max() / right.double().abs().max()
    assert error <= times * TOLERANCE[mine.dtype], f"off by {error}"


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


# Linear layers


SHAPES = [(1, 256), (5, 50), (14, 1024), (33, 1101), (40, 2112), (300, 96), (230, 2180)]


@pytest.mark.parametrize(
    ("dtype", "form", "rows", "inputs"),
    [
        *draw_cases([(*kind, *shape) for kind in FORMS for shape in SHAPES if kind[1] == STORED or kind[0] == F32], 12),
        # In larger ones two weights may be the largest, with opposite signs: either is right.
        *((BF16, form, 9, 384) for form in INTEGERS),
    ],
)
def test_a_group_of_linear_layers_gives_what_each_gives(
    native_or_emulated: Library, dtype: torch.dtype, form: WeightForm, rows: int, inputs: int
) -> None:
    torch.manual_seed(rows)
    linears = [make_linear(n, inputs, dtype, form, bias=n == 70 and form == STORED) for n in (96, 70, 32)]
    x = torch.randn(rows, inputs).to(dtype)
    x[:, 5] *= 40 if form in INTEGERS else 1
    for out, linear in zip(pack(native_or_emulated, linears, form)(x), linears, strict=True):
        compare(out, compute(x, linear, form), form)


@pytest.mark.parametrize(
    ("dtype", "rows", "inputs"), [*((F32, *shape) for shape in draw_cases(SHAPES, 3)), (BF16, 9, 384)]
)
@pytest.mark.parametrize("size", INT4_GROUPS[:-1])
def test_in_4_bits_smaller_groups_have_scales_of_their_own(
    native: Library, size: int, dtype: torch.dtype, rows: int, inputs: int
) -> None:
    torch.manual_seed(rows)
    linears = [make_linear(n, inputs, dtype, INT4) for n in (96, 70, 32)]
    x = torch.randn(rows, inputs).to(dtype)
    x[:, 5] *= 40
    group = pack(native, linears, INT4, size=size)
    for out, linear in zip(group(x), linears, strict=True):
        compare(out, compute(x, linear, INT4, size), INT4)
    again = PackedLinears.restore(native, group.describe(), group.tensors)
    assert all(torch.equal(*pair) for pair in zip(group(x), again(x), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", draw_cases([64, 1100, 2112], 1))
def test_in_12_bits_products_have_the_bits_of_stored_weights(native: Library, kind: str, inputs: int) -> None:
    torch.manual_seed(inputs)
    linears = [make_linear(n, inputs, BF16, kind=kind) for n in (70, 40)]
    stored, compressed = (pack(native, linears, form) for form in (STORED, COMPRESSED))
    has_exceptions = (
        len(compressed.tensors.get("exceptions", ())) > compressed.packed.num_panels
    )  # each list has an end
    assert has_exceptions or compressed.form == STORED or kind == "normal"
    for threads in (1, 2):
        native.set_threads(threads)
        for rows in (1, 2, 3, 5, 8, 13, 14, 15, 29, 64, 230):
            x = torch.randn(rows, inputs).to(BF16)
            for right, mine in zip(stored(x), compressed(x), strict=True):
                assert have_same_bits(right, mine), f"{rows} rows on {threads} threads"


@pytest.mark.parametrize(
    ("dtype", "form", "inputs"),
    [*draw_cases([(dtype, STORED, inputs) for dtype in DTYPES for inputs in (96, 1100, 2048)], 2),
     (BF16, INT8, 1100), (BF16, INT4, 1100)],
)  # fmt: skip
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    native_or_emulated: Library, dtype: torch.dtype, form: WeightForm, inputs: int
) -> None:
    torch.manual_seed(0)
    group = pack(native_or_emulated, [make_linear(130, inputs, dtype, form)], form)
    x = torch.randn(500, inputs).to(dtype)
    native_or_emulated.set_threads(1)
    alone = torch.cat([group(row[None])[0] for row in x])
    for threads in (1, 2, 3) if form == STORED else (1, 3):
        native_or_emulated.set_threads(threads)
        for size in (2, 7, 16, 31, 64, 500) if form == STORED else (2, 15, 31, 500):
            batched = torch.cat([group(part)[0] for part in torch.split(x, size)])
            assert torch.equal(batched, alone), f"batches of {size} on {threads} threads"


@pytest.mark.parametrize(("dtype", "form"), [*FORMS, (BF16, COMPRESSED)])
@pytest.mark.parametrize(
    ("activation", "function"),
    [(Activation.SILU, silu), (Activation.GELU_TANH, partial(gelu, approximate="tanh"))],
    ids=["silu", "gelu"],
)
def test_gate_and_up_are_multiplied_as_the_modules_do(
    native_or_emulated: Library, dtype: torch.dtype, form: WeightForm, activation: Activation, function: nn.Module
) -> None:
    torch.manual_seed(1)
    kind = "wide" if form == COMPRESSED else ""
    gate, up = (make_linear(72, 256, dtype, form, kind, bias=form == STORED) for _ in range(2))
    x = 3 * torch.randn(37, 256).to(dtype)
    (out,) = pack(native_or_emulated, [gate, up], form, activation)(x)
    if form == COMPRESSED:
        assert have_same_bits(out, pack(native_or_emulated, [gate, up], STORED, activation)(x)[0])
        return
    gate_sum, up_sum = (compute(x, one, form).to(dtype) for one in (gate, up))
    compare(out, function(gate_sum).double() * up_sum.double(), times=2)


@pytest.mark.parametrize(
    ("dtype", "form", "kind"), [*((*form, "") for form in FORMS), *((BF16, COMPRESSED, kind) for kind in KINDS)]
)
def test_embeddings_are_what_the_packed_weights_stand_for(
    native: Library, dtype: torch.dtype, form: WeightForm, kind: str
) -> None:
    torch.manual_seed(2)
    linear = make_linear(77, 300 if kind else 150, dtype, form, kind)
    ids, right = torch.randint(77, (3, 20)), linear.weight
    found = PackedEmbedding(native, pack(native, [linear], form))(ids)
    if form in INTEGERS:
        weight = linear.weight.float().numpy()
        parts = [slice(0, 150)] if form == INT8 else groups_of(150)
        rounded = (quantize(weight[:, at], form) for at in parts)
        right = torch.from_numpy(np.hstack([codes * scale[:, None] for codes, scale in rounded])).to(dtype)
        assert torch.equal(found, right[ids])
    else:
        assert have_same_bits(found, right[ids])


@pytest.mark.parametrize(
    ("form", "low", "high", "dtype", "size"),  # bfloat16 has fewer bits than the integers of INT8
    [*((INT4, *most, *rest) for most, *rest in draw_cases(product(((-8, 7), (-5, 6)), DTYPES, INT4_GROUPS), 6)),
     (INT8, -128, 99, F32, 300)],
)  # fmt: skip
def test_weights_that_were_integers_keep_them(
    native: Library, form: WeightForm, low: int, high: int, dtype: torch.dtype, size: int
) -> None:
    chance = np.random.default_rng(5)
    codes = chance.integers(low, high, (77, 300), endpoint=True).astype(np.float32)
    codes[:, ::size] = low
    scales = (chance.random((77, -(-300 // size)), np.float32) + np.float32(0.1)).repeat(size, 1)[:, :300]
    linear = nn.Linear(300, 77, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.from_numpy(codes * scales))
    packed = pack(native, [linear.to(dtype)], form, size=size if form == INT4 else GROUP_INPUTS)
    found = PackedEmbedding(native, packed)(torch.arange(77)).float().numpy()
    assert np.allclose(found, codes * scales, rtol=1e-6 if dtype == F32 else 2**-7, atol=0)


@pytest.mark.parametrize(("form", "share"), [(INT8, 0.503), (INT4, 0.267), (COMPRESSED, 0.755)])
def test_how_much_of_the_memory_is_left(native: Library, form: WeightForm, share: float) -> None:
    linear = make_linear(512, 2048, BF16, form, "normal" if form == COMPRESSED else "")
    packed, stored = (
        sum(part.nbytes for part in pack(native, [linear], one).tensors.values()) for one in (form, STORED)
    )
    assert packed / stored < share


@pytest.mark.parametrize("form", INTEGERS)
def test_zeros_tiny_values_and_those_that_are_not_finite(native: Library, form: WeightForm) -> None:
    linear, x = make_linear(40, 300, F32, form), torch.randn(3, 300)
    linear.weight[3] = 0
    linear.weight[4] = 1e-44
    group = pack(native, [linear], form)
    right = group(x)[0]
    assert not right[:, 3:5].any()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[1, 200] = bad
        found = group(x)[0]
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], right[[0, 2]])
    for tiny in (0.0, 1e-44):
        assert not group(torch.full((2, 300), tiny))[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_cannot_be_compressed_stays_as_it_is(native: Library, dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 64, bias=False).to(dtype).requires_grad_(False)
    if dtype == BF16:  # all high bytes are as frequent
        linear.weight.view(torch.int16).random_(-(2**15), 2**15)
    packed = PackedLinears.pack(native, [linear], lambda weight: None, form=COMPRESSED)
    assert packed.form == STORED
    if dtype == F32:
        x = torch.randn(3, 64)
        compare(packed(x)[0], compute(x, linear, STORED))


# Norms and rotary embeddings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("size", [128, 40, 7])
def test_the_norm_is_the_root_mean_square_one(native: Library, dtype: torch.dtype, plus_one: bool, size: int) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(9, 4, size).to(dtype), torch.randn(size).to(dtype)
    out = NativeNorm(native, weight, 1e-6, plus_one=plus_one)(x)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    compare(out, normed * (1 + weight.double()) if plus_one else normed.to(dtype).double() * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_is_bit_for_bit_what_the_modules_compute(native: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    rows, heads, size = 11, 3, 40
    x = torch.randn(rows, heads, size).to(dtype)
    cos, sin = torch.randn(2, rows, size).to(dtype)
    turned = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
    right = x * cos[:, None] + turned * sin[:, None]
    mine = x.clone()
    args = library.RopeArgs(
        mine.data_ptr(), heads * size, size, cos.data_ptr(), sin.data_ptr(), rows, heads, size, dtype.itemsize
    )
    native.rope(ctypes.addressof(args))
    assert torch.equal(mine, right)


# The library


def test_two_callers_at_once_both_get_their_results(built: Library) -> None:
    torch.manual_seed(5)
    built.set_threads(2)
    groups = [pack(built, [make_linear(640, 512, F32)]) for _ in range(2)]
    x = torch.randn(20, 512)
    right = [group(x)[0] for group in groups]

    def call(index: int) -> bool:
        return all(torch.equal(groups[index](x)[0], right[index]) for _ in range(200))

    with ThreadPoolExecutor(2) as pool:
        are_right = list(pool.map(call, range(2)))
    built.set_threads(1)
    assert are_right == [True, True]


def test_the_setting_chooses_the_instruction_set(built: Library) -> None:
    assert {"auto", *build.X86, "plain", library.TORCH} == set(get_args(EngineSettings.model_fields["isa"].annotation))
    built.select_isa("")
    best = built.isa
    try:
        load_model(EngineSettings(isa="plain"))
        assert built.isa == "plain"
    finally:
        load_model(EngineSettings())
    assert built.isa == best


def test_an_instruction_set_that_is_not_here_is_an_error_of_the_setting(
    built: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = built.isa
    with pytest.raises(SettingsError, match="no_such_set"):
        built.select_isa("no_such_set")
    monkeypatch.setattr(built, "_select", lambda isa: None)
    with pytest.raises(SettingsError, match=r"^PENSTOCK_ENGINE_ISA=amx: this processor .* set `auto`"):
        load_model(EngineSettings(isa="amx"))
    assert built.isa == used
    monkeypatch.setattr("penstock.engine.loading.description.load_library", lambda: None)
    with pytest.raises(SettingsError, match=r"^PENSTOCK_ENGINE_ISA=amx needs the native kernels"):
        load_model(EngineSettings(isa="amx"))


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        build.build_library(tmp_path / "lib.so")
    assert not list(tmp_path.iterdir())
