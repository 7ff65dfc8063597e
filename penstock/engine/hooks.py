"""The two places where the engine hooks into a transformers model.

1. `PagedCache.update()` writes the step's new K and V into the block pool and returns all the rows the step
   attends to.
2. `paged_attention`, registered with `AttentionInterface`, runs over the flat batch of all sequences of the
   step.

The model itself sees one sequence of T tokens, shape [1, T]; the `Batch` knows which tokens belong to which sequence.

If the native kernels or a GPU's kernels run, and the model passes K and V from the first place to the second unchanged,
nothing is gathered: `update()` returns its arguments, and attention reads the pool.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from penstock.engine.attention import LayerAttention, ScoreParams, attend_gathered
from penstock.engine.batch import Batch
from penstock.engine.masks import Unsupported, find_first_keys, make_mask_rule, make_masks
from penstock.engine.storage import KVStorage, LayerShape

ATTENTION_NAME = "penstock"
"""The attention implementation's name in transformers."""

current_batch: ContextVar[Batch] = ContextVar("current_batch")
"""The batch of the current step. Not every architecture passes extra arguments on to its attention."""


@contextmanager
def run_with_batch(module: Any, batch: Batch) -> Iterator[None]:
    """Let the module's forward passes within the context run over this batch."""
    stock = module.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    if stock != ATTENTION_NAME:
        module.set_attn_implementation(ATTENTION_NAME)
    token = current_batch.set(batch)
    try:
        yield
    finally:
        current_batch.reset(token)
        if stock != ATTENTION_NAME:
            module.set_attn_implementation(stock)


class _NoLayers(list[Any]):
    """Refuses access to the layers of transformers' own caches."""

    def __getitem__(self, index: Any) -> Any:
        raise Unsupported("its layers keep more than keys and values in the cache")


class _PositionedCache(Cache):  # type: ignore[misc, unused-ignore]
    """A cache that looks empty to the model, because positions are always passed to it.

    State besides keys and values is refused.
    """

    def __init__(self) -> None:
        super().__init__(layers=_NoLayers())

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def _refuse_state(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported("it keeps a recurrent or convolution state beside keys and values")

    has_previous_state = _refuse_state
    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse_state

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        raise Unsupported("a sparse indexer keeps keys of its own")


class ProbeCache(_PositionedCache):
    """Records the shapes of what each layer would cache, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Record the shapes of K and V, both [1, heads, T, size]."""
        k_shape, v_shape = ((x.shape[1], x.shape[3]) for x in (key_states, value_states))
        self.shapes[layer_idx] = LayerShape(layer_idx, k_shape, v_shape)
        return key_states, value_states


class PagedCache(_PositionedCache):
    """The block pool as the model's cache."""

    def __init__(self, storage: KVStorage, direct: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.storage = storage
        self.direct = direct
        """Layers whose attention gets K and V exactly as `update()` returns them."""

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return 0, or for a layer the offsets [T] that it adds to 0, 1, … to get its tokens' positions."""
        if layer_idx is None:
            return 0
        positions = current_batch.get().position_ids[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V, [1, heads, T, size]; return K and V of all gathered rows, [1, heads, rows, size]."""
        batch = current_batch.get()
        step = batch.paged or batch.varlen
        if step is not None and layer_idx in self.direct:
            step.write_kv(layer_idx, key_states, value_states)
            batch.kv_by_layer[layer_idx] = (key_states, value_states)
            return key_states, value_states
        keys, values = self.storage.keys[layer_idx], self.storage.values[layer_idx]
        keys.index_put_(batch.slots, key_states[0].transpose(0, 1))
        values.index_put_(batch.slots, value_states[0].transpose(0, 1))
        table = batch.gathered.block_ids
        batch.kv_by_layer[layer_idx] = found = (gather_rows(keys, table), gather_rows(values, table))
        return found


def gather_rows(pool: Tensor, table: Tensor) -> Tensor:
    """Return the rows of the blocks in `table`, of a layer's K or V: [1, heads, rows, size]."""
    return pool.index_select(0, table).flatten(0, 1).transpose(0, 1)[None]


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
    """Compute attention over the current batch: query [1, heads, T, size], key and value [1, kv heads, rows, size].

    Returns [1, T, heads, size]. `softcap` bounds the scores; `s_aux` is a learned extra score per head (a sink).
    """
    batch = current_batch.get()
    batch.num_attention_calls += 1
    if position_bias is not None:
        raise Unsupported("it adds a position bias to the scores")
    if attention_mask is None and not getattr(module, "is_causal", True):
        raise Unsupported("its attention is not causal")
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    how = ScoreParams(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, sinks)
    owner = batch.find_layer(key, value)
    if batch.paged is not None and owner is not None and key.shape[2] == batch.num_tokens:
        batch.paged.select_layer(owner, how.scale, find_first_keys(batch, attention_mask, sliding_window))
        return batch.paged.compute_attention(query, sinks, softcap), None
    if batch.varlen is not None and owner is not None and owner in batch.varlen.windows:
        return batch.varlen.compute_attention(owner, query, how.scale), None
    if owner is not None:
        batch.attention_by_layer[owner] = LayerAttention(query.shape[1], how, attention_mask, sliding_window)
    gathered = batch.gathered
    if key.shape[2] != gathered.num_rows:
        raise Unsupported("a layer's keys and values do not come from the cache")
    masks = make_masks(gathered, attention_mask, sliding_window, query.dtype)
    return attend_gathered(gathered, (query, key, value), masks, how), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, make_mask_rule)
