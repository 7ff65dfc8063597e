"""The two places where the engine hooks into a transformers model.

1. `PagedCache.update()` writes the step's new K and V into the block pool and returns all the rows the step
   attends to.
2. `paged_attention`, registered with `AttentionInterface`, runs over the flat batch of all sequences of the
   step.

The model itself sees one sequence of T tokens, shape [1, T]; who belongs to whom is in the `Batch`. Its rows
are ordered: `num_single` sequences with one new token (decodes), attended to in one call over padded block
tables, then the chunks of prompts, one call each. The gathered rows have the same order: `num_single` x
`single_len` rows, then each chunk's.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from engine.batch import Batch, Causal, Mask, Masks, Visible
from engine.storage import KVStorage, LayerShape

NAME = "penstock"
"""The attention implementation's name in transformers."""

current_batch: ContextVar[Batch] = ContextVar("current_batch")
"""Not every architecture passes extra arguments down to its attention, so the step's batch is ambient."""


class _PositionedCache(Cache):  # type: ignore[misc, unused-ignore]
    """A cache of which the model can learn nothing: positions are always given to it."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class ProbeCache(_PositionedCache):
    """Stores nothing and learns the shapes of what each layer would have cached."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the shapes of K and V, both [1, heads, T, size]."""
        k_shape, v_shape = ((x.shape[1], x.shape[3]) for x in (key_states, value_states))
        self.shapes[layer_idx] = LayerShape(layer_idx, k_shape, v_shape)
        return key_states, value_states


class PagedCache(_PositionedCache):
    """The block pool as the model's cache."""

    def __init__(self, storage: KVStorage) -> None:
        super().__init__()
        self.storage = storage

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V, [1, heads, T, size]; return those of all gathered rows, [1, heads, rows, size]."""
        batch = current_batch.get()
        keys, values = self.storage.keys[layer_idx], self.storage.values[layer_idx]
        keys.index_put_(batch.slots, key_states[0].transpose(0, 1))
        values.index_put_(batch.slots, value_states[0].transpose(0, 1))
        return _gather(keys, batch.table), _gather(values, batch.table)


def _gather(pool: Tensor, table: Tensor) -> Tensor:
    return pool.index_select(0, table).flatten(0, 1).transpose(0, 1)[None]


class MaskRule:
    """Stands where the model expects its mask: keeps the rule, and the masks made of it for the current step.

    Made anew by each forward pass, once for each kind of layer.
    """

    def __init__(self, rule: Callable[..., Any]) -> None:
        self._visible: Visible | None = None
        if rule is not causal_mask_function:
            zero = torch.zeros((), dtype=torch.long)
            self._visible = lambda query, key: rule(zero.to(query.device), zero.to(query.device), query, key)
        self._masks: Masks | None = None

    def masks(self, batch: Batch, dtype: torch.dtype) -> Masks:
        """The masks of this kind of layer, made at its first layer."""
        if self._masks is None:
            self._masks = batch.masks(self._visible, dtype)
        return self._masks


def _mask_rule(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> MaskRule:
    return MaskRule(mask_function)


def _masks_of(batch: Batch, rule: object, window: int | None, dtype: torch.dtype) -> Masks:
    if isinstance(rule, MaskRule):
        return rule.masks(batch, dtype)
    if rule is not None:
        raise NotImplementedError(f"a mask of type {type(rule).__name__}")
    if window is None:
        return batch.masks(None, dtype)
    return batch.masks(lambda query, key: key > query - window, dtype)


@dataclass(frozen=True)
class _Scores:
    """How scores are made of queries and keys."""

    scale: float
    softcap: float | None
    sinks: Tensor | None
    """[heads]"""


QKV = tuple[Tensor, Tensor, Tensor]


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: object = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over the current batch: query [1, heads, T, size], key and value [1, kv heads, rows, size].

    Returns [1, T, heads, size]. `softcap` bounds the scores; `s_aux` is a learned extra score a head, a sink.
    """
    batch = current_batch.get()
    if key.shape[2] != batch.num_rows:
        raise NotImplementedError("a layer whose K and V do not come from the cache")
    if position_bias is not None:
        raise NotImplementedError("a position bias")
    masks = _masks_of(batch, attention_mask, sliding_window, query.dtype)
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    how = _Scores(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, sinks)
    outputs = []
    if batch.num_single:
        outputs.append(_attend_single(batch, (query, key, value), masks.single, how))
    for chunk, mask in zip(batch.chunks, masks.chunks, strict=True):
        qkv = (query[:, :, chunk.query], key[:, :, chunk.rows], value[:, :, chunk.rows])
        outputs.append(_attend(qkv, mask, how)[0].transpose(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _attend_single(batch: Batch, qkv: QKV, mask: Mask, how: _Scores) -> Tensor:
    """All sequences with one new token at once; returns [num_single, heads, size].

    The query heads that share a KV head take the place of the query's length, so that no K or V is repeated.
    """
    query, key, value = qkv
    q = query[0, :, : batch.num_single].transpose(0, 1)
    grouped = q.reshape(batch.num_single, key.shape[1], -1, q.shape[-1])
    return _attend((grouped, _by_sequence(batch, key), _by_sequence(batch, value)), mask, how).flatten(1, 2)


def _by_sequence(batch: Batch, rows: Tensor) -> Tensor:
    """The single-token sequences' part of [1, heads, rows, size] as [num_single, heads, single_len, size]."""
    num, padded = batch.num_single, batch.single_padded
    part = rows[0, :, : num * padded]
    return part.view(len(part), num, padded, -1)[:, :, : batch.single_len].transpose(0, 1)


def _attend(qkv: QKV, mask: Mask, how: _Scores) -> Tensor:
    """Query [B, heads, T, size], K and V [B, kv heads, L, size]; returns [B, heads, T, size of V]."""
    q, k, v = qkv
    added, is_causal = (mask, False) if isinstance(mask, Tensor) else (None, mask is Causal.PLAIN)
    if not how.softcap and how.sinks is None:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=added,
            is_causal=is_causal,
            scale=how.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    repeats = q.shape[1] // k.shape[1]
    scores = (q @ k.repeat_interleave(repeats, 1).transpose(2, 3)) * how.scale
    if how.softcap:
        scores = torch.tanh(scores / how.softcap) * how.softcap
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    elif added is not None:
        scores = scores + added
    if how.sinks is not None:
        # A sink takes its share of the probability and gives nothing. In `_attend_single` heads are rows.
        sink = how.sinks.reshape(1, q.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], -1)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return probabilities @ v.repeat_interleave(repeats, 1)


AttentionInterface.register(NAME, paged_attention)
AttentionMaskInterface.register(NAME, _mask_rule)
