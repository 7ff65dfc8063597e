"""Can this architecture be served? Asked of the module before anything is computed with it."""

import inspect
from typing import Any

import torch

from penstock.engine import hooks
from penstock.engine.batch import Batch
from penstock.engine.hooks import ProbeCache
from penstock.engine.masks import Unsupported
from penstock.engine.sequence import Sequence
from penstock.engine.storage import KVLayout
from penstock.errors import ModelLoadError
from penstock.messages import Sampling

_STATEFUL = {"linear_attention", "recurrent", "conv", "hybrid", "hybrid_sliding"}
_SPARSE = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
"""transformers' names of kinds of layers."""


def check_config(config: Any) -> None:
    """Raise `ModelLoadError` for what a configuration alone shows cannot be served."""
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
    """How many tokens the model takes before rope changes with the length of the longest sequence in the batch.

    transformers switches the frequencies of all rows then, so beyond it a token would depend on its neighbours. None if
    they never change.
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
    """Learn from one token what each layer caches, and that its attention comes to the engine.

    Raises `ModelLoadError` with the reason why the architecture cannot be served.
    """
    cache, token = ProbeCache(), torch.zeros(1, 1, dtype=torch.long, device=device)
    seq = Sequence("probe", [0], sampling=Sampling(), seed=0, max_new_tokens=1)
    seq.block_table = [0]
    batch = Batch([(seq, 1)], 1, device)
    try:
        with hooks.run_with_batch(module, batch):
            module(input_ids=token, position_ids=token, past_key_values=cache, use_cache=True)
        _check_attention_hooked(module, cache, batch)
    except Exception as error:
        reason = str(error) if isinstance(error, Unsupported) else _explain_failure(module, error)
        raise ModelLoadError(f"architecture {type(module).__name__} cannot be served: {reason}") from error
    return KVLayout(tuple(cache.shapes[layer] for layer in sorted(cache.shapes)), block_size, dtype)


def _check_attention_hooked(module: Any, cache: ProbeCache, batch: Batch) -> None:
    if not cache.shapes:
        raise Unsupported("it caches no keys and values")
    if batch.num_attention_calls < len(cache.shapes):
        raise Unsupported("it computes its attention inside its own modules, not through transformers' interface")


def _explain_failure(module: Any, error: Exception) -> str:
    parameters = inspect.signature(module.forward).parameters
    if "past_key_values" not in parameters:
        return "it has no cache of keys and values"
    text = " ".join(str(error).split())[:200]
    return f"its forward pass does not run on paged keys and values ({type(error).__name__}: {text})"
