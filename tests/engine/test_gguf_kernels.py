"""Products with the blocks of GGUF files, on every instruction set that this machine has.

The blocks' values are those of `unpack_blocks`, which `test_gguf.py` holds against the format. Inputs become integers
as those of the other forms do, and products with them are held against float64.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.engine.gguf.gguf_file import BLOCKS, GgufTensor
from penstock.engine.gguf.gguf_weights import GgufMatrix, GgufSlice, unpack_blocks
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.packed import (
    GGUF_FORMS,
    GROUP_INPUTS,
    Activation,
    PackedEmbedding,
    PackedLinears,
    WeightForm,
)
from tests.engine.gguf_files import make_blocks
from tests.engine.helpers import needs_kernels

pytestmark = needs_kernels
F32, BF16 = torch.float32, torch.bfloat16
MAX_ERROR = {F32: 2e-6, BF16: 5e-3}
"""Of float64's results with the same integers, relative to the largest."""


def make_matrix(kind: str, outputs: int, inputs: int, seed: int = 0, rotary_heads: int = 0) -> GgufMatrix:
    content = make_blocks(kind, outputs * inputs // BLOCKS[kind][0], np.random.default_rng(seed))
    tensor = GgufTensor(kind, [outputs, inputs], 0, len(content))
    return GgufMatrix(GgufSlice(torch.frombuffer(bytearray(content), dtype=torch.uint8), tensor), kind, rotary_heads)


def read_values(matrix: GgufMatrix) -> Tensor:
    """What the matrix stands for, in transformers' order of rows."""
    return unpack_blocks(matrix.read_rows(matrix.find_rows()), matrix.kind).view(matrix.part.get_shape())


def pack_matrices(
    native: Library, matrices: list[GgufMatrix], dtype: torch.dtype, activation: Activation = Activation.NONE
) -> PackedLinears:
    linears = []
    for matrix in matrices:
        outputs, inputs = matrix.part.get_shape()
        linear = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype).requires_grad_(False)
        linears.append(linear)
    return PackedLinears.pack(native, linears, lambda weight: None, activation, WeightForm.GGUF, matrices)


def round_inputs(x: Tensor) -> Tensor:
    """What the integers that rows become stand for, in float64."""
    parts = []
    for part in torch.split(x.float(), GROUP_INPUTS, dim=1):
        top = part.abs().amax(1, keepdim=True)
        parts.append((part * torch.full_like(top, 127).div(top)).round().double() * (top / 127).double())
    return torch.cat(parts, dim=1)


def compare_products(mine: Tensor, x: Tensor, matrix: GgufMatrix) -> None:
    inputs, values = round_inputs(x), read_values(matrix).double().T
    right = inputs @ values
    largest = max(right.abs().max(), 0.01 * (inputs.abs() @ values.abs()).max())
    error = (mine.double() - right).abs().max() / (largest + 1e-30)
    assert error <= MAX_ERROR[mine.dtype], f"{matrix.kind} is off by {error}"


@pytest.mark.parametrize(("dtype", "rows"), [(F32, 1), (F32, 5), (F32, 14), (F32, 33), (F32, 230), (BF16, 9)])
@pytest.mark.parametrize("inputs", [256, 2560])
def test_layers_of_all_kinds_together_give_what_their_blocks_stand_for(
    native: Library, dtype: torch.dtype, rows: int, inputs: int
) -> None:
    matrices = [make_matrix(kind, 40 + 32 * place, inputs, place) for place, kind in enumerate(GGUF_FORMS)]
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs).to(dtype)
    for out, matrix in zip(pack_matrices(native, matrices, dtype)(x), matrices, strict=True):
        compare_products(out, x, matrix)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0"])
def test_inputs_need_not_be_whole_groups_of_128(native: Library, kind: str) -> None:
    matrix = make_matrix(kind, 96, 576 + 32)
    x = torch.randn(7, 608)
    compare_products(pack_matrices(native, [matrix], F32)(x)[0], x, matrix)


@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(native: Library, kind: str) -> None:
    group = pack_matrices(native, [make_matrix(kind, 130, 1280)], F32)
    x = torch.randn(300, 1280)
    native.set_threads(1)
    alone = torch.cat([group(row[None])[0] for row in x])
    for threads in (1, 3):
        native.set_threads(threads)
        for size in (2, 7, 15, 31, 300):
            batched = torch.cat([group(part)[0] for part in torch.split(x, size)])
            assert torch.equal(batched, alone), f"batches of {size} on {threads} threads"


@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_the_bounds_of_all_numbers_fit(native: Library, kind: str) -> None:
    """The largest codes times the largest inputs, all of one sign, overflow nothing on the way to a sum."""
    matrix = make_matrix(kind, 32, 256)
    stored = matrix.part[...].view(32, -1, BLOCKS[kind][1])
    places = slice(208, 210) if kind == "Q6_K" else slice(0, 4 if kind in ("Q4_K", "Q5_K") else 2)
    halves = stored[..., places].clone()
    for byte in (0xFF, 0x00, 0x7F, 0x80):
        stored.fill_(byte)
        stored[..., places] = halves
        for x in (torch.ones(3, 256), -torch.ones(3, 256), torch.tensor([1.0, -1.0]).repeat(3, 128)):
            compare_products(pack_matrices(native, [matrix], F32)(x)[0], x, matrix)


def test_gate_and_up_share_panels(native: Library) -> None:
    gate, up = make_matrix("Q4_K", 72, 256, 1), make_matrix("Q4_K", 72, 256, 2)
    x = 3 * torch.randn(37, 256)
    (out,) = pack_matrices(native, [gate, up], F32, Activation.SILU)(x)
    gated, given = (round_inputs(x) @ read_values(one).double().T for one in (gate, up))
    right = torch.nn.functional.silu(gated) * given
    assert (out.double() - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", GGUF_FORMS)
def test_embeddings_are_the_values_of_the_blocks(native: Library, kind: str, dtype: torch.dtype) -> None:
    matrix = make_matrix(kind, 80, 256)
    ids = torch.randint(80, (3, 20))
    found = PackedEmbedding(native, pack_matrices(native, [matrix], dtype))(ids)
    assert torch.equal(found, read_values(matrix).to(dtype)[ids])


def test_rows_of_rotary_heads_are_put_in_order(native: Library) -> None:
    matrix = make_matrix("Q8_0", 128, 256, rotary_heads=4)
    plain = unpack_blocks(matrix.part[...], "Q8_0").view(4, 16, 2, 256)
    assert torch.equal(read_values(matrix), plain.transpose(1, 2).reshape(128, 256))
    x = torch.randn(2, 256)
    compare_products(pack_matrices(native, [matrix], F32)(x)[0], x, matrix)


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_K", 4.75), ("Q5_K", 6.75),
                                            ("Q6_K", 6.625), ("Q5_0", 6.5)])  # fmt: skip
def test_how_much_of_the_memory_is_left(native: Library, kind: str, bits: float) -> None:
    group = pack_matrices(native, [make_matrix(kind, 512, 1024)], F32)
    assert sum(group.tensors[name].nbytes for name in ("kinds", "places")) < 200
    assert group.tensors["memory"].nbytes == bits / 8 * 512 * 1024
