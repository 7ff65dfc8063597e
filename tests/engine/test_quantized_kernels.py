"""Linear layers with weights of 8 and 4 bits, against the same arithmetic in numpy: the same bits everywhere."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.engine.kernels import build, library
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.packed import GROUP_INPUTS, Activation, PackedEmbedding, PackedLinears, WeightForm
from penstock.errors import SettingsError

FORMS = [WeightForm.INT8, WeightForm.INT4]
Floats = NDArray[np.float32]

pytestmark = pytest.mark.skipif(library.load_library() is None, reason="no compiler, so no kernels")


@pytest.fixture(params=list(build.instruction_sets()))
def native(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = library.load_library()
    assert found is not None
    try:
        found.select_isa(request.param)
    except SettingsError:
        pytest.skip(f"this processor has no {request.param}")
    yield found
    found.select_isa("")
    found.set_threads(1)


def make_linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False).to(dtype).requires_grad_(False)
    linear.weight[:, ::37] *= 12
    return linear


def pack(native: Library, linears: list[nn.Linear], form: WeightForm, **given: Activation) -> PackedLinears:
    return PackedLinears(native, linears, lambda weight: None, form=form, **given)


def quantize(weight: Floats, form: WeightForm) -> tuple[Floats, Floats]:
    """Return a group's weights as integers, and a scale for each output: [outputs, inputs], [outputs]."""
    at = np.abs(weight).argmax(1)
    most = weight[np.arange(len(weight)), at]
    scale = np.abs(most) / np.float32(127) if form == WeightForm.INT8 else most / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    low, high = (-127, 127) if form == WeightForm.INT8 else (-8, 7)
    return np.clip(np.rint(weight * inverse[:, None]), low, high), scale


def groups_of(inputs: int) -> list[slice]:
    return [slice(first, min(first + GROUP_INPUTS, inputs)) for first in range(0, inputs, GROUP_INPUTS)]


def compute(x: Floats, weight: Floats, form: WeightForm) -> Floats:
    """Return the product as it is defined: exact sums of integers, scaled and added group by group in float32."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    whole, whole_scale = quantize(weight, form) if form == WeightForm.INT8 else (weight, weight[:, 0])
    for group in groups_of(x.shape[1]):
        top = np.abs(x[:, group]).max(1)
        inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top != 0)
        inputs, input_scale = np.rint(x[:, group] * inverse[:, None]), top / np.float32(127)
        codes, scale = (whole[:, group], None) if form == WeightForm.INT8 else quantize(weight[:, group], form)
        part = (inputs.astype(np.int64) @ codes.astype(np.int64).T).astype(np.float32) * input_scale[:, None]
        sums += part if scale is None else part * scale
    return sums * whole_scale if form == WeightForm.INT8 else sums


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 256), (3, 50), (14, 640), (17, 130), (230, 2180)])
def test_products_are_those_of_integers_bit_for_bit(native: Library, form: WeightForm, rows: int, inputs: int) -> None:
    torch.manual_seed(rows)
    linears, x = [make_linear(n, inputs) for n in (70, 32)], torch.randn(rows, inputs)
    x[:, 5] *= 40
    outs = pack(native, linears, form)(x)
    for out, linear in zip(outs, linears, strict=True):
        assert np.array_equal(out.numpy(), compute(x.numpy(), linear.weight.numpy(), form))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(native: Library, form: WeightForm) -> None:
    torch.manual_seed(0)
    group = pack(native, [make_linear(130, 1100, torch.bfloat16)], form)
    x = torch.randn(240, 1100).to(torch.bfloat16)
    alone = torch.cat([group(row[None])[0] for row in x])
    for threads in (1, 3):
        native.set_threads(threads)
        for size in (2, 15, 31, 240):
            assert torch.equal(torch.cat([group(part)[0] for part in torch.split(x, size)]), alone)


def test_all_instruction_sets_give_the_same_bits(native: Library) -> None:
    """Also in 16 bits, and where gate and up are multiplied the sums are the same."""
    torch.manual_seed(4)
    linear, x = make_linear(96, 384, torch.bfloat16), torch.randn(9, 384).to(torch.bfloat16)
    for form in FORMS:
        expected = torch.from_numpy(compute(x.float().numpy(), linear.weight.float().numpy(), form)).to(torch.bfloat16)
        assert torch.equal(pack(native, [linear], form)(x)[0], expected)


@pytest.mark.parametrize("form", FORMS)
def test_gate_and_up_lie_side_by_side(native: Library, form: WeightForm) -> None:
    torch.manual_seed(1)
    gate, up, x = make_linear(72, 256), make_linear(72, 256), torch.randn(5, 256)
    (out,) = pack(native, [gate, up], form, activation=Activation.SILU)(x)
    sums = [torch.from_numpy(compute(x.numpy(), one.weight.numpy(), form)) for one in (gate, up)]
    assert torch.allclose(out, nn.functional.silu(sums[0]) * sums[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_what_the_integers_stand_for(native: Library, form: WeightForm, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    linear = make_linear(77, 150, dtype)
    weight = linear.weight.float().numpy()
    ids = torch.randint(77, (3, 20))
    found = PackedEmbedding(native, pack(native, [linear], form))(ids)
    parts = [slice(0, 150)] if form == WeightForm.INT8 else groups_of(150)
    stood_for = np.hstack([codes * scale[:, None] for codes, scale in (quantize(weight[:, at], form) for at in parts)])
    assert torch.equal(found, torch.from_numpy(stood_for).to(dtype)[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "low", "high"), [(WeightForm.INT4, -8, 7), (WeightForm.INT4, -5, 6), (WeightForm.INT8, -128, 99)]
)
def test_weights_that_were_integers_keep_them(
    native: Library, form: WeightForm, low: int, high: int, dtype: torch.dtype
) -> None:
    if (form, dtype) == (WeightForm.INT8, torch.bfloat16):
        pytest.skip("bfloat16 has fewer bits than these integers")
    chance = np.random.default_rng(5)
    codes = chance.integers(low, high, (77, 300), endpoint=True).astype(np.float32)
    codes[:, [0, 128, 256]] = low
    scales = chance.random((77, 1 if form == WeightForm.INT8 else 3), np.float32) + np.float32(0.1)
    scales = scales.repeat(300 if form == WeightForm.INT8 else GROUP_INPUTS, 1)[:, :300]
    linear = nn.Linear(300, 77, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.from_numpy(codes * scales))
    found = PackedEmbedding(native, pack(native, [linear.to(dtype)], form))(torch.arange(77)).float().numpy()
    assert np.allclose(found, codes * scales, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)


def test_weights_take_a_half_and_a_quarter_of_the_memory(native: Library) -> None:
    linear = make_linear(256, 1024, torch.bfloat16)
    stored, int8, int4 = (pack(native, [linear], form).num_bytes for form in (WeightForm.STORED, *FORMS))
    assert int8 / stored < 0.503
    assert int4 / stored < 0.267


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_results_that_are_not_numbers(
    native: Library, form: WeightForm, bad: float
) -> None:
    linear, x = make_linear(40, 300), torch.randn(3, 300)
    right = pack(native, [linear], form)(x)[0]
    x[1, 200] = bad
    found = pack(native, [linear], form)(x)[0]
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], right[[0, 2]])


@pytest.mark.parametrize("form", FORMS)
def test_zeros_and_tiny_values_are_zero(native: Library, form: WeightForm) -> None:
    linear = make_linear(40, 300)
    linear.weight[3] = 0
    linear.weight[4] = 1e-44
    x: Tensor = torch.zeros(2, 300)
    x[1] = 1e-44
    group = pack(native, [linear], form)
    assert not group(x)[0].any()
    assert not group(torch.randn(2, 300))[0][:, 3:5].any()
