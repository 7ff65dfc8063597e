"""The native kernels by themselves, on every instruction set that this machine has, against torch in float64."""

import ctypes
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from penstock.config.settings import EngineSettings
from penstock.engine.kernels import build, library
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import Activation, PackedEmbedding, PackedLinears
from penstock.engine.loading import load_model
from penstock.errors import SettingsError

HEADER = Path(__file__).parent / "emulated_tiles.h"
EMULATED = "emulated tiles"
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3}

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no compiler, so no kernels"
)


def _here(native: Library) -> list[str]:
    names = []
    for name in build.instruction_sets():
        try:
            native.select_isa(name)
        except SettingsError:
            continue
        names.append(name)
    return names


@pytest.fixture(scope="module")
def built() -> Library:
    native = library.load_library()
    assert native is not None, "there is a compiler, but the library was not built"
    return native


@pytest.fixture(params=[*build.instruction_sets(), EMULATED])
def native(
    request: pytest.FixtureRequest, built: Library, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Library]:
    """The library on each instruction set; and its code for tiles, with tiles in plain C++."""
    here = _here(built)
    if request.param == EMULATED:
        if "avx512_bf16" not in here:
            pytest.skip("the emulation needs avx512_bf16")
        yield _emulated(tmp_path_factory)
        return
    if request.param not in here:
        pytest.skip(f"this processor has no {request.param}")
    built.select_isa(request.param)
    yield built
    built.select_isa("")
    built.set_threads(1)


def _emulated(factory: pytest.TempPathFactory) -> Library:
    path = factory.getbasetemp() / "libemulated.so"
    if not path.exists():
        flags = [*build.instruction_sets()["amx"], "-O1", "-include", str(HEADER)]  # it compiles in half the time
        build.build_library(path, {"avx512_bf16": flags})
    return Library(ctypes.CDLL(str(path)))


def _linear(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def _keep(weight: Tensor) -> None:
    pass


def _assert_close(mine: Tensor, right: Tensor) -> None:
    error = (mine.double() - right).abs().max() / right.abs().max()
    assert error <= TOLERANCE[mine.dtype], f"off by {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (5, 50), (14, 1024), (33, 1101), (40, 2112), (300, 96)])
def test_a_group_of_linear_layers_gives_what_each_gives(
    native: Library, dtype: torch.dtype, rows: int, inputs: int
) -> None:
    torch.manual_seed(rows)
    linears = [_linear(n, inputs, dtype, bias=n == 70) for n in (96, 70, 32)]
    x = torch.randn(rows, inputs).to(dtype)
    outs = PackedLinears(native, linears, _keep)(x)
    for out, linear in zip(outs, linears, strict=True):
        bias = 0 if linear.bias is None else linear.bias.double()
        _assert_close(out, x.double() @ linear.weight.double().T + bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [96, 1100, 2048])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    native: Library, dtype: torch.dtype, inputs: int
) -> None:
    torch.manual_seed(0)
    group = PackedLinears(native, [_linear(130, inputs, dtype)], _keep)
    x = torch.randn(500, inputs).to(dtype)
    native.set_threads(1)
    alone = torch.cat([group(row[None])[0] for row in x])
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for size in (2, 7, 16, 31, 64, 500):
            batched = torch.cat([group(part)[0] for part in torch.split(x, size)])
            assert torch.equal(batched, alone), f"batches of {size} on {threads} threads"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "function"), [(Activation.SILU, silu), (Activation.GELU_TANH, lambda x: gelu(x, approximate="tanh"))]
)
def test_gate_and_up_are_multiplied_as_the_modules_do(
    native: Library, dtype: torch.dtype, activation: Activation, function: nn.Module
) -> None:
    torch.manual_seed(1)
    gate, up = (_linear(72, 128, dtype, bias=True) for _ in range(2))
    x = 3 * torch.randn(37, 128).to(dtype)
    (out,) = PackedLinears(native, [gate, up], _keep, activation)(x)
    gate_sum, up_sum = ((x.double() @ m.weight.double().T + m.bias.double()).to(dtype) for m in (gate, up))
    right = function(gate_sum).double() * up_sum.double()
    error = (out.double() - right).abs().max() / right.abs().max()
    assert error <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_read_back_from_packed_weights_bit_for_bit(native: Library, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    linear = _linear(77, 51, dtype)
    embedding = PackedEmbedding(native, PackedLinears(native, [linear], _keep))
    ids = torch.randint(77, (3, 20))
    assert torch.equal(embedding(ids), linear.weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("size", [128, 40, 7])
def test_the_norm_is_the_root_mean_square_one(native: Library, dtype: torch.dtype, plus_one: bool, size: int) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(9, 4, size).to(dtype), torch.randn(size).to(dtype)
    out = NativeNorm(native, weight, 1e-6, plus_one=plus_one)(x)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    right = normed * (1 + weight.double()) if plus_one else normed.to(dtype).double() * weight.double()
    _assert_close(out, right)


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


def test_two_callers_at_once_both_get_their_results(built: Library) -> None:
    torch.manual_seed(5)
    built.set_threads(2)
    linears = [_linear(640, 512, torch.float32) for _ in range(2)]
    groups = [PackedLinears(built, [linear], _keep) for linear in linears]
    x = torch.randn(20, 512)
    right = [group(x)[0] for group in groups]
    wrong: list[int] = []

    def call(index: int) -> None:
        wrong.extend(index for _ in range(200) if not torch.equal(groups[index](x)[0], right[index]))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    built.set_threads(1)
    assert not wrong


def test_the_setting_chooses_the_instruction_set(built: Library) -> None:
    assert {"auto", *build.X86, "plain"} == set(get_args(EngineSettings.model_fields["isa"].annotation))
    best = _here(built)[0]
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
    monkeypatch.setattr(built, "_select", lambda isa: None)
    with pytest.raises(SettingsError, match=r"^PENSTOCK_ENGINE_ISA=amx: this processor .* set `auto`"):
        load_model(EngineSettings(isa="amx"))
    assert built.isa == used
    monkeypatch.setattr("penstock.engine.loading.load_library", lambda: None)
    with pytest.raises(SettingsError, match=r"^PENSTOCK_ENGINE_ISA=amx needs the native kernels"):
        load_model(EngineSettings(isa="amx"))


def test_an_unknown_instruction_set_is_an_error(built: Library) -> None:
    used = built.isa
    with pytest.raises(SettingsError, match="no_such_set"):
        built.select_isa("no_such_set")
    assert built.isa == used


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        build.build_library(tmp_path / "lib.so")
    assert not list(tmp_path.iterdir())
