"""Fewer and larger operations: RMSNorms become one kernel each, linear layers with one input become one product.

A step of few sequences launches more than it computes. What is replaced has to give what the original gave.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from penstock.engine.kernels.packed import PackedFollower, PackedLinear

MAX_RELATIVE_ERROR = 0.02
"""Root mean square of the error of a replacement's result, relative to the original's."""
NUM_TRIAL_ROWS = 5


class FusedNorm(nn.Module):
    """An RMSNorm as one operation."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] to the same."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class FusedLinears:
    """Linear layers with the same input as one product: rows [.., inputs] in, a tensor [.., outputs] for each out."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.outputs, self.inputs = [one.out_features for one in linears], linears[0].in_features
        self.dtype = linears[0].weight.dtype
        self._weight = torch.cat([one.weight.detach() for one in linears])
        biases = [one.bias.detach() for one in linears if one.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return the output of each layer."""
        return list(torch.split(linear(x, self._weight, self._bias), self.outputs, -1))


def fuse_parts(root: nn.Module, norms: Mapping[str, tuple[Tensor, Tensor]], groups: Iterable[list[str]]) -> int:
    """Replace parts of a model in place; return how many were replaced.

    `norms` are an input and its output of each RMSNorm, by its name. `groups` are names of linear layers that had the
    same input. The weights of grouped layers are copied, and theirs are freed.
    """
    num_fused = 0
    for name, (given, right) in norms.items():
        new = _make_norm(root.get_submodule(name), given, right)
        if new is not None:
            _set_module(root, name, new)
            num_fused += 1
    for names in groups:
        num_fused += _fuse_linears(root, list(dict.fromkeys(names)))
    return num_fused


def _make_norm(norm: nn.Module, given: Tensor, right: Tensor) -> FusedNorm | None:
    """Return a norm that gives the same, or None."""
    eps, weight = getattr(norm, "variance_epsilon", getattr(norm, "eps", None)), norm.weight
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or given.shape[-1:] != weight.shape:
        return None
    if not given.dtype == right.dtype == weight.dtype:
        return None
    new = FusedNorm(weight, eps)
    return new if _is_near(new(given), right) else None


def _fuse_linears(root: nn.Module, names: list[str]) -> bool:
    """Make the named linear layers one product, if that gives the same. Return whether it does."""
    linears = [root.get_submodule(name) for name in names]
    same = [one for one in linears if type(one) is nn.Linear]
    if len(same) < max(2, len(linears)) or len({(one.weight.dtype, one.bias is None) for one in same}) > 1:
        return False
    group = FusedLinears(same)
    generator = torch.Generator(same[0].weight.device).manual_seed(2)
    x = torch.empty(NUM_TRIAL_ROWS, group.inputs, dtype=group.dtype, device=same[0].weight.device)
    x.normal_(generator=generator)
    if not all(_is_near(mine, one(x)) for mine, one in zip(group(x), same, strict=True)):
        return False
    first = PackedLinear(group)
    for index, name in enumerate(names):
        _set_module(root, name, first if index == 0 else PackedFollower(first, index))
    return True


def _is_near(mine: Tensor, right: Tensor) -> bool:
    error = (mine.float() - right.float()).square().mean().sqrt()
    return bool(error <= MAX_RELATIVE_ERROR * right.float().square().mean().sqrt())


def _set_module(root: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, new)
