"""Single tokens of sequences through what keeps a state, in one native call that changes the states in place.

A state is that of all rows of a storage, [rows, ...]; `Runs` say which the tokens read. Each function raises
`NotImplementedError` for what the kernels do not compute.
"""

import ctypes
from array import array
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.kernels import library
from penstock.engine.kernels.packed import DTYPES


class Run(NamedTuple):
    """Tokens of a sequence, one behind the other, in a batch of tokens."""

    row: int
    """Where its state is."""
    first: int
    length: int
    kept: int
    """So many tokens change the state. Those behind them are guessed, and read into a copy."""


class Runs:
    """The runs of a batch whose tokens a layer reads at once."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._numbers = array("q", chain.from_iterable(runs))
        self._has_guessed = any(self._numbers[at + 2] > self._numbers[at + 3] for at in range(0, len(self._numbers), 4))
        self._calls: list[tuple[Callable[[int], object], Any, tuple[object, ...]]] = []
        """If some tokens are guessed: the native functions that were called in all layers, with what they read."""

    def call_kernel(self, function: Callable[[int], object], args: Any, *memory: object) -> None:
        """Call a native function for these runs. `memory` has what the arguments name."""
        args.runs, args.num_runs = self._numbers.buffer_info()[0], len(self._numbers) // 4
        function(ctypes.addressof(args))
        if self._has_guessed:
            self._calls.append((function, args, memory))

    def repeat_calls(self, runs: "Runs") -> None:
        """Read a part of the tokens once more, into the states: guesses that were right."""
        for function, args, memory in self._calls:
            runs.call_kernel(function, args, *memory)


def convolve_tokens(
    runs: Runs, state: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Convolve [B, channels, 1] with the inputs before it, [rows, channels, length], by weights [channels, width]."""
    native, dtype = library.load_library(), x.dtype
    is_known = activation in (None, "silu", "swish") and dtype in DTYPES and state.dtype == weight.dtype == dtype
    if native is None or not is_known or not _has_whole_rows(state) or not weight.is_contiguous():
        raise NotImplementedError("the kernels compute no such convolution")
    batch, channels, _ = x.shape
    out = torch.empty(batch, channels, 1, dtype=dtype)
    args = library.ConvolveArgs(
        state.data_ptr(), None, x.data_ptr(), x.stride(0), x.stride(1), weight.data_ptr(), _address_of(bias),
        out.data_ptr(), 0, channels, state.stride(0), weight.shape[1], state.shape[2], activation is not None,
        dtype.itemsize,
    )  # fmt: skip
    runs.call_kernel(native.convolve, args, x, weight, bias, out)
    return out


def apply_delta_rule(runs: Runs, state: Tensor, parts: tuple[Tensor, ...], logs: Tensor, *, is_normed: bool) -> Tensor:
    """Apply a delta rule to a state [rows, heads, keys, values] in float32; return [B, 1, heads, values].

    `parts`: query and key [B, 1, key heads, keys], value [B, 1, heads, values], and beta [B, 1, heads]. `logs`: the
    logarithm of the decay, [B, 1, heads], or [B, 1, heads, keys].
    """
    native, dtype = library.load_library(), parts[2].dtype
    if native is None or state.dtype != torch.float32 or not _has_whole_rows(state):
        raise NotImplementedError("the kernels compute no such delta rule")
    query, key, value, beta, logs = kept = tuple(_make_plain(part) for part in (*parts, logs))
    out = torch.empty_like(value)
    args = library.DeltaArgs(
        state.data_ptr(), None, query.data_ptr(), key.data_ptr(), value.data_ptr(), logs.data_ptr(), beta.data_ptr(),
        out.data_ptr(), 0, state.shape[1], key.shape[2], *state.shape[2:], state.stride(0), is_normed, logs.dim() == 4,
    )  # fmt: skip
    runs.call_kernel(native.delta, args, *kept, out)
    return out.to(dtype)


def update_state_space(
    runs: Runs, state: Tensor, x: Tensor, inputs: tuple[Tensor, ...], of_heads: tuple[Tensor | None, ...],
    gate: Tensor | None, *, has_softplus: bool,
) -> Tensor:  # fmt: skip
    """Read tokens into a state space, [rows, heads, size] or [rows, heads, parts, size], and return what it gives.

    `x` and `gate` are [B, heads] or [B, heads, parts]. `inputs`: the steps like them, rates [heads, size] or [heads,
    parts, size], and what is read into the state and out of it, [B, size] or [B, groups, size]. `of_heads`: what is
    added to the steps, and what of `x` goes past the state. With parts, all of a head have the same step and rate.
    """
    native, (steps, rates, b, c) = library.load_library(), inputs
    has_parts = x.dim() == 3
    if has_parts:
        if any(one is not None and one.stride(-1) for one in (steps, rates, rates[..., 0], *of_heads)):
            raise NotImplementedError("the parts of a state space's head have steps and rates of their own")
        steps, rates = steps[..., 0], rates[:, 0, 0]
        of_heads = tuple(one if one is None else one[:, 0] for one in of_heads)
    if native is None or state.dtype not in DTYPES or not _has_whole_rows(state):
        raise NotImplementedError("the kernels compute no such state space")
    dtype, shape = x.dtype, x.shape
    kept = [one if one is None else _make_plain(one) for one in (x, steps, of_heads[0], rates, b, c, of_heads[1], gate)]
    out = torch.empty(shape)
    args = library.SpaceArgs(
        state.data_ptr(), None, *map(_address_of, kept), out.data_ptr(), 0, shape[1],
        shape[2] if has_parts else 1, state.shape[-1], b.shape[1] if has_parts else 1, state.stride(0), not has_parts,
        has_softplus, state.element_size(),
    )  # fmt: skip
    runs.call_kernel(native.space, args, *kept, out)
    return out.to(dtype)


def _make_plain(x: Tensor) -> Tensor:
    return x.float().contiguous()


def _address_of(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _has_whole_rows(state: Tensor) -> bool:
    """Return whether each row of a state lies in one piece."""
    return state[0].is_contiguous()
