"""Which keys a layer lets a token see: the model's own mask rule, which a step applies to the rows that it has."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

Visibility = Callable[[Tensor, Tensor], Tensor]
"""(query positions, key positions) -> bool: which keys a layer lets a query see, besides being causal."""

_NUM_CHECKED_POSITIONS = 128


class Unsupported(Exception):
    """The model does something that cannot be paged. The message is a clause that says what."""


class OwnAttention(Unsupported):
    """The model attends to what is cached in a way of its own: it may still read one sequence at a time."""


class MaskRule:
    """Replaces the model's mask tensor by its rule. Each forward pass makes new ones, one for each kind of layer."""

    def __init__(self, rule: Callable[..., Any]) -> None:
        self.visibility: Visibility | None = None
        """None: a token sees all tokens before it."""
        if rule is not causal_mask_function:
            zero = torch.zeros((), dtype=torch.long)
            self.visibility = lambda query, key: rule(zero.to(query.device), zero.to(query.device), query, key)
            _check_rule(rule, zero)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise OwnAttention("it works on its attention mask itself, as sparse indexers do")

    def __getitem__(self, index: object) -> Any:
        raise OwnAttention("it works on its attention mask itself, as sparse indexers do")


def _check_rule(rule: Callable[..., Any], zero: Tensor) -> None:
    """Raise `Unsupported` for a rule that lets a token see a later one, or depends on more than positions."""
    try:
        sees_later = bool(rule(zero, zero, zero, zero + 1))
    except Exception as error:
        raise OwnAttention("its attention mask depends on more than positions") from error
    if sees_later:
        raise Unsupported("its attention is not causal")


def make_mask_rule(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> MaskRule:
    """Make the mask of one kind of layer; transformers calls this."""
    return MaskRule(mask_function)


def find_visibility(rule: object, window: int | None) -> Visibility | None:
    """Return what a layer lets a token see with this mask, or with a sliding window of its own; None: all before it."""
    if isinstance(rule, MaskRule):
        return rule.visibility
    if rule is not None:
        raise OwnAttention("it makes its attention masks itself")
    return None if window is None else _make_window_rule(window)


@functools.cache
def _make_window_rule(window: int) -> Visibility:
    return lambda query, key: key > query - window


def sees_interval(visible: Visibility | None) -> bool:
    """Return whether each token sees an interval of positions up to its own, tested with 128 tokens."""
    if visible is None:
        return True
    key = torch.arange(_NUM_CHECKED_POSITIONS)
    query = key[:, None]
    first = find_first_visible(visible, key)
    return torch.equal(visible(query, key) & (key <= query), (key >= first[:, None]) & (key <= query))


def find_first_visible(visible: Visibility, positions: Tensor) -> Tensor:
    """Find the first visible position of each token by bisection: it sees an interval up to its own position."""
    low, high = torch.zeros_like(positions), positions.clone()
    while bool((low < high).any()):
        middle = (low + high) // 2
        seen = visible(positions, middle)
        high, low = torch.where(seen, middle, high), torch.where(seen, low, middle + 1)
    return low.int()
