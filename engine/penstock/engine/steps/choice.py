"""Which of several equal scores a sparse indexer chooses.

An indexer's score of a token is often exactly 0, where none of its heads wants the token. Which of the tokens with
equal scores `torch.topk` returns depends on how many scores there are, and so on the chunk in which a prompt is read:
transformers' own cached pass gives other tokens than its pass over a whole prompt. Here the first ones are chosen.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FirstOfEqual(TorchFunctionMode):
    """Within it `topk` chooses the first of the values that are equal to the least that it returns."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        found = func(*args, **(kwargs or {}))
        return _choose_first(args[0], found) if func in (Tensor.topk, torch.topk) else found


def _choose_first(scores: Tensor, found: Any) -> Any:
    """Return what `topk` found along the last dimension, with the first of equal values."""
    least = found.values.amin(-1, keepdim=True)
    is_open = (scores == least).sum(-1) > (found.values == least).sum(-1)
    is_open &= least[..., 0] > torch.finfo(scores.dtype).min / 2  # what is masked is not attended to, chosen or not
    if is_open.any():
        order = scores[is_open].sort(dim=-1, descending=True, stable=True).indices
        found.indices[is_open] = order[..., : found.indices.shape[-1]]
    return found
