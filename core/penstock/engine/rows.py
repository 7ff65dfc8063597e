"""Torch's functions whose bits depend on how many rows there are, computed so that they do not."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from penstock.engine.experts import ROW_WISE_FUNCTIONS, FunctionNames

_OF_ELEMENTS = {"cos", "exp", "gelu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "tanh"}
"""They round the elements that are left behind the last whole vectors otherwise."""
_PRODUCTS = {"bmm", "linear", "matmul", "__matmul__"}
"""They sum otherwise for other sizes."""
_WHOLE_VECTORS = 64
"""So many elements, or a multiple, leave none behind, in any dtype and on any processor."""


class RowsApart(TorchFunctionMode):
    """Within its context a row's bits do not depend on how many there are, in [1, rows, ...] or [rows, 1, ...]."""

    num_rows = 0
    """How many there are now; 0: everything is computed as it is."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if self.num_rows and name in _OF_ELEMENTS:
            return _compute_elements(func, *args, **kwargs)
        if self.num_rows and name in _PRODUCTS:
            if args[0].shape[-1] == 1:  # there is nothing to sum
                return func(*args, **kwargs)
            has_rows = [isinstance(one, Tensor) and one.dim() > 2 and len(one) == self.num_rows for one in args]
            if any(has_rows):
                pairs, rows = list(zip(args, has_rows, strict=True)), range(self.num_rows)
                return torch.cat([func(*(one[row : row + 1] if has else one for one, has in pairs)) for row in rows])
        return self._compute(func, args, kwargs)

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
        with self._names if self.num_rows else nullcontext():
            return func(*args, **kwargs)


def _compute_elements(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a function of each element of a tensor from whole vectors; beside the kernels torch has one thread."""
    size = x.numel()
    if size % _WHOLE_VECTORS == 0 and x.is_contiguous():
        return func(x, *args, **kwargs)  # type: ignore[no-any-return]
    whole = pad(x.reshape(-1), (0, -size % _WHOLE_VECTORS))
    return func(whole, *args, **kwargs)[:size].view(x.shape)  # type: ignore[no-any-return]
