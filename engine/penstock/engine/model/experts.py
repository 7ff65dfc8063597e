"""Mixtures of experts: all experts of a layer as one native call, and the router's product with its weight as another.

transformers has the experts of a layer in two tensors, and chooses for each token some of them by a router. The rest of
a mixture (the router's softmax and choice, shared experts) stays the module that it is.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from penstock.engine.kernels import library
from penstock.engine.kernels.library import Library
from penstock.engine.kernels.packed import (
    Activation,
    PackedLinears,
    PackedWeight,
    Release,
    keep_weight,
    make_linear,
    make_packed_weight,
)


@dataclass(frozen=True)
class Gate:
    """How experts multiply the outputs of gate and up."""

    activation: Activation
    limit: float = 0.0
    slope: float = 0.0

    def compute_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return what the kernels compute, in float32."""
        if self.activation == Activation.SILU:
            return silu(gate) * up
        if self.activation == Activation.GELU_TANH:
            return gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.slope) * (up + 1)


@dataclass(frozen=True)
class ExpertsParts:
    """The linear layers of experts, which are views of the merged tensors."""

    gate_up: list[nn.Linear]
    """Gate and up of each expert in turn."""
    down: list[nn.Linear]
    gate: Gate


def find_mixtures(root: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each module of experts, and the names of what may be its routers.

    Names are only a hint: the caller compares what the native modules compute with the originals.
    """
    for name, parent in root.named_modules():
        for child, experts in parent.named_children():
            if is_experts(experts):
                routers = [other for other, module in parent.named_children() if _may_route(module, experts)]
                yield _join(name, child), [_join(name, other) for other in routers]


def is_experts(module: nn.Module) -> bool:
    """Return whether the module has the merged tensors of gated experts."""
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return hasattr(module, "_apply_gate") and all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)


def _may_route(module: nn.Module, experts: Any) -> bool:
    weight = getattr(module, "weight", None)
    is_matrix = isinstance(weight, nn.Parameter) and weight.dim() == 2 and len(weight) == len(experts.down_proj)
    return is_matrix and type(module) is not nn.Linear  # which becomes native by itself


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child


def find_experts_parts(module: Any) -> ExpertsParts | None:
    """Return the linear layers of experts whose gate the kernels can compute; otherwise None."""
    gate = _find_gate(module)
    if gate is None or getattr(module, "has_post_expert_norm", False):
        return None
    gate_up, down = module.gate_up_proj, module.down_proj
    if getattr(module, "is_transposed", False):
        gate_up, down = gate_up.mT, down.mT
    biases = [getattr(module, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")]
    if [bias is not None for bias in biases] != [bool(getattr(module, "has_bias", False))] * 2:
        return None
    num_experts, width, _ = gate_up.shape
    is_concatenated = getattr(module, "is_concatenated", True)
    rows = [slice(width // 2), slice(width // 2, None)] if is_concatenated else [slice(0, None, 2), slice(1, None, 2)]

    def make_part(weight: Tensor, bias: Tensor | None, expert: int, chosen: slice = slice(None)) -> nn.Linear:
        return make_linear(weight[expert, chosen], None if bias is None else bias[expert, chosen])

    return ExpertsParts(
        gate_up=[make_part(gate_up, biases[0], expert, half) for expert in range(num_experts) for half in rows],
        down=[make_part(down, biases[1], expert) for expert in range(num_experts)],
        gate=gate,
    )


def _find_gate(experts: Any) -> Gate | None:
    """Return the kernels' form of what the module does to the outputs of gate and up, or None."""
    gate, up = torch.linspace(-12, 12, 97), torch.linspace(-12, 12, 97).roll(31)
    is_concatenated = getattr(experts, "is_concatenated", True)
    both = torch.cat([gate, up]) if is_concatenated else torch.stack([gate, up], dim=1).flatten()
    right = experts._apply_gate(both[None])[0]  # noqa: SLF001 - transformers has no public name for it
    known = [Gate(Activation.SILU), Gate(Activation.GELU_TANH)]
    limit, slope = getattr(experts, "limit", None), getattr(experts, "alpha", None)
    if isinstance(limit, float) and isinstance(slope, float):
        known.append(Gate(Activation.BOUNDED_SWISH, limit, slope))
    for form in known:
        product = form.compute_product(gate, up)
        if product.shape == right.shape and torch.allclose(product, right, atol=1e-5):
            return form
    return None


class NativeExperts(nn.Module):
    """Replaces the experts of a layer. A token's result does not depend on the tokens beside it."""

    def __init__(self, native: Library, gate_up: PackedLinears, down: PackedLinears, gate: Gate) -> None:
        super().__init__()
        self._native, self.groups, self.gate = native, (gate_up, down), gate
        self._args = library.ExpertsArgs(
            gate_up=ctypes.pointer(gate_up.packed), down=ctypes.pointer(down.packed), num_experts=len(down.outputs),
            intermediate=gate_up.outputs[0], activation=int(gate.activation), limit=gate.limit, slope=gate.slope,
        )  # fmt: skip
        self._address = ctypes.addressof(self._args)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, hidden] with experts and weights [T, k] to [T, hidden]. Raises `IndexError` for unknown experts."""
        x, chosen, args = hidden_states.contiguous(), top_k_index.long().contiguous(), self._args
        shares = top_k_weights if top_k_weights.dtype == x.dtype else top_k_weights.float()
        shares, out = shares.contiguous(), torch.empty_like(x)
        (args.rows, args.top_k), args.share_bytes = chosen.shape, shares.itemsize
        args.x, args.chosen, args.shares, args.out = (one.data_ptr() for one in (x, chosen, shares, out))
        self._native.experts(self._address)
        return out


def pack_router(native: Library, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> PackedWeight:
    """Return a router's weight [experts, inputs] for inputs of this dtype, packed with its bias."""
    whole = make_linear(weight.to(dtype), bias)
    return make_packed_weight(weight, PackedLinears.pack(native, [whole], keep_weight))


def pack_experts(native: Library, parts: ExpertsParts, pack: Any, release: Release) -> NativeExperts:
    """Return native experts; `pack` is the packer's method for linear layers."""
    gate_up = pack(parts.gate_up, release, parts.gate.activation)
    return NativeExperts(native, gate_up, pack(parts.down, release), parts.gate)
