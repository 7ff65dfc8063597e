"""Find out whether an architecture can be served, and what its layers cache."""

import inspect
from typing import Any

import torch
from torch import Tensor

from penstock.engine import hooks
from penstock.engine.batch import Batch
from penstock.engine.masks import Unsupported
from penstock.engine.sequence import Sequence
from penstock.engine.step import Step
from penstock.engine.storage import KVLayout, KVStorage, LayerShape
from penstock.errors import ModelLoadError
from penstock.messages import Sampling

_STATEFUL = {"linear_attention", "recurrent", "conv", "hybrid", "hybrid_sliding"}
"""transformers' names of layers that keep a state."""
_SPARSE = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
"""transformers' names of layers with sparse attention."""


class _ProbeStep(Step):
    """Records the shapes of what each layer would cache, and stores nothing."""

    def __init__(self, batch: Batch, dtype: torch.dtype) -> None:
        super().__init__(batch, KVStorage(KVLayout((), 1, dtype), 1, batch.device))
        self.shapes: dict[int, LayerShape] = {}

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Record the shapes of K and V, both [1, heads, T, size], and return K and V."""
        k_shape, v_shape = ((x.shape[1], x.shape[3]) for x in (key, value))
        self.shapes[layer] = LayerShape(layer, k_shape, v_shape)
        return key, value


def check_config(config: Any) -> None:
    """Raise `ModelLoadError` if the configuration shows that the model cannot be served."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError("it is an encoder-decoder model; only decoder-only models can be served")
    text = config.get_text_config(decoder=True)
    kinds: set[str] = set()
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds.update(getattr(text, name, None) or [])
    if kinds & _STATEFUL:
        raise ModelLoadError(
            "it cannot be served: some layers keep a recurrent or convolution state, not keys and values"
        )
    if kinds & _SPARSE:
        raise ModelLoadError(
            "it cannot be served: its attention is sparse, an indexer or a compressor chooses what is seen"
        )


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
def probe_layout(module: Any, block_size: int, dtype: torch.dtype, device: torch.device) -> KVLayout:
    """Run the module on one token, and return the layout of what its layers cache.

    Raises `ModelLoadError` with the reason why the architecture cannot be served.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    seq = Sequence("probe", [0], sampling=Sampling(), seed=0, max_new_tokens=1)
    seq.block_table = [0]
    step = _ProbeStep(Batch([(seq, 1)], 1, device), dtype)
    try:
        with hooks.run_with_step(module, step):
            module(input_ids=token, position_ids=token, past_key_values=hooks.PagedCache(), use_cache=True)
        _check_attention_hooked(step)
    except Exception as error:
        reason = str(error) if isinstance(error, Unsupported) else _explain_failure(module, error)
        raise ModelLoadError(f"architecture {type(module).__name__} cannot be served: {reason}") from error
    return KVLayout(tuple(step.shapes[layer] for layer in sorted(step.shapes)), block_size, dtype)


def _check_attention_hooked(step: _ProbeStep) -> None:
    """Raise `Unsupported` unless every layer that caches anything called the engine's attention."""
    if not step.shapes:
        raise Unsupported("it caches no keys and values")
    if step.num_attention_calls < len(step.shapes):
        raise Unsupported("it computes its attention inside its own modules, not through transformers' interface")


def _explain_failure(module: Any, error: Exception) -> str:
    """Return the reason for an unexpected error of the module's forward pass, as a clause."""
    parameters = inspect.signature(module.forward).parameters
    if "past_key_values" not in parameters:
        return "it has no cache of keys and values"
    text = " ".join(str(error).split())[:200]
    return f"its forward pass does not run on paged keys and values ({type(error).__name__}: {text})"
