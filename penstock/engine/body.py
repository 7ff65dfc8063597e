"""A whole model of the common form, computed without its own forward passes.

With small models and small batches those take longer than the arithmetic.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.engine.hooks import current_batch
from penstock.engine.layer import NativeLayer

_MODEL_CHILDREN = {"model", "lm_head"}
_INNER_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}


class Output(NamedTuple):
    """The part of transformers' model output that the engine reads."""

    logits: Tensor


class NativeBody(nn.Module):
    """Embedding, native layers without windows, norm and head."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        inner = module.model
        self._embed, self._rotary, self._norm, self._head = (
            inner.embed_tokens, inner.rotary_emb, inner.norm, module.lm_head,
        )  # fmt: skip
        self._layers: list[NativeLayer] = list(inner.layers)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor | None = None, **kwargs: Any
    ) -> Output:
        """Write K and V to the pool, and map token ids [1, T] to logits [1, T or rows to keep, vocabulary]."""
        paged = current_batch.get().paged
        assert paged is not None
        x = self._embed(input_ids)
        tables = self._rotary(x, position_ids)
        for layer in self._layers:
            x = layer.compute(paged, x, tables, None)
        if logits_to_keep is not None:
            x = x[:, logits_to_keep]
        return Output(self._head(self._norm(x)))


def make_native_body(module: Any) -> NativeBody | None:
    """Return the model as one body if it is built like Llama and all its layers are native; otherwise None.

    As with layers, the caller compares what it computes with the original.
    """
    if {name for name, _ in module.named_children()} != _MODEL_CHILDREN:
        return None
    if {name for name, _ in module.model.named_children()} != _INNER_CHILDREN:
        return None
    if not all(isinstance(layer, NativeLayer) and layer.attention.window is None for layer in module.model.layers):
        return None
    return NativeBody(module)
