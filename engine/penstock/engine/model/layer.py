"""Decoder layers of the common form as one native call each, and whole models of such layers."""

import ctypes
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.kernels import library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import Activation, PackedEmbedding, PackedLinears
from penstock.engine.memory.storage import KVStorage
from penstock.engine.model.experts import NativeExperts, is_experts
from penstock.engine.steps.masks import Unsupported, find_visibility
from penstock.engine.steps.native_step import NativeStep, address_of, describe_attention
from penstock.engine.steps.step import current_step

MIN_TABLE_POSITIONS, MAX_TABLE_POSITIONS = 1024, 16384
"""How many positions a table of cosines and sines has, at least and at most."""
MAX_KEPT_LOGITS = 64
"""Rows of logits for which memory is kept: that of many would be as large as a model."""
_LAYER_CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION_CHILDREN = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORM_CHILDREN = {"q_norm", "k_norm"}
_MLP_CHILDREN = {"gate_proj", "up_proj", "down_proj"}
_DECODER_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}


@dataclass(frozen=True)
class AttentionParams:
    """A layer's index and the parameters of its attention."""

    index: int
    heads: int
    scale: float
    window: int | None


@dataclass(frozen=True)
class LayerParts:
    """The modules of a decoder layer that may be computed by one native call."""

    attention: AttentionParams
    projections: list[nn.Module]
    """Projections of q, k and v."""
    output_projection: nn.Module
    gate_up: list[nn.Module]
    """Empty with a mixture of experts."""
    down_projection: list[nn.Module]
    """The same."""
    norms: list[nn.Module]
    """The norm before attention and the norm before the MLP."""
    head_norms: list[nn.Module]
    """The norms of q and k heads; may be empty."""


def find_layer_parts(layer: nn.Module, is_linear: Callable[[nn.Module], bool]) -> LayerParts | None:
    """Return the parts of a layer that is built like Llama's, with or without head norms and experts; otherwise None.

    Names are only a hint: the caller compares what the native layer computes with the original.
    """
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    if attention is None or mlp is None or _child_names(layer) | {"mlp"} != _LAYER_CHILDREN:
        return None
    is_mixture = has_experts(mlp)
    if not is_mixture and _child_names(mlp) != _MLP_CHILDREN:
        return None
    head_norms = _child_names(attention) - _ATTENTION_CHILDREN
    if not _child_names(attention) >= _ATTENTION_CHILDREN or head_norms not in (set(), _HEAD_NORM_CHILDREN):
        return None
    linears = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linears += [] if is_mixture else [getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    size = getattr(attention, "head_dim", None)
    if not all(map(is_linear, linears)) or not isinstance(size, int) or linears[0].out_features % size:
        return None
    params = AttentionParams(
        attention.layer_idx, heads=linears[0].out_features // size,
        scale=float(getattr(attention, "scaling", size**-0.5)), window=getattr(attention, "sliding_window", None),
    )  # fmt: skip
    return LayerParts(
        params, projections=linears[:3], output_projection=linears[3], gate_up=linears[4:6],
        down_projection=linears[6:],
        norms=[layer.get_submodule("input_layernorm"), layer.get_submodule("post_attention_layernorm")],
        head_norms=[attention.q_norm, attention.k_norm] if head_norms else [],
    )  # fmt: skip


def has_experts(mlp: nn.Module) -> bool:
    """Return whether the module is a mixture of experts."""
    return any(isinstance(child, NativeExperts) or is_experts(child) for child in mlp.children())


def _child_names(module: nn.Module) -> set[str]:
    """Return the names of the children that have parameters."""
    return {name for name, child in module.named_children() if any(True for _ in child.parameters())}


class PagedLayers:
    """Native layers, each by its attention and weights, computed one after the other in one call."""

    def __init__(self, layers: Sequence[tuple[AttentionParams, ctypes.Structure]]) -> None:
        self.layers = layers
        self._args = (library.PagedLayer * len(layers))()
        self._storage: weakref.ref[KVStorage] | None = None
        """The pool that `_args` names."""

    def describe_layers(self, storage: KVStorage) -> Any:
        """Return the layers over a pool as the kernels read them, an array that is valid until another pool's turn."""
        if self._storage is None or self._storage() is not storage:
            for args, (params, weights) in zip(self._args, self.layers, strict=True):
                args.weights = ctypes.pointer(weights)
                args.attention = describe_attention(storage, params.index, params.heads, params.scale)
            self._storage = weakref.ref(storage)
        return self._args

    def compute(
        self, step: NativeStep, x: Tensor, position_embeddings: tuple[Tensor, Tensor], first_key: Tensor | None
    ) -> Tensor:
        """Compute the layers for contiguous `x`, [1, T, hidden], which is overwritten if there are several.

        `first_key`: the first position that each row sees, int32 [T]; None: 0.
        """
        layers = self.describe_layers(step.storage)
        cos, sin = position_embeddings
        cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty_like(x)
        args = step.step_args
        args.x, args.out, args.cos, args.sin = x.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.hidden, args.first_key = x.shape[-1], None if first_key is None else first_key.data_ptr()
        step.native.layers(ctypes.addressof(layers), len(layers), ctypes.addressof(args))
        return out if len(layers) % 2 else x


class NativeLayer(nn.Module):
    """Replaces a decoder layer. `norms` includes the head norms; all are native already.

    `groups` are those of the attention, and of the MLP if that is no mixture of experts: else `mlp` is that module.
    """

    def __init__(
        self,
        params: AttentionParams,
        groups: list[PackedLinears],
        norms: list[NativeNorm],
        activation: Activation = Activation.NONE,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.mlp = params, mlp
        self.groups, self.norms, self.activation = groups, norms, activation
        qkv, output, gate_up, down = (
            None if group is None else ctypes.pointer(group.packed) for group in (*groups, None, None)[:4]
        )
        weights = [norm.weight.data_ptr() for norm in norms] + [None] * (4 - len(norms))
        args = library.LayerArgs(
            qkv, output, gate_up, down, *weights, norms[0].eps, norms[1].eps, norms[-1].eps, int(activation),
            norms[0].plus_one, 0 if mlp is not None else groups[2].outputs[0],
        )  # fmt: skip
        self.paged = PagedLayers([(params, args)])
        """The layer as the kernels read it. It lives as long as this module."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the layer: [1, T, hidden] to the same shape."""
        step = current_step.get()
        assert isinstance(step, NativeStep)
        assert position_embeddings is not None
        first_key = step.find_first_keys(find_visibility(attention_mask, self.attention.window))
        x, (cos, sin) = hidden_states.contiguous(), position_embeddings
        size = step.key_size(self.attention.index)
        if any(table.shape != (*x.shape[:2], size) or table.dtype != x.dtype for table in (cos, sin)):
            raise Unsupported("its rotary embedding is not of a head's size and dtype")
        return self.compute(step, x, position_embeddings, first_key)

    def compute(
        self, step: NativeStep, x: Tensor, position_embeddings: tuple[Tensor, Tensor], first_key: Tensor | None
    ) -> Tensor:
        """Compute the layer as `PagedLayers` does."""
        if self.mlp is None:
            return self.paged.compute(step, x, position_embeddings, first_key)
        normed = torch.empty_like(x)
        step.step_args.normed = normed.data_ptr()
        out = self.paged.compute(step, x, position_embeddings, first_key)
        result = self.mlp(normed)
        out += result[0] if isinstance(result, tuple) else result  # some return the router's weights, too
        return out


class RotaryTable:
    """The cosines and sines of a model's rotary embedding by position, computed once by its own module.

    With small models and small batches that module takes as long as a layer. One of three axes, for pictures, takes a
    text's positions for each of them.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        # Some kinds choose their frequencies by the longest sequence of the call.
        self._is_fixed = getattr(rotary, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        self._rows = (torch.empty(0), torch.empty(0))
        """[positions, size] each."""
        self._axes = torch.empty(0)
        """The axis of each number of a row, [size], where there are three."""

    def get_table(self, x: Tensor, last_position: int) -> tuple[Tensor, Tensor] | None:
        """Return the cosines and sines of all positions up to `last_position`, at least: [positions, size] each.

        They are of `x`'s dtype. Returns None where there is no table, as it would be large, or depend on the batch.
        """
        if not self._is_fixed or last_position >= MAX_TABLE_POSITIONS:
            return None
        if last_position >= len(self._rows[0]):
            length = max(MIN_TABLE_POSITIONS, 1 << last_position.bit_length())
            cos, sin = self._rotary(x, torch.arange(length)[None])
            self._rows = (cos[0].contiguous(), sin[0].contiguous())
        return self._rows

    def find_rows(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of position ids [1, T], or [3, 1, T] on three axes: [1, T, size] each, of `x`'s
        dtype.
        """
        table = self.get_table(x, int(position_ids.max()))
        if table is None:
            found: tuple[Tensor, Tensor] = self._rotary(x, position_ids)
            return found
        if position_ids.dim() == 3:
            # From the table, too: torch rounds a row otherwise than the same row among others.
            numbers = torch.arange(table[0].shape[1])
            positions = position_ids[self._find_axes(x), 0].T
            return table[0][positions, numbers][None], table[1][positions, numbers][None]
        positions = position_ids[0]
        return table[0][positions][None], table[1][positions][None]

    def _find_axes(self, x: Tensor) -> Tensor:
        """Return the axis of each number of a row: the one whose position 1 gives it a sine."""
        if not len(self._axes):
            sines = self._rotary(x.float(), torch.eye(3, dtype=torch.int64)[:, None])[1][0]
            self._axes = sines.abs().argmax(0)
        return self._axes


class NativeModel:
    """Embedding, native layers without windows, norm and head, without the model's own forward passes.

    With small models and small batches those take longer than the arithmetic, and so one call computes all of it where
    there is no mixture of experts.
    """

    def __init__(self, module: Any) -> None:
        decoder = module.get_decoder()
        self._embed, self._norm, self._head = decoder.embed_tokens, decoder.norm, module.get_output_embeddings()
        self._rotary = RotaryTable(decoder.rotary_emb)
        self._layers = list(decoder.layers)  # they hold the weights
        self._stages: list[PagedLayers | NativeLayer] = []
        """Layers that are computed together, and those with a mixture of experts, in order."""
        for has_mixture, layers in itertools.groupby(decoder.layers, lambda layer: layer.mlp is not None):
            found = list(layers)
            paged = [one for layer in found for one in layer.paged.layers]
            self._stages += found if has_mixture else [PagedLayers(paged)]
        self._args = self._describe_model()
        """All of it for one call; None if it has parts that are no native ones."""
        self._like = self._norm.weight
        """A tensor of the model's dtype."""
        self._table: tuple[Tensor, Tensor] | None = None
        """The table that `_args` names."""
        self.hidden = torch.empty(0)
        """What the head has read in the last step whose batch `keeps_hidden`: [rows, hidden size]."""
        self._memory = torch.empty(0)
        """For the logits of `MAX_KEPT_LOGITS` rows, from the first step on."""
        self._logits: dict[int, tuple[Tensor, int]] = {}
        """By number of rows: the first rows of it, and their address."""

    def compute_batch(self, step: NativeStep) -> Tensor:
        """Write K and V to the pool, and return the logits that the batch keeps: [rows, vocabulary].

        They are valid until the next call.
        """
        batch = step.batch
        if batch.seen_rows is not None:
            return self._compute_stages(step, batch.input_ids, batch.seen_rows.position_ids, batch.logits_to_keep)
        table = None if self._args is None else self._rotary.get_table(self._like, batch.last_position)
        if self._args is None or table is None:
            return self.compute_rows(step, batch.position_ids, batch.logits_to_keep)
        addresses = (step.row_addresses[0], step.row_addresses[1], address_of(batch.kept_values))
        return self._compute_model(self._args, step, addresses, len(batch.kept_values), table)

    def compute_rows(self, step: NativeStep, position_ids: Tensor, kept: Tensor) -> Tensor:
        """The same for tokens at any positions, [1, T], and any rows of logits."""
        ids = step.batch.input_ids
        if self._args is None:
            return self._compute_stages(step, ids, position_ids, kept)
        table = self._rotary.get_table(self._like, int(position_ids.max()))
        if table is None:
            cos, sin = self._rotary.find_rows(self._like, position_ids)
            table, position_ids = (cos[0].contiguous(), sin[0].contiguous()), torch.arange(position_ids.shape[1])
        addresses = (ids.data_ptr(), position_ids.data_ptr(), kept.data_ptr())
        return self._compute_model(self._args, step, addresses, len(kept), table)

    def _compute_stages(self, step: NativeStep, ids: Tensor, positions: Tensor, kept: Tensor) -> Tensor:
        """Compute the parts one after the other: ids [1, T], and positions, to logits [rows to keep, vocabulary]."""
        x, stages, seen = self._embed(ids), self._stages, step.batch.seen_rows
        if seen is not None:
            x[0, seen.at], stages = seen.seen.rows, self._layers
        tables = self._rotary.find_rows(x, positions)
        for number, stage in enumerate(stages):
            x = stage.compute(step, x, tables, None)
            if seen is not None and number < len(seen.seen.added):
                x[0, seen.at] += seen.seen.added[number]
        self.hidden = self._norm(x[0, kept])
        logits: Tensor = self._head(self.hidden)
        return logits

    def _describe_model(self) -> ctypes.Structure | None:
        """Return what is the same in every step of a model without mixtures; None for any other."""
        norm, head, embed = self._norm, self._head, self._embed
        group: Any = getattr(head, "group", None)
        if not isinstance(norm, NativeNorm) or not isinstance(group, PackedLinears) or len(group.outputs) > 1:
            return None
        if len(self._stages) > 1 or not isinstance(self._stages[0], PagedLayers):
            return None
        args = library.NativeModelArgs(
            num_layers=len(self._layers), norm=norm.weight.data_ptr(), eps=norm.eps, plus_one=norm.plus_one,
            head=ctypes.pointer(group.packed), num_logits=group.outputs[0], element_bytes=group.dtype.itemsize,
        )  # fmt: skip
        if isinstance(embed, PackedEmbedding):
            args.packed_embedding, args.num_tokens = ctypes.pointer(embed.group.packed), embed.num_embeddings
        elif type(embed) is nn.Embedding and embed.weight.dtype == group.dtype and embed.weight.is_contiguous():
            args.embedding, args.num_tokens = embed.weight.data_ptr(), embed.num_embeddings
        else:
            return None
        return args

    def _compute_model(
        self,
        args: ctypes.Structure,
        step: NativeStep,
        addresses: tuple[int, int, int],
        num_kept: int,
        table: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Compute the whole model in one call, and return logits [rows to keep, vocabulary].

        `addresses`: of the token ids, their positions, and the rows to keep. `table`: cosines and sines by position.
        """
        stage = self._stages[0]
        assert isinstance(stage, PagedLayers)
        logits, args.logits = self._find_logits(num_kept)
        args.layers = stage.describe_layers(step.storage)
        args.ids, args.positions, args.kept = addresses
        args.num_kept, args.kept_hidden = num_kept, None
        if step.batch.keeps_hidden:
            self.hidden = torch.empty(num_kept, args.head.contents.inputs, dtype=self._like.dtype)
            args.kept_hidden = self.hidden.data_ptr()
        if self._table is not table:
            args.cos, args.sin = table[0].data_ptr(), table[1].data_ptr()
            args.num_positions, args.head_size = table[0].shape
            self._table = table
        step.step_args.hidden, step.step_args.first_key = args.head.contents.inputs, None
        step.native.body(ctypes.addressof(args), ctypes.addressof(step.step_args))
        return logits

    def _find_logits(self, num_rows: int) -> tuple[Tensor, int]:
        """Return memory for logits [rows, vocabulary], and its address. For a few rows the memory is the same every
        time.
        """
        found = self._logits.get(num_rows)
        if found is not None:
            return found
        assert self._args is not None
        if num_rows > MAX_KEPT_LOGITS:
            logits = torch.empty(num_rows, self._args.num_logits, dtype=self._like.dtype)
            return logits, logits.data_ptr()
        if not self._logits:
            self._memory = torch.empty(MAX_KEPT_LOGITS, self._args.num_logits, dtype=self._like.dtype)
        self._logits[num_rows] = found = (self._memory[:num_rows], self._memory.data_ptr())
        return found


def has_common_layers(module: Any, is_linear: Callable[[nn.Module], bool]) -> bool:
    """Return whether the module is built like a model that `make_native_model` takes, as far as names and sizes say."""
    decoder = module.get_decoder()
    if module.get_output_embeddings() is None or not _child_names(decoder) <= _DECODER_CHILDREN:
        return False
    found = [find_layer_parts(layer, is_linear) for layer in getattr(decoder, "layers", [])]
    return bool(found) and all(parts is not None and parts.attention.window is None for parts in found)


def make_native_model(module: Any) -> NativeModel | None:
    """Return the model as a `NativeModel` if its decoder is built like Llama's, with native layers; otherwise None.

    What a model has beside its decoder and its head sees pictures, and texts do not reach it. As with layers, the
    caller compares what it computes with the original.
    """
    decoder = module.get_decoder()
    if module.get_output_embeddings() is None or {name for name, _ in decoder.named_children()} != _DECODER_CHILDREN:
        return None
    if not all(isinstance(layer, NativeLayer) and layer.attention.window is None for layer in decoder.layers):
        return None
    return NativeModel(module)
