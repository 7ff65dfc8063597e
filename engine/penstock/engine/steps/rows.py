"""Torch's functions whose bits depend on how many rows there are, computed so that they do not.

Beside the kernels torch has one thread.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.kernels.packed import PackedWeight

ROW_WISE_FUNCTIONS = frozenset({
    "_softmax", "_to_copy", "_unsafe_view", "add", "alias", "as_strided", "bitwise_not", "cat", "chunk", "clone",
    "concatenate", "contiguous", "copy_", "detach", "div", "div_", "embedding", "empty", "empty_like", "expand",
    "flatten", "gather", "index", "masked_fill", "max", "mean", "mul", "mul_", "neg", "permute", "pow", "relu",
    "repeat", "reshape", "rsqrt", "scatter_", "select", "slice", "softmax", "split", "split_with_sizes", "square",
    "squeeze", "sub", "sum", "t", "to", "topk", "transpose", "type_as", "unbind", "unsqueeze", "view", "zeros_like",
})  # fmt: skip
"""torch's functions that give a row the same bits in any batch.

Not so sigmoid, SiLU or others that compute exponentials of each element: the last ones of a tensor, which fill no
vector, are rounded otherwise.
"""
_OF_ELEMENTS = {"cos", "exp", "gelu", "sigmoid", "silu", "sin", "softplus", "tanh"}
"""They round the elements that are left behind the last whole vectors otherwise."""
_PRODUCTS = {"bmm", "matmul", "__matmul__"}
"""They sum otherwise for other sizes."""
_WHOLE_VECTORS = 64
"""So many elements, or a multiple, leave none behind, in any dtype and on any processor."""


class FunctionNames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of torch's functions that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one of them."""
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def keeps_rows_apart(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether torch computes nothing in the module whose bits depend on how many rows there are."""
    called = FunctionNames()
    with called:
        module(*args, **kwargs)
    return called.names <= ROW_WISE_FUNCTIONS


class RowsApart(TorchFunctionMode):
    """Within its context several rows have the bits that each has alone: where need be they are computed alone."""

    num_rows = 0
    """How many rows there are now."""
    is_group = False
    """Whether they are in [rows, 1, ...], else in [1, rows, ...] or [rows, ...]."""
    has_split = False
    """Whether rows that were no group were computed alone."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if self.num_rows > 1 and (name in _OF_ELEMENTS or name == "linear"):
            x, dim = args[0], self._find_rows(args[0])
            is_whole = name != "linear" and x.numel() // self.num_rows % _WHOLE_VECTORS == 0
            if dim is not None and not is_whole and not (name == "linear" and isinstance(args[1], PackedWeight)):
                self.has_split |= not self.is_group
                return torch.cat([func(row, *args[1:], **kwargs) for row in x.split(1, dim)], dim)
            if is_whole or (name != "linear" and (x.dim() == 1 or len(x) % self.num_rows)):  # of a layer's own numbers
                return func(*args, **kwargs)
        elif self.num_rows > 1 and name in _PRODUCTS:
            if args[0].shape[-1] == 1:  # there is nothing to sum
                return func(*args, **kwargs)
            has_rows = [isinstance(one, Tensor) and one.dim() > 2 and len(one) == self.num_rows for one in args]
            if any(has_rows):
                self.has_split |= not self.is_group
                pairs, rows = list(zip(args, has_rows, strict=True)), range(self.num_rows)
                some = [[one[row : row + 1] if has else one for one, has in pairs] for row in rows]
                return torch.cat([func(*of_row, **kwargs) for of_row in some])
        return self._compute(func, args, kwargs)

    def _find_rows(self, x: Tensor) -> int | None:
        """Return along which dimension a tensor has rows, or None."""
        if self.is_group:
            return 0 if x.dim() > 2 and len(x) == self.num_rows else None
        if x.dim() > 0 and len(x) == self.num_rows:
            return 0
        return 1 if x.dim() > 1 and len(x) == 1 and x.shape[1] == self.num_rows else None

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a function as it is."""
        return func(*args, **kwargs)


class WatchedRows(RowsApart):
    """The same, and `is_exact` says whether nothing else was computed whose bits may depend on other rows."""

    def __init__(self) -> None:
        super().__init__()
        self._names = FunctionNames()

    @property
    def is_exact(self) -> bool:
        """Whether all functions so far keep rows apart."""
        return self._names.names <= ROW_WISE_FUNCTIONS

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._names if self.num_rows > 1 else nullcontext():
            return func(*args, **kwargs)
