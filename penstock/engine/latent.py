"""Multi-head latent attention on the cached latents themselves: the projections to K and V are absorbed.

A layer with `kv_b_proj` caches for each token a latent [rank] and a rotary key [rope], which all heads share.
transformers makes K and V of all heads from the latents of the whole context (`expand_kv`). Here the query goes into
the space of the latents instead, W_UK^T q, attention runs over [latent, rotary key] with one KV head, and the sum of
latents goes through W_UV. The method is DeepSeek-V2's (arXiv:2405.04434, section 2.1.2). Every token is computed so,
in chunks and alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.step import current_step


class KeptLatents:
    """Takes the place of a module's `expand_kv`: within a step of the engine the latents stay as they are."""

    def __init__(self, module: Any) -> None:
        self._module, self._plain = module, module.expand_kv

    def __call__(self, latents: Tensor, rope_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents [1, 1, rows, rank] and rotary keys [1, 1, rows, rope] of a step; else K and V."""
        if current_step.get(None) is None:
            expanded: tuple[Tensor, Tensor] = self._plain(latents, rope_keys)
            return expanded
        return latents, rope_keys

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries [1, heads, T, nope + rope] in the space of the latents: [1, heads, T, rank + rope]."""
        keys, _ = self._weights()
        size = keys.shape[1]
        return torch.cat((query[..., :size] @ keys, query[..., size:]), -1)

    def project(self, sums: Tensor) -> Tensor:
        """Return sums of latents, [1, T, heads, rank], as the heads' outputs: [1, T, heads, size of V]."""
        _, values = self._weights()
        return (sums.transpose(1, 2) @ values.transpose(1, 2)).transpose(1, 2)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return views of W_UK [heads, nope, rank] and W_UV [heads, size of V, rank]."""
        nope, v_size = self._module.qk_nope_head_dim, self._module.v_head_dim
        weight = self._module.kv_b_proj.weight
        by_head = weight.view(-1, nope + v_size, weight.shape[1])
        return by_head[:, :nope], by_head[:, nope:]


def find_latent_layers(root: nn.Module) -> Iterator[Any]:
    """Yield the modules whose K and V are made from latents by a linear layer without bias."""
    part: Any
    for part in root.modules():
        linear = getattr(part, "kv_b_proj", None)
        if hasattr(part, "expand_kv") and type(linear) is nn.Linear and linear.bias is None:
            yield part


def absorb_projections(root: nn.Module) -> list[Any]:
    """Let the latent layers compute the steps of the engine on latents, and return these modules."""
    parts = [part for part in find_latent_layers(root) if not isinstance(part.expand_kv, KeptLatents)]
    for part in parts:
        part.expand_kv = KeptLatents(part)
    return parts


def restore_projections(parts: list[Any]) -> None:
    """Let these modules make K and V from the latents again."""
    for part in parts:
        del part.expand_kv
