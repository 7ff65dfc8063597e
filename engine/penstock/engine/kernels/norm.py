"""RMSNorm as one native call."""

import ctypes

import torch
from torch import Tensor, nn

from penstock.engine.kernels import library
from penstock.engine.kernels.library import Library


class NativeNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, or * (1 + weight) with `plus_one`."""

    def __init__(self, native: Library, weight: Tensor, eps: float, *, plus_one: bool) -> None:
        super().__init__()
        self.weight = weight
        self.eps, self.plus_one = eps, plus_one
        size = weight.numel()
        self._native, self._size = native, size
        self._args = library.NormArgs(
            weight=weight.data_ptr(), groups=1, size=size, x_stride=size, out_stride=size, eps=eps,
            plus_one=plus_one, element_bytes=weight.element_size(),
        )  # fmt: skip
        self._address = ctypes.addressof(self._args)

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] to the same."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._args.x, self._args.out, self._args.rows = x.data_ptr(), out.data_ptr(), x.numel() // self._size
        self._native.norm(self._address)
        return out
