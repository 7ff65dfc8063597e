"""The top tokens of a row of scores, in order: falling score, and of equal ones the lowest id first.

A vocabulary of 150,000 is not sorted for its first hundred. A row is cut in blocks of neighbouring ids; the first k
tokens lie in the k blocks with the highest maxima, and only those are looked at.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.engine.kernels import library
from penstock.engine.kernels.packed import DTYPES, find_best_columns

BLOCK_TOKENS = 64
MAX_BLOCKWISE_TOKENS = 128
"""More tokens than this are ranked by looking at the whole row."""
_CHUNK_SCORES = 2**18
"""Scores processed at once on a CPU, so that intermediate results stay in the processor's cache."""
_DEVICE_CHUNK_SCORES = 2**24
"""The same on a device, where each operation costs a launch."""


def count_chunk_rows(scores: Tensor) -> int:
    """Return how many rows of `scores` [rows, vocabulary] are to be processed at once."""
    return max(1, (_CHUNK_SCORES if scores.device.type == "cpu" else _DEVICE_CHUNK_SCORES) // scores.shape[1])


def reduce_blocks(scores: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """`reduce` over the last dimension of each block, the last may be short: [rows, vocabulary] to [rows, blocks]."""
    full = scores.shape[1] // BLOCK_TOKENS
    found = reduce(scores[:, : full * BLOCK_TOKENS].view(len(scores), full, BLOCK_TOKENS))
    if full * BLOCK_TOKENS == scores.shape[1]:
        return found
    return torch.cat([found, reduce(scores[:, None, full * BLOCK_TOKENS :])], 1)


def gather_blocks(scores: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores and ids of all tokens in `blocks` [rows, n]: two tensors [rows, n * BLOCK_TOKENS].

    Where the last block is short, the ids beyond the vocabulary have a score of minus infinity.
    """
    size = scores.shape[1]
    ids = (blocks[:, :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=scores.device)).flatten(1)
    found = scores.gather(1, ids.clamp(max=size - 1))
    return (found if size % BLOCK_TOKENS == 0 else found.masked_fill_(ids >= size, -torch.inf)), ids


def argmax_lowest_id(scores: Tensor) -> list[int]:
    """Return the id of each row's highest score, the lowest of equal ones. Scores are [rows, vocabulary]."""
    native = library.load_library()
    if native is not None and scores.device.type == "cpu" and scores.dtype in DTYPES and scores.stride(1) == 1:
        return find_best_columns(native, scores)
    scores = scores.float()
    block = reduce_blocks(scores, _block_maximum).argmax(-1, keepdim=True)
    found, ids = gather_blocks(scores, block)
    return list(ids.gather(1, found.argmax(-1, keepdim=True))[:, 0].tolist())


def top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return scores and ids of each row's top `count` tokens, in order: two of [rows, count]. Scores are float32."""
    size = scores.shape[1]
    ids = torch.arange(size, device=scores.device)[None]
    if count <= MAX_BLOCKWISE_TOKENS and size > MAX_BLOCKWISE_TOKENS * BLOCK_TOKENS:
        maxima = reduce_blocks(scores, _block_maximum)
        return _top_of(*gather_blocks(scores, _top_indices(maxima, ids[:, : maxima.shape[1]], count)), count)
    step = count_chunk_rows(scores)
    chunks = [scores[begin : begin + step] for begin in range(0, len(scores), step)]
    parts = [_top_of(chunk, ids.expand_as(chunk), count) for chunk in chunks]
    return torch.cat([found for found, _ in parts]), torch.cat([ids for _, ids in parts])


def _block_maximum(blocks: Tensor) -> Tensor:
    return blocks.amax(-1)


def _top_of(scores: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    places = _top_indices(scores, ids, count)
    return scores.gather(1, places), ids.gather(1, places)


def _top_indices(scores: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the indices of the top `count` tokens, in order. No two tokens have the same key."""
    bits = (scores + 0.0).view(torch.int32)  # a zero has no sign any more
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as integers these compare as the floats do
    keys = ids - (rising.long() << 32)
    if count < keys.shape[1]:
        return keys.topk(count, largest=False).indices
    if keys.device.type != "cpu":
        return keys.sort(dim=-1).indices
    return torch.stack([row.sort().indices for row in keys])  # on a CPU one dimension is sorted faster than two
