"""Attention in torch over rows that are gathered from the pool, for layers that no kernel computes.

Rows are ordered: `num_single` sequences with one new token (decodes), attended to in one call over padded block
tables, then the chunks of prompts, one call each. The gathered rows have the same order: `num_single` x
`single_padded` rows, then each chunk's.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.sequence import Plan
from penstock.engine.steps.masks import Visibility, find_visibility

# Not cuDNN's, which makes a plan for each number of rows: a decode step has another one than the step before it, and a
# prompt another one than most prompts. On an H200 with torch 2.11 a plan took 1.5 ms for each layer and step, beside
# 0.02 ms of computing. The engine alone reads prompts of one length 1.3 to 1.6 times as fast with it, those of
# unlike lengths at 0.8 to 0.9; a pipeline has 0.6 to 0.8 of the tokens.
GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Causal(Enum):
    """A mask for which no tensor is needed."""

    PLAIN = "plain"
    """There are as many queries as keys, and each query sees the keys up to its own position."""


Mask = Tensor | Causal | None
"""Added to the scores; None masks nothing."""


@dataclass(frozen=True)
class Masks:
    """The masks of one kind of layer."""

    single: Mask
    """[num_single, 1, 1, single_len]"""
    chunks: list[Mask]
    """For each chunk: [new tokens, all tokens]."""


@dataclass(frozen=True)
class Chunk:
    """The part of one sequence that is computed in this step, from token `start` to before `end`."""

    start: int
    end: int
    query: slice
    """The chunk's tokens in the flat batch."""
    rows: slice
    """The sequence's rows among the gathered rows."""


class GatheredRows:
    """The blocks to gather for a plan in the batch's order, and which of their rows each sequence sees."""

    def __init__(self, plan: Plan, block_size: int, device: torch.device) -> None:
        singles = [seq for seq, num in plan if num == 1]
        self.num_single = len(singles)
        self.chunks: list[Chunk] = []
        self._device = device
        self._single_lens = [seq.num_computed_tokens + 1 for seq in singles]
        self.max_single_length = max(self._single_lens, default=0)
        """Length of the longest sequence with one new token."""
        self.rows_per_single = -(-self.max_single_length // block_size) * block_size
        """Gathered rows for each sequence with one new token."""
        table: list[int] = []
        row = 0
        for seq, num in plan:
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + num
            held = seq.block_table[: -(-end // block_size)]
            if num > 1:
                first = len(table) * block_size
                self.chunks.append(Chunk(start, end, slice(row, row + num), slice(first, first + end)))
            table += held
            if num == 1:
                # Padded with the sequence's own first block, so that masked rows are its own, too.
                table += held[:1] * (self.rows_per_single // block_size - len(held))
            row += num
        self.num_rows = len(table) * block_size
        """Number of gathered rows."""
        self.block_ids = torch.tensor(table, device=device)
        """The blocks to gather: [blocks]."""
        self._masks: dict[tuple[Visibility | None, torch.dtype], Masks] = {}
        """By kind of layer."""

    def find_masks(self, visible: Visibility | None, dtype: torch.dtype) -> Masks:
        """Return the masks of layers with this visibility, made for the first of them."""
        if (masks := self._masks.get((visible, dtype))) is None:
            chunks = [self._chunk_mask(chunk, visible, dtype) for chunk in self.chunks]
            masks = self._masks[visible, dtype] = Masks(self._single_mask(visible, dtype), chunks)
        return masks

    def _single_mask(self, visible: Visibility | None, dtype: torch.dtype) -> Mask:
        if visible is None and min(self._single_lens, default=0) == self.max_single_length:
            return None
        query = torch.tensor(self._single_lens, device=self._device)[:, None] - 1
        key = torch.arange(self.max_single_length, device=self._device)[None]
        return _make_additive_mask(query, key, visible, dtype)[:, None, None]

    def _chunk_mask(self, chunk: Chunk, visible: Visibility | None, dtype: torch.dtype) -> Mask:
        if visible is None and chunk.start == 0:
            return Causal.PLAIN
        query = torch.arange(chunk.start, chunk.end, device=self._device)[:, None]
        key = torch.arange(chunk.end, device=self._device)[None]
        return _make_additive_mask(query, key, visible, dtype)


def _make_additive_mask(query: Tensor, key: Tensor, visible: Visibility | None, dtype: torch.dtype) -> Tensor:
    seen = key <= query
    if visible is not None:
        seen = seen & visible(query, key)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


class LayerAttention(NamedTuple):
    """The parameters of a layer's attention, as its model passed them."""

    scale: float
    """The factor of the products of queries and keys."""
    softcap: float | None
    """The bound of the scores."""
    sinks: Tensor | None
    """A learned extra score for each head: [heads]."""
    rule: object
    """The mask that the model passed."""
    window: int | None
    """A sliding window where there is no mask."""

    @property
    def visible(self) -> Visibility | None:
        """Which keys a token sees; None: all before it. Raises `OwnAttention` for a mask that the model made itself."""
        return find_visibility(self.rule, self.window)


QKV = tuple[Tensor, Tensor, Tensor]


def attend_gathered(gathered: GatheredRows, qkv: QKV, how: LayerAttention) -> Tensor:
    """Compute attention: query [1, heads, T, size], K and V [1, kv heads, rows, size] to [1, T, heads, size of V]."""
    query, key, value = qkv
    masks = gathered.find_masks(how.visible, query.dtype)
    outputs = []
    with sdpa_kernel(GPU_KERNELS) if query.is_cuda else nullcontext():
        if gathered.num_single:
            outputs.append(_attend_single_tokens(gathered, qkv, masks.single, how))
        for chunk, mask in zip(gathered.chunks, masks.chunks, strict=True):
            part = (query[:, :, chunk.query], key[:, :, chunk.rows], value[:, :, chunk.rows])
            outputs.append(_compute_attention(part, mask, how)[0].transpose(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _attend_single_tokens(gathered: GatheredRows, qkv: QKV, mask: Mask, how: LayerAttention) -> Tensor:
    """Compute attention of all sequences with one new token at once; returns [num_single, heads, size].

    The query heads that share a KV head take the place of the query's length, so that no K or V is repeated.
    """
    query, key, value = qkv
    q = query[0, :, : gathered.num_single].transpose(0, 1)
    grouped = q.reshape(gathered.num_single, key.shape[1], -1, q.shape[-1])
    parts = (grouped, _split_by_sequence(gathered, key), _split_by_sequence(gathered, value))
    return _compute_attention(parts, mask, how).flatten(1, 2)


def _split_by_sequence(gathered: GatheredRows, rows: Tensor) -> Tensor:
    """Return the rows [1, heads, rows, size] of sequences with one new token as [num_single, heads, length, size]."""
    num, padded = gathered.num_single, gathered.rows_per_single
    part = rows[0, :, : num * padded]
    return part.view(len(part), num, padded, -1)[:, :, : gathered.max_single_length].transpose(0, 1)


def _compute_attention(qkv: QKV, mask: Mask, how: LayerAttention) -> Tensor:
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
        # A sink takes its share of the probability and gives nothing. In `_attend_single_tokens` heads are rows.
        sink = how.sinks.reshape(1, q.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink.to(scores.dtype)], -1)
    probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return probabilities @ v.repeat_interleave(repeats, 1)
