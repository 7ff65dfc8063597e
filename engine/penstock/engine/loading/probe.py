"""Find out whether an architecture can be served, and what its layers cache."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from penstock.engine.memory.states import (
    StateLayout,
    StatePart,
    StateStorage,
    choose_interval_tokens,
    choose_scan_chunk_tokens,
)
from penstock.engine.memory.storage import BlockLayout, KVStorage, LayerShape, number_index_keys
from penstock.engine.model.mixers import divide_mixers, is_near
from penstock.engine.model.trial import draw_tokens, make_trial_sequence
from penstock.engine.steps import hooks
from penstock.engine.steps.masks import OwnAttention, Unsupported
from penstock.engine.steps.step import SingleSequenceStep, Step, make_step
from penstock.engine.steps.step_batch import StepBatch
from penstock.errors import ModelLoadError

_MAX_STATES = 8
"""How many states of a kind a layer may keep."""
_NUM_PIECE_TOKENS = 4
"""Tokens of a piece that is compared with its tokens one by one."""
_COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
"""transformers' names of layers that cache sums over several tokens."""


class _ProbeStep(Step):
    """Records the shapes of what each layer would cache, and stores nothing."""

    def __init__(self, batch: StepBatch, storage: KVStorage) -> None:
        super().__init__(batch, storage)
        self.shapes: dict[int, LayerShape] = {}
        self.states: dict[int, LinearAttentionLayer] = {}
        """By layer: the states that it keeps."""
        self.mixers: dict[int, nn.Module] = {}
        """By layer: the module that keeps them."""
        self.running: list[nn.Module] = []
        """The modules whose forward passes run now, the innermost last."""

    def find_state(self, layer: int) -> LinearAttentionLayer:
        """Return a layer's states, and note which module keeps them."""
        if self.mixers.setdefault(layer, self.running[-1]) is not self.running[-1]:
            raise Unsupported("two modules keep the state of one layer")
        return self.states.setdefault(layer, LinearAttentionLayer(number_of_states=_MAX_STATES))

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Record the shapes of K and V, both [1, heads, T, size], and return K and V."""
        k_shape, v_shape = ((x.shape[1], x.shape[3]) for x in (key, value))
        self.shapes[layer] = LayerShape(layer, k_shape, v_shape)
        return key, value


class _SingleSequenceProbeStep(_ProbeStep, SingleSequenceStep):
    """The same for a model that attends by itself."""

    def write_index_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Record the shape of an indexer's keys, [1, T, size], and return them."""
        number = number_index_keys(layer)
        self.shapes[number] = LayerShape(number, (1, keys.shape[2]), (0, 0))
        return keys


def check_config(config: Any) -> None:
    """Raise `ModelLoadError` if the configuration shows that the model cannot be served."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError("it is an encoder-decoder model; only decoder-only models can be served")
    text = config.get_text_config(decoder=True)
    kinds: set[str] = set()
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds.update(getattr(text, name, None) or [])
    if kinds & _COMPRESSED:
        raise ModelLoadError("it cannot be served: its layers compress several tokens to one, and cache that")
    if "reference_sliding_attention" in kinds:
        raise ModelLoadError("it cannot be served: its layers see the whole prompt, and only the last of the answer")


def find_unscaled_context(config: Any) -> int | None:
    """Return the number of tokens up to which the rotary embedding does not depend on the batch; None: any number.

    With some kinds of rope transformers takes other frequencies for all rows once the longest sequence of the batch
    exceeds this length, and a token would depend on its neighbours.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = [
        part.get("original_max_position_embeddings") or config.max_position_embeddings
        for part in [rope, *rope.values()]
        if isinstance(part, dict) and part.get("rope_type") in ("longrope", "dynamic")
    ]
    return min(lengths, default=None)


@torch.inference_mode()
def probe_layout(
    module: Any, block_size: int, dtype: torch.dtype, device: torch.device, scan_chunk_tokens: int | None = None
) -> BlockLayout:
    """Run the module on one token, and return the layout of what its layers cache.

    Its layers that keep a state are made to read each sequence in scan chunks of `scan_chunk_tokens` from now on.
    Raises `ModelLoadError` with the reason why the architecture cannot be served.
    """
    try:
        step = _record_shapes(module, dtype, device)
        if step.mixers and device.type != "cpu":
            raise Unsupported("models whose layers keep a recurrent or convolution state are served on a CPU only")
        shapes = tuple(step.shapes[layer] for layer in sorted(step.shapes))
        layout = BlockLayout(shapes, block_size, dtype, attends_internally=isinstance(step, SingleSequenceStep))
        if step.mixers:
            layout = replace(layout, states=_probe_states(module, step, layout, scan_chunk_tokens))
    except Exception as error:
        reason = str(error) if isinstance(error, Unsupported) else _explain_failure(module, error)
        raise ModelLoadError(f"architecture {type(module).__name__} cannot be served: {reason}") from error
    return layout


def _record_shapes(module: Any, dtype: torch.dtype, device: torch.device) -> _ProbeStep:
    """Run the module on one token, and return the step that has recorded what it would cache.

    The step is a `SingleSequenceStep` where the module attends by itself. Raises `Unsupported`.
    """
    seq = make_trial_sequence([0], blocks=[0])
    batch, storage = StepBatch([(seq, 1)], 1, device), KVStorage(BlockLayout((), 1, dtype), 1, device)
    try:
        return _run_probe(module, _ProbeStep(batch, storage))
    except OwnAttention as error:
        if device.type != "cpu":
            raise Unsupported(f"{error}; such models are served on a CPU only") from error
        return _run_probe(module, _SingleSequenceProbeStep(batch, storage))


def _run_probe(module: Any, step: _ProbeStep) -> _ProbeStep:
    with _note_running(module, step.running):
        hooks.run_module(module, step)
    if not step.shapes:
        raise Unsupported("it caches no keys and values")
    if step.num_attention_calls < len(step.shapes) and not isinstance(step, SingleSequenceStep):
        raise OwnAttention("it computes its attention inside its own modules, not through transformers' interface")
    return step


def _probe_states(module: Any, step: _ProbeStep, layout: BlockLayout, scan_chunk_tokens: int | None) -> StateLayout:
    """Return the layout of the states that a step has noted, and let the layers read scan chunks from now on."""
    scan_chunk_tokens = scan_chunk_tokens or choose_scan_chunk_tokens(layout.block_size)
    divide_mixers(step.mixers, scan_chunk_tokens)
    states = StateLayout(tuple(_describe_states(step.states)), scan_chunk_tokens, 0)
    interval = choose_interval_tokens(states.row_bytes, layout.block_bytes / layout.block_size, scan_chunk_tokens)
    states = replace(states, interval_tokens=interval)
    firsts = {type(mixer): layer for layer, mixer in sorted(step.mixers.items(), reverse=True)}
    device = step.batch.device
    continues = _continues_in_pieces(module, replace(layout, states=states), set(firsts.values()), device)
    return replace(states, continues=continues)


def _continues_in_pieces(module: Any, layout: BlockLayout, layers: set[int], device: torch.device) -> bool:
    """Return whether these layers have the same states after a piece as after its tokens one by one."""
    half = _NUM_PIECE_TOKENS
    ids = draw_tokens(module.get_input_embeddings().num_embeddings, 2 * half, 7)
    found: list[StateStorage] = []
    for chunks in ([half, half], [half] + [1] * half):
        storage = KVStorage(layout, -(-2 * half // layout.block_size), device)
        assert storage.states is not None
        seq = make_trial_sequence(ids, blocks=range(len(storage.data)))
        for num_tokens in chunks:
            batch = StepBatch([(seq, num_tokens)], layout.block_size, device)
            hooks.run_module(module, make_step(batch, storage))
            seq.num_computed_tokens += num_tokens
        found.append(storage.states)
    return all(is_near(found[0], found[1], layer, layout.dtype) for layer in layers)


@contextmanager
def _note_running(module: nn.Module, running: list[nn.Module]) -> Iterator[None]:
    """Keep `running` up to date with the modules whose forward passes run within the context."""

    def begin(part: nn.Module, args: Any) -> None:
        running.append(part)

    def end(part: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    handles = [part.register_forward_pre_hook(begin) for part in module.modules()]
    handles += [part.register_forward_hook(end) for part in module.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _describe_states(states: dict[int, LinearAttentionLayer]) -> Iterator[StatePart]:
    """Yield the parts of a state as the layers have made them."""
    for layer in sorted(states):
        kinds: tuple[tuple[Literal["conv", "recurrent"], dict[int, Tensor | None]], ...] = (
            ("conv", states[layer].conv_states),
            ("recurrent", states[layer].recurrent_states),
        )
        for kind, tensors in kinds:
            for index, tensor in tensors.items():
                if tensor is not None:
                    yield StatePart(layer, kind, index, tuple(tensor.shape[1:]), tensor.dtype)


def _explain_failure(module: Any, error: Exception) -> str:
    """Return the reason for an unexpected error of the module's forward pass, as a clause."""
    parameters = inspect.signature(module.forward).parameters
    if "past_key_values" not in parameters:
        return "it has no cache of keys and values"
    text = " ".join(str(error).split())[:200]
    return f"its forward pass does not run on paged keys and values ({type(error).__name__}: {text})"
