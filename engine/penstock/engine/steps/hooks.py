"""The two places where the engine hooks into a transformers model.

1. `PagedCache.update()` hands the step's new K and V to the current `Step`, which writes them into the block pool, and
   returns the K and V to attend to.
2. `paged_attention`, registered with `AttentionInterface`, runs over the flat batch of all sequences of the
   step.

The model itself sees one sequence of T tokens, shape [1, T]; the `StepBatch` knows which tokens belong to which
sequence.

Where a kernel reads the pool itself, and the model passes K and V from the first place to the second unchanged,
nothing is gathered: `update()` returns its arguments.

A model that attends in a way of its own keeps its attention, and has the first place alone: it reads one sequence at a
time (`SingleSequenceStep`), and finds in the cache what transformers' own would hold.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from penstock.engine.steps.attention import LayerAttention
from penstock.engine.steps.choice import FirstOfEqual
from penstock.engine.steps.latent import LatentHeads, expand_latents
from penstock.engine.steps.masks import OwnAttention, Unsupported, make_mask_rule
from penstock.engine.steps.step import SingleSequenceStep, Step, current_step
from penstock.engine.steps.step_batch import SeenRows

ATTENTION_NAME = "penstock"
"""The attention implementation's name in transformers."""


@contextmanager
def run_with_step(module: Any, step: Step) -> Iterator[None]:
    """Let the module's forward passes within the context run as this step."""
    stock = module.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    is_replaced = stock != ATTENTION_NAME and not isinstance(step, SingleSequenceStep)
    if is_replaced:
        module.set_attn_implementation(ATTENTION_NAME)
    token = current_step.set(step)
    try:
        with FirstOfEqual() if isinstance(step, SingleSequenceStep) else nullcontext():
            yield
    finally:
        current_step.reset(token)
        if is_replaced:
            module.set_attn_implementation(stock)


def run_module(module: Any, step: Step, **given: Any) -> Any:
    """Return what the module gives for a step.

    The batch is read at its own positions unless `position_ids` are given.
    """
    usual = {"position_ids": step.batch.position_ids, "past_key_values": PagedCache(), "use_cache": True}
    with run_with_step(module, step):
        if step.batch.seen_rows is not None:
            with _read_seen(module, step.batch.input_ids, step.batch.seen_rows) as read:
                return module(**{**usual, **read, **given})
        return module(input_ids=step.batch.input_ids, **{**usual, **given})


@contextmanager
def _read_seen(module: Any, ids: Tensor, rows: SeenRows) -> Iterator[dict[str, Any]]:
    """Let the module add behind its first layers, within the context, what it sees in pictures; yield what it reads."""
    x = module.get_input_embeddings()(ids)
    x[0, rows.at] = rows.seen.rows

    def add_behind(layer: Any, added: Tensor) -> Any:
        def add(_: Any, given: Any, out: Tensor) -> Tensor:
            out[0, rows.at] += added
            return out

        return layer.register_forward_hook(add)

    layers = module.get_decoder().layers
    handles = [add_behind(layer, added) for layer, added in zip(layers, rows.seen.added, strict=False)]
    try:
        yield {"inputs_embeds": x, "position_ids": rows.position_ids}
    finally:
        for handle in handles:
            handle.remove()


class _Layers(list[Any]):
    """The layers of the cache, of which a sparse indexer may ask one for its keys. Nothing else is in them."""

    def __getitem__(self, index: Any) -> Any:
        return _Layer(index)


class _Layer:
    """A layer of the cache."""

    def __init__(self, index: int) -> None:
        self._index = index

    def update_index(self, keys: Tensor) -> Tensor:
        """Store the keys of a sparse indexer, [1, 1, T, size]; return those of all tokens of the sequence."""
        return current_step.get().write_index_keys(self._index, keys[:, 0])[:, None]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported("its layers keep more than keys and values in the cache")


class PagedCache(Cache):  # type: ignore[misc, unused-ignore]
    """The block pool as the model's cache.

    It looks empty to the model, because positions are always passed to it, unless the model attends by itself.
    """

    def __init__(self) -> None:
        super().__init__(layers=_Layers())

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return the cached tokens, or for a layer the offsets [T] to add to 0, 1, … to get its tokens' positions."""
        step = current_step.get()
        if layer_idx is None or isinstance(step, SingleSequenceStep):
            return step.num_cached_tokens
        positions = step.batch.position_ids[0]
        return positions - torch.arange(len(positions), device=positions.device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of cached tokens."""
        return current_step.get().num_cached_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys that a mask has, and the position of the first."""
        return current_step.get().num_cached_tokens + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store K and V, [1, heads, T, size]; return those that the layer attends to, [1, heads, rows, size]."""
        return current_step.get().write_kv(layer_idx, key_states, value_states)

    # A layer with a state reads one piece of one sequence at a time (`mixers`): the step knows which.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the sequence has tokens before the piece; without a layer False, as for positions."""
        if layer_idx is None:
            return False
        flags = current_step.get().find_state(layer_idx).has_previous_state
        return any(flags.values()) if state_idx is None else flags[state_idx]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's convolution state, or None before the first token."""
        state = current_step.get().find_state(layer_idx)
        return state.conv_states[state_idx] if state.has_previous_state[state_idx] else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's recurrent state, or None before the first token."""
        state = current_step.get().find_state(layer_idx)
        return state.recurrent_states[state_idx] if state.has_previous_state[state_idx] else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Put new inputs into a layer's convolution state, and return them with those before."""
        state = current_step.get().find_state(layer_idx)
        inputs: Tensor = state.update_conv_state(conv_states, state_idx, **kwargs)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Set a layer's recurrent state, and return it."""
        state = current_step.get().find_state(layer_idx)
        updated: Tensor = state.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return updated

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are not rolled back."""
        return False

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Store the keys of a sparse indexer, [1, T, size]; return those of all tokens of the sequence."""
        return current_step.get().write_index_keys(layer_idx, indexer_key_states)


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
    step = current_step.get()
    step.num_attention_calls += 1
    if position_bias is not None:
        raise OwnAttention("it adds a position bias to the scores")
    if attention_mask is None and not getattr(module, "is_causal", True):
        raise Unsupported("its attention is not causal")
    how = LayerAttention(
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap,
        s_aux if s_aux is not None else getattr(module, "sinks", None),
        attention_mask,
        sliding_window,
    )
    heads = getattr(module, "latent_heads", None)
    if isinstance(heads, LatentHeads):
        return _attend_to_latents(module, heads, query, key, value, how), None
    return step.compute_attention(query, key, value, how), None


def _attend_to_latents(
    module: nn.Module, heads: LatentHeads, query: Tensor, latents: Tensor, rope_keys: Tensor, how: LayerAttention
) -> Tensor:
    """Compute attention whose K and V are made from latents: tokens of answers attend to the latents themselves.

    Latents and rotary keys are [1, 1, rows, size]. Returns [1, T, heads, size].
    """
    step = current_step.get()
    is_answer = step.batch.answer_rows
    found: list[Tensor] = []
    if not is_answer.all():
        found.append(step.compute_attention(query, *expand_latents(module, latents, rope_keys), how))
    if is_answer.any():
        keys = torch.cat((latents, rope_keys), -1)
        found.append(
            heads.project(step.compute_attention(heads.absorb(query, rope_keys.shape[-1]), keys, latents, how))
        )
    return found[0] if len(found) == 1 else torch.where(is_answer[:, None, None], found[1], found[0])


AttentionInterface.register(ATTENTION_NAME, paged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, make_mask_rule)
