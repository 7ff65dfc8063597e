"""The first tokens of a row of scores, in order: falling score, and of equal ones the lowest id first.

A vocabulary of 150,000 is not sorted for its first hundred. A row is cut in blocks of neighbouring ids; the first k
tokens lie in the k blocks with the highest maxima, and only those are looked at.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.kernels import library
from penstock.engine.kernels.packed import DTYPES, native_best

BLOCK = 64
MAX_BY_BLOCKS = 128
"""More tokens than this are ranked by looking at the whole row."""
_CHUNK = 2**18
"""Tokens ranked at once otherwise: what comes between stays in the processor's cache."""


def by_block(scores: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce` over the last dimension of each block, the last may be short: [rows, vocabulary] to [rows, blocks]."""
    full = scores.shape[1] // BLOCK
    found = reduce(scores[:, : full * BLOCK].view(len(scores), full, BLOCK))
    if full * BLOCK == scores.shape[1]:
        return found
    return torch.cat([found, reduce(scores[:, None, full * BLOCK :])], 1)


def in_blocks(scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and ids of all tokens in `blocks` [rows, n]: two of [rows, n * BLOCK].

    Where the last block is short, the ids beyond the vocabulary have a score of minus infinity.
    """
    size = scores.shape[1]
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=scores.device)).flatten(1)
    found = scores.gather(1, ids.clamp(max=size - 1))
    return (found if size % BLOCK == 0 else found.masked_fill_(ids >= size, -torch.inf)), ids


def best(scores: Tensor) -> Tensor:
    """Id of each row's highest score, the lowest of equal ones: [rows]. Scores may be of any floating dtype."""
    native = library.load()
    if native is not None and scores.device.type == "cpu" and scores.dtype in DTYPES and scores.stride(1) == 1:
        return native_best(native, scores)
    scores = scores.float()
    block = by_block(scores, _maximum).argmax(-1, keepdim=True)
    found, ids = in_blocks(scores, block)
    return ids.gather(1, found.argmax(-1, keepdim=True))[:, 0]


def first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Scores and ids of each row's first `count` tokens, in order: two of [rows, count]. Scores are float32."""
    size = scores.shape[1]
    ids = torch.arange(size, device=scores.device)[None]
    if count <= MAX_BY_BLOCKS and size > MAX_BY_BLOCKS * BLOCK:
        maxima = by_block(scores, _maximum)
        return _first_of(*in_blocks(scores, _order(maxima, ids[:, : maxima.shape[1]], count)), count)
    step = max(1, _CHUNK // size)
    chunks = [scores[begin : begin + step] for begin in range(0, len(scores), step)]
    parts = [_first_of(chunk, ids.expand_as(chunk), count) for chunk in chunks]
    return torch.cat([found for found, _ in parts]), torch.cat([ids for _, ids in parts])


def _maximum(blocks: Tensor) -> Tensor:
    return blocks.amax(-1)


def _first_of(scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    places = _order(scores, ids, count)
    return scores.gather(1, places), ids.gather(1, places)


def _order(scores: Tensor, ids: Tensor, count: int) -> Tensor:
    """Where the first `count` of the given tokens are, in order. No two tokens have the same key."""
    bits = (scores + 0.0).view(torch.int32)  # a zero has no sign any more
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as integers these compare as the floats do
    keys = ids - (rising.long() << 32)
    if count < keys.shape[1]:
        return keys.topk(count, largest=False).indices
    return torch.stack([row.sort().indices for row in keys])  # one dimension is sorted faster than two
