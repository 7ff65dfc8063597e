"""Attention in torch over rows gathered from the pool, for layers that no kernel computes."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.gathered import Causal, GatheredRows, Mask, Masks

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ScoreParams:
    """How attention scores follow from queries and keys."""

    scale: float
    softcap: float | None
    sinks: Tensor | None
    """[heads]"""


@dataclass(frozen=True)
class LayerAttention:
    """The parameters of a layer's attention, as its model passed them."""

    num_heads: int
    """Number of query heads."""
    scores: ScoreParams
    rule: object
    """The mask that the model passed."""
    window: int | None
    """A sliding window besides the mask."""


def attend_gathered(gathered: GatheredRows, qkv: QKV, masks: Masks, how: ScoreParams) -> Tensor:
    """Compute attention: query [1, heads, T, size], K and V [1, kv heads, rows, size] to [1, T, heads, size of V]."""
    query, key, value = qkv
    outputs = []
    if gathered.num_single:
        outputs.append(_attend_single_tokens(gathered, qkv, masks.single, how))
    for chunk, mask in zip(gathered.chunks, masks.chunks, strict=True):
        part = (query[:, :, chunk.query], key[:, :, chunk.rows], value[:, :, chunk.rows])
        outputs.append(_compute_attention(part, mask, how)[0].transpose(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _attend_single_tokens(gathered: GatheredRows, qkv: QKV, mask: Mask, how: ScoreParams) -> Tensor:
    """Compute attention of all sequences with one new token at once; returns [num_single, heads, size].

    The query heads that share a KV head take the place of the query's length, so that no K or V is repeated.
    """
    query, key, value = qkv
    q = query[0, :, : gathered.num_single].transpose(0, 1)
    grouped = q.reshape(gathered.num_single, key.shape[1], -1, q.shape[-1])
    return _compute_attention(
        (grouped, _split_by_sequence(gathered, key), _split_by_sequence(gathered, value)), mask, how
    ).flatten(1, 2)


def _split_by_sequence(gathered: GatheredRows, rows: Tensor) -> Tensor:
    """Return the rows [1, heads, rows, size] of sequences with one new token as [num_single, heads, length, size]."""
    num, padded = gathered.num_single, gathered.rows_per_single
    part = rows[0, :, : num * padded]
    return part.view(len(part), num, padded, -1)[:, :, : gathered.max_single_length].transpose(0, 1)


def _compute_attention(qkv: QKV, mask: Mask, how: ScoreParams) -> Tensor:
    """Compute attention: query [B, heads, T, size], K and V [B, kv heads, L, size] to [B, heads, T, size of V]."""
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
