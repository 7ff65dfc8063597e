"""The native experts of a mixture, against each expert by itself: the same bits in every form and any batch."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from penstock.engine.kernels.library import Library
from penstock.engine.kernels.packed import Activation, PackedLinears, WeightForm, make_linear
from penstock.engine.model.experts import Gate, NativeExperts

NUM_EXPERTS, TOP_K = 7, 3
KINDS = [
    (torch.float32, WeightForm.STORED), (torch.bfloat16, WeightForm.STORED), (torch.bfloat16, WeightForm.COMPRESSED),
    (torch.bfloat16, WeightForm.INT8), (torch.float32, WeightForm.INT4),
]  # fmt: skip
BOUNDED = Gate(Activation.BOUNDED_SWISH, limit=1.5, slope=1.7)


class Mixture:
    """Random experts, their inputs, and native ones in a form."""

    def __init__(
        self, native: Library, dtype: torch.dtype, form: WeightForm, gate: Gate, sizes: tuple[int, int]
    ) -> None:
        torch.manual_seed(0)
        inputs, intermediate = sizes
        self.gate, self.form, self._native = gate, form, native
        self.gate_up = [self._make(intermediate, inputs, dtype) for _ in range(2 * NUM_EXPERTS)]
        self.down = [self._make(inputs, intermediate, dtype) for _ in range(NUM_EXPERTS)]
        self.experts = NativeExperts(native, self.pack(self.gate_up, gate), self.pack(self.down), gate)

    @staticmethod
    def _make(outputs: int, inputs: int, dtype: torch.dtype) -> nn.Linear:
        return make_linear((torch.randn(outputs, inputs) / inputs**0.5).to(dtype), torch.randn(outputs).to(dtype))

    def pack(self, linears: list[nn.Linear], gate: Gate | None = None) -> PackedLinears:
        activation = Activation.NONE if gate is None else gate.activation
        packed = PackedLinears.pack(self._native, linears, lambda weight: None, activation, self.form)
        assert packed.form == self.form
        return packed


def choose(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP_K] for _ in range(rows)])
    return chosen, torch.rand(rows, TOP_K).to(dtype)


@pytest.mark.parametrize(("dtype", "form"), KINDS)
@pytest.mark.parametrize("sizes", [(64, 48), (1060, 20)])
def test_results_are_those_of_each_expert_added_in_the_order_of_the_choice(
    native: Library, dtype: torch.dtype, form: WeightForm, sizes: tuple[int, int]
) -> None:
    mixture = Mixture(native, dtype, form, Gate(Activation.SILU), sizes)
    x = torch.randn(29, sizes[0]).to(dtype)
    alone = []
    for expert in range(NUM_EXPERTS):
        gated = mixture.pack(mixture.gate_up[2 * expert : 2 * expert + 2], mixture.gate)(x)[0]
        alone.append(mixture.pack(mixture.down[expert : expert + 1])(gated)[0])
    for share_type in {dtype, torch.float32}:
        chosen, shares = choose(len(x), share_type)
        right = torch.zeros(x.shape)
        for k in range(TOP_K):
            results = torch.stack([alone[expert][row] for row, expert in enumerate(chosen[:, k])])
            right += results * shares[:, k, None]
        assert torch.equal(mixture.experts(x, chosen, shares), right.to(dtype))


@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(
    native: Library, dtype: torch.dtype, form: WeightForm
) -> None:
    mixture = Mixture(native, dtype, form, Gate(Activation.GELU_TANH), (140, 40))
    # More rows than are sorted at a time, of which some experts have several chunks.
    x = torch.randn(1100, 140).to(dtype)
    chosen, shares = choose(len(x), dtype)
    chosen[:500, 0] = 4
    alone = torch.cat([mixture.experts(*(part[i : i + 1] for part in (x, chosen, shares))) for i in range(40)])
    for threads in (1, 2, 3):
        native.set_threads(threads)
        for size in (2, 17, 1100):
            split = zip(*(torch.split(part, size) for part in (x, chosen, shares)), strict=True)
            found = torch.cat([mixture.experts(*parts) for parts in split][:20])[:40]
            assert torch.equal(found, alone), (threads, size)


def activate(gate: Gate, x: Tensor) -> Tensor:
    if gate.activation == Activation.BOUNDED_SWISH:
        return x * torch.sigmoid(gate.slope * x)
    return silu(x) if gate.activation == Activation.SILU else gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [Gate(Activation.SILU), Gate(Activation.GELU_TANH), BOUNDED])
def test_gates_are_those_of_torch(native: Library, dtype: torch.dtype, gate: Gate) -> None:
    mixture = Mixture(native, dtype, WeightForm.STORED, gate, (96, 40))
    x = 3 * torch.randn(37, 96).to(dtype)
    chosen, shares = choose(len(x), torch.float32)
    right = torch.zeros(x.shape, dtype=torch.float64)
    for row, experts in enumerate(chosen.tolist()):
        for expert, share in zip(experts, shares[row], strict=True):
            layers = (*mixture.gate_up[2 * expert : 2 * expert + 2], mixture.down[expert])
            weights = [(layer.weight.double(), layer.bias.double()) for layer in layers]
            one, up = (linear(x[row].double(), *weights[i]).to(dtype).double() for i in range(2))
            if gate is BOUNDED:
                one, up = one.clamp(max=1.5), up.clamp(-1.5, 1.5) + 1
            right[row] += share * linear(activate(gate, one) * up, *weights[2])
    error = (mixture.experts(x, chosen, shares).double() - right).abs().max() / right.abs().max()
    assert error <= {torch.float32: 4e-6, torch.bfloat16: 1.5e-2}[dtype]


def test_an_expert_that_there_is_not_is_an_error(native: Library) -> None:
    mixture = Mixture(native, torch.float32, WeightForm.STORED, Gate(Activation.SILU), (64, 16))
    chosen, shares = choose(4, torch.float32)
    for wrong in (NUM_EXPERTS, -1):
        chosen[2, 1] = wrong
        with pytest.raises(IndexError):
            mixture.experts(torch.randn(4, 64), chosen, shares)
