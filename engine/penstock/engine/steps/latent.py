"""Multi-head latent attention on the cached latents themselves: the projections to K and V are absorbed.

A layer with `kv_b_proj` caches for each token a latent [rank] and a rotary key [rope], which all heads share.
transformers makes K and V of all heads from the latents of the whole context (`expand_kv`). For tokens of answers the
query goes into the space of the latents instead, W_UK^T q. Attention runs over [latent, rotary key] with one KV head,
and the sum of latents goes through W_UV. The method is DeepSeek-V2's (arXiv:2405.04434, section 2.1.2). Tokens of
prompts attend to K and V: for many tokens at a time that is less work. So the place of a token says how it is computed,
and not what is computed beside it. Each head has two linear layers of its own, which are packed like all others.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from penstock.engine.kernels.packed import make_linear


class LatentHeads(nn.Module):
    """`kv_b_proj` for an attention that runs on latents: by head, a layer for queries and one for sums."""

    def __init__(self, num_heads: int) -> None:
        """Make it with a place for each layer."""
        super().__init__()
        self.queries = nn.ModuleList(nn.Identity() for _ in range(num_heads))
        """W_UK^T: [nope] to [rank]."""
        self.sums = nn.ModuleList(nn.Identity() for _ in range(num_heads))
        """W_UV: [rank] to [size of V]."""

    def absorb(self, query: Tensor, rope: int) -> Tensor:
        """Return queries [1, heads, T, nope + rope] in the space of the latents: [1, heads, T, rank + rope]."""
        nope = query.shape[-1] - rope
        parts = [linear(query[:, head, :, :nope].contiguous()) for head, linear in enumerate(self.queries)]
        return torch.cat((torch.stack(parts, 1), query[..., nope:]), -1)

    def project(self, sums: Tensor) -> Tensor:
        """Return sums of latents, [1, T, heads, rank], as the heads' outputs: [1, T, heads, size of V]."""
        return torch.stack([linear(sums[:, :, head].contiguous()) for head, linear in enumerate(self.sums)], 2)


def find_latent_layers(root: nn.Module) -> Iterator[Any]:
    """Yield the modules whose K and V are made from latents by a linear layer without bias."""
    part: Any
    for part in root.modules():
        linear = getattr(part, "kv_b_proj", None)
        if hasattr(part, "expand_kv") and type(linear) is nn.Linear and len(dict(linear.named_parameters())) == 1:
            yield part


def make_latent_heads(part: Any) -> LatentHeads:
    """Return the linear layers of a module's heads, with the weights of its `kv_b_proj`."""
    nope, v_size, weight = part.qk_nope_head_dim, part.v_head_dim, part.kv_b_proj.weight.detach()
    by_head = weight.view(-1, nope + v_size, weight.shape[1])
    heads = LatentHeads(len(by_head))
    for number, rows in enumerate(by_head):
        heads.queries[number] = make_linear(rows[:nope].T.contiguous())
        heads.sums[number] = make_linear(rows[nope:].clone())
    return heads


def set_latent_heads(part: Any, heads: nn.Module) -> None:
    """Let a module hand its attention the latents in the place of K and V, and these heads."""
    part.latent_heads, part.expand_kv = heads, _keep_latents


def expand_latents(part: Any, latents: Tensor, rope_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of all heads as the module itself makes them: [1, heads, rows, size]."""
    expanded: tuple[Tensor, Tensor] = type(part).expand_kv(part, latents, rope_keys)
    return expanded


def attend_twice(part: Any, heads: LatentHeads, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the attention of random queries over random latents by a module's K and V, and by `heads` on the latents.

    Both are [1, tokens, heads, size of V], in float32 but for the projections.
    """
    weight, rope, generator = part.kv_b_proj.weight, part.qk_rope_head_dim, torch.Generator().manual_seed(3)

    def draw(num_heads: int, size: int) -> Tensor:
        return torch.randn(1, num_heads, num_tokens, size, generator=generator).to(weight.dtype)

    latents, rope_keys = draw(1, weight.shape[1]), draw(1, rope)
    query = draw(len(heads.queries), part.qk_nope_head_dim + rope)
    keys, values = part.expand_kv(latents, rope_keys)
    scale = query.shape[-1] ** -0.5
    right = attend(query.float(), keys.float(), values.float(), is_causal=True, scale=scale)
    shared = torch.cat((latents, rope_keys), -1).float()
    absorbed = heads.absorb(query, rope).float()
    sums = attend(absorbed, shared, latents.float(), is_causal=True, scale=scale, enable_gqa=True)
    return right.transpose(1, 2), heads.project(sums.transpose(1, 2).to(weight.dtype)).float()


def _keep_latents(latents: Tensor, rope_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the latents [1, 1, rows, rank] and the rotary keys [1, 1, rows, rope] as they are."""
    return latents, rope_keys
