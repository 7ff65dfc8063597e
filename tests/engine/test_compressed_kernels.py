"""bf16 weights in 12 bits: the same bits as those of the stored weights, on every instruction set."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.kernels import build, library
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.packed import Activation, PackedEmbedding, PackedLinears, WeightForm
from penstock.errors import SettingsError

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


def make_linear(outputs: int, inputs: int, kind: str = "normal") -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False).to(torch.bfloat16).requires_grad_(False)
    chance = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=chance) * 0.02
    if kind == "wide":
        weight *= torch.randn(outputs, inputs, generator=chance).div(2).exp()
    if kind == "odd values":
        for number, value in enumerate((float("inf"), 1e-42, -0.0, 3e38, -1e-30)):
            weight.view(-1)[number * 331 :: 1709] = value
    linear.weight.copy_(weight)
    return linear


def pack(native: Library, linears: list[nn.Linear], form: WeightForm, **given: Activation) -> PackedLinears:
    packed = PackedLinears(native, linears, lambda weight: None, form=form, **given)
    assert packed.form == form
    return packed


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("kind", ["normal", "wide", "odd values"])
@pytest.mark.parametrize("inputs", [64, 1100, 2112])
def test_products_have_the_bits_of_stored_weights(native: Library, kind: str, inputs: int) -> None:
    torch.manual_seed(inputs)
    linears = [make_linear(n, inputs, kind) for n in (70, 40)]
    stored, compressed = (pack(native, linears, form) for form in (WeightForm.STORED, WeightForm.COMPRESSED))
    assert compressed.num_exceptions > 0 or kind == "normal"
    for threads in (1, 2):
        native.set_threads(threads)
        for rows in (1, 2, 3, 5, 8, 13, 14, 15, 29, 64, 230):
            x = torch.randn(rows, inputs).to(torch.bfloat16)
            for right, mine in zip(stored(x), compressed(x), strict=True):
                assert have_same_bits(right, mine), f"{rows} rows on {threads} threads"


def test_gate_and_up_are_multiplied_alike(native: Library) -> None:
    torch.manual_seed(1)
    linears, x = [make_linear(72, 256, "wide"), make_linear(72, 256)], torch.randn(5, 256).to(torch.bfloat16)
    forms = (WeightForm.STORED, WeightForm.COMPRESSED)
    (right,), (mine,) = (pack(native, linears, form, activation=Activation.SILU)(x) for form in forms)
    assert have_same_bits(right, mine)


@pytest.mark.parametrize("kind", ["normal", "wide", "odd values"])
def test_embeddings_are_read_back_bit_for_bit(native: Library, kind: str) -> None:
    linear = make_linear(77, 300, kind)
    ids = torch.arange(77)
    found = PackedEmbedding(native, pack(native, [linear], WeightForm.COMPRESSED))(ids)
    assert have_same_bits(found, linear.weight)


def test_three_quarters_of_the_memory_are_left(native: Library) -> None:
    linear = make_linear(512, 2048)
    stored, compressed = (pack(native, [linear], form) for form in (WeightForm.STORED, WeightForm.COMPRESSED))
    assert compressed.num_bytes / stored.num_bytes < 0.755


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_compressed_stays_as_it_is(native: Library, dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 64, bias=False).to(dtype).requires_grad_(False)
    if dtype == torch.bfloat16:  # all high bytes are as frequent
        linear.weight.view(torch.int16).random_(-(2**15), 2**15)
    packed = PackedLinears(native, [linear], lambda weight: None, form=WeightForm.COMPRESSED)
    assert packed.form == WeightForm.STORED
    if dtype == torch.float32:
        x = torch.randn(3, 64)
        assert torch.allclose(packed(x)[0], linear(x), atol=1e-5)
