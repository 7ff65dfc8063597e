"""Layers that keep a state instead of keys and values read one sequence at a time, in pieces that follow from it alone.

transformers calls such a layer a mixer. It would take several sequences in one call, but what it computes for one of
them would then depend on how many the others are: torch's operators round differently for other sizes.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from penstock.engine.masks import Unsupported
from penstock.engine.step import Step, current_step

_BY_TOKEN = {"hidden_states", "position_ids", "position_embeddings"}
"""Arguments that have a part for each token: [1, T, ...]."""


def divide_mixers(mixers: dict[int, nn.Module], scan_chunk_tokens: int) -> None:
    """Let each of a model's mixers, by layer, compute the steps of the engine in pieces; other calls stay as they are.

    Its own chunks become no larger than a scan chunk, which would be padded otherwise. In steps of the engine the
    functions that transformers' modules of mixers call are replaced by those of `_FUNCTIONS`.
    """
    mixer: Any
    for layer, mixer in mixers.items():
        names = vars(sys.modules[type(mixer).__module__])
        for name, function in _FUNCTIONS.items():
            if name in names and not isinstance(names[name], partial):
                names[name] = partial(_call_in_step, function, names[name])
        if not isinstance(mixer.forward, _DividedForward):
            mixer.forward = _DividedForward(mixer.forward, layer)
        size: Any = getattr(mixer, "chunk_size", None)
        if isinstance(size, int):
            mixer.chunk_size = min(size, scan_chunk_tokens)


class _DividedForward:
    """A mixer's forward pass over the flat batch of a step: [1, T, hidden] to the same shape."""

    def __init__(self, plain: Any, layer: int) -> None:
        self._plain, self._layer = plain, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = current_step.get(None)
        if step is None or step.storage.states is None:
            return self._plain(*args, **kwargs)
        if args:
            kwargs, args = {"hidden_states": args[0], **kwargs}, args[1:]
            if args:
                raise Unsupported("a layer with a state gets arguments without a name")
        rows = {name: value for name, value in kwargs.items() if name in _BY_TOKEN and value is not None}
        _refuse_rows(step, [value for name, value in kwargs.items() if name not in rows])
        outputs: list[Tensor] = []
        row, rest = 0, None
        for seq, num_tokens in step.batch.plan:
            start = seq.num_computed_tokens
            for first, last in step.storage.states.layout.cut_pieces(start, start + num_tokens, seq.num_prompt_tokens):
                part = slice(row + first - start, row + last - start)
                piece = {name: _take_rows(value, part) for name, value in rows.items()}
                with step.open_state(self._layer, seq, first):
                    output = self._plain(**{**kwargs, **piece})
                step.keep_snapshot(self._layer, seq, last)
                if isinstance(output, tuple):
                    output, *rest = output
                outputs.append(output)
            row += num_tokens
        whole = torch.cat(outputs, 1)
        return whole if rest is None else (whole, *rest)


def _call_in_step(function: Callable[..., Tensor], plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call one function in a step of the engine, and the other one outside of it."""
    return (plain if current_step.get(None) is None else function)(*args, **kwargs)


def _convolve_token(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Convolve one token, [B, channels, 1], with those before it in the state, [B, channels, width], as its last."""
    window = torch.cat([state, x.to(state.dtype)], -1)
    state.copy_(window[..., -state.shape[-1] :])
    return _convolve_window(window[..., -weight.shape[-1] :], weight, bias, activation).to(x.dtype)


def _convolve_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: object
) -> Tensor:
    """Convolve tokens, [B, channels, T], with nothing before them."""
    return _convolve_window(pad(x, (weight.shape[-1] - 1, 0)), weight, bias, activation).to(x.dtype)


def _convolve_window(window: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Convolve each channel of a window [B, channels, T + width - 1] with its weights [channels, width].

    In 16 bits torch's own convolution is one call for each channel on processors without AVX-512.
    """
    width = weight.shape[-1]
    length, weight = window.shape[-1] - width + 1, weight.float()
    out = window[..., :length] * weight[:, :1]
    for tap in range(1, width):
        out += window[..., tap : tap + length] * weight[:, tap : tap + 1]
    if bias is not None:
        out += bias[:, None]
    out = out.to(window.dtype)
    return out if activation is None else ACT2FN[activation](out)  # type: ignore[no-any-return, unused-ignore]


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "causal_conv1d_update": _convolve_token,
    "causal_conv1d_fn": _convolve_tokens,
}


def _take_rows(value: Any, part: slice) -> Any:
    """Return some tokens of [1, T, ...], or of each of several such tensors."""
    if isinstance(value, Tensor):
        return value[:, part].contiguous()
    return tuple(_take_rows(one, part) for one in value)


def _refuse_rows(step: Step, values: list[Any]) -> None:
    """Raise `Unsupported` if an argument has a part for each token: it would have to be divided, too."""
    for value in values:
        parts = value if isinstance(value, tuple | list) else [value]
        tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() > 1]
        if any(tensor.shape[1] == step.batch.num_tokens for tensor in tensors):
            raise Unsupported("a layer with a state gets more for each token than hidden states")
