"""A decoder layer of the common form as one native call."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.hooks import current_batch
from penstock.engine.kernels import library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import Activation, PackedLinears
from penstock.engine.kernels.paged import PagedStep
from penstock.engine.masks import Unsupported, find_first_keys

_LAYER_CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORM_CHILDREN = {"q_norm", "k_norm"}
_MLP_CHILDREN = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class AttentionParams:
    """Which layer it is, and how it attends."""

    index: int
    heads: int
    scale: float
    window: int | None


@dataclass(frozen=True)
class LayerParts:
    """The modules of a decoder layer that may be computed as one."""

    attention: AttentionParams
    projections: list[nn.Module]
    """q, k, v."""
    output_projection: nn.Module
    gate_up: list[nn.Module]
    down_projection: nn.Module
    norms: list[nn.Module]
    """Before attention, before the MLP."""
    head_norms: list[nn.Module]
    """Of q and of k; or none."""


def find_layer_parts(layer: nn.Module, is_linear: Callable[[nn.Module], bool]) -> LayerParts | None:
    """The parts of the layer if it is built as Llama's is, with or without norms of the heads; else None.

    Names are only a guess. Whether the layer computes the same is seen by comparing.
    """
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if attention is None or mlp is None or _child_names(layer) != _LAYER_CHILDREN or _child_names(mlp) != _MLP_CHILDREN:
        return None
    head_norms = _child_names(attention) - _ATTENTION_CHILDREN
    if not _child_names(attention) >= _ATTENTION_CHILDREN or head_norms not in (set(), _HEAD_NORM_CHILDREN):
        return None
    linears = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    size = getattr(attention, "head_dim", None)
    if not all(map(is_linear, linears)) or not isinstance(size, int) or linears[0].out_features % size:
        return None
    place = AttentionParams(
        attention.layer_idx, heads=linears[0].out_features // size,
        scale=float(getattr(attention, "scaling", size**-0.5)), window=getattr(attention, "sliding_window", None),
    )  # fmt: skip
    return LayerParts(
        place, projections=linears[:3], output_projection=linears[3], gate_up=linears[4:6], down_projection=linears[6],
        norms=[layer.get_submodule("input_layernorm"), layer.get_submodule("post_attention_layernorm")],
        head_norms=[attention.q_norm, attention.k_norm] if head_norms else [],
    )  # fmt: skip


def _child_names(module: nn.Module) -> set[str]:
    """Children that have parameters."""
    return {name for name, child in module.named_children() if any(True for _ in child.parameters())}


class NativeLayer(nn.Module):
    """Stands where the decoder layer was. `norms` and `head_norms` are native already."""

    def __init__(
        self,
        place: AttentionParams,
        groups: tuple[PackedLinears, PackedLinears, PackedLinears, PackedLinears],
        norms: list[NativeNorm],
        activation: Activation,
    ) -> None:
        super().__init__()
        self.attention = place
        self._groups, self._norms = groups, norms
        qkv, output, gate_up, down = (ctypes.pointer(group.packed) for group in groups)
        weights = [norm.weight.data_ptr() for norm in norms] + [None] * (4 - len(norms))
        self._args = library.LayerArgs(
            qkv, output, gate_up, down, *weights, norms[0].eps, norms[1].eps, norms[-1].eps, int(activation),
            norms[0].plus_one, groups[2].outputs[0],
        )  # fmt: skip
        self._address = ctypes.addressof(self._args)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """[1, T, hidden] to the same."""
        batch = current_batch.get()
        assert batch.paged is not None
        assert position_embeddings is not None
        first_key = find_first_keys(batch, attention_mask, self.attention.window)
        x, (cos, sin) = hidden_states.contiguous(), position_embeddings
        size = batch.paged.key_size(self.attention.index)
        if any(table.shape != (*x.shape[:2], size) or table.dtype != x.dtype for table in (cos, sin)):
            raise Unsupported("its rotary embedding is not of a head's size and dtype")
        return self.compute(batch.paged, x, (cos, sin), first_key)

    def compute(
        self, paged: PagedStep, x: Tensor, position_embeddings: tuple[Tensor, Tensor], first_key: Tensor | None
    ) -> Tensor:
        """The same, contiguous, for tokens that see what came after `first_key` (`PagedStep.aim`)."""
        cos, sin = position_embeddings
        cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty_like(x)
        place, step = self.attention, paged.step
        paged.select_layer(place.index, place.scale, first_key)
        paged.args.heads, paged.args.sinks, paged.args.softcap = place.heads, None, 0.0
        step.x, step.out, step.cos, step.sin = x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr()
        step.hidden = x.shape[-1]
        paged.native.layer(self._address, ctypes.addressof(step), ctypes.addressof(paged.args))
        return out
