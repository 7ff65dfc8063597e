"""The top tokens of a row of scores, in order: falling score, and of equal ones the lowest id first.

A vocabulary of 150,000 is not sorted for its first hundred. A row is cut in blocks of neighbouring ids; the first k
tokens lie in the k blocks with the highest maxima, and only those are looked at.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def top_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return scores and ids of each row's top `count` tokens, in order: two of [rows, count]. Scores are float32."""
    found, ids = scores, _number(scores)
    if count <= MAX_BLOCKWISE_TOKENS and scores.shape[1] > MAX_BLOCKWISE_TOKENS * BLOCK_TOKENS:
        scores = pad(scores, (0, -scores.shape[1] % BLOCK_TOKENS), value=-torch.inf)
        maxima = scores.reshape(len(scores), -1, BLOCK_TOKENS).amax(-1)
        blocks = _top_indices(maxima, _number(maxima), count)
        ids = (blocks[:, :, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=scores.device)).flatten(1)
        found = scores.gather(1, ids)
    places = _top_indices(found, ids, count)
    return found.gather(1, places), ids.gather(1, places)


def _number(scores: Tensor) -> Tensor:
    """Return the number of each column: like `scores`."""
    return torch.arange(scores.shape[1], device=scores.device).expand_as(scores)


def _top_indices(scores: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the indices of the top `count` tokens, in order. No two tokens have the same key."""
    bits = (scores + 0.0).view(torch.int32)  # a zero has no sign any more
    rising = bits ^ (bits >> 31 & 0x7FFFFFFF)  # as integers these compare as the floats do
    keys = ids - (rising.long() << 32)
    return keys.topk(count, largest=False).indices if count < keys.shape[1] else keys.sort(dim=-1).indices
