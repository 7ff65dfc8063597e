"""The functions that transformers' mixers call for tokens, in steps of the engine.

Their modules name them alike: a convolution, the gated delta rule, and the update of a state space. Where the layer
reads a token each of several sequences, a state is that of all rows of the storage, of which the functions read and
write those of the step's `state_rows`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from penstock.engine.kernels import recurrence
from penstock.engine.step import current_step


def replace_functions(names: dict[str, Any]) -> None:
    """Replace the functions of a module by those of the engine; outside of its steps they stay as they are."""
    for name, function in _FUNCTIONS.items():
        if name in names and not isinstance(names[name], partial):
            names[name] = partial(_call_in_step, function, names[name])


def _call_in_step(function: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    step = current_step.get(None)
    return plain(*args, **kwargs) if step is None else function(plain, step.state_rows, *args, **kwargs)


def _convolve_token(
    plain: object, rows: Tensor | None, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Convolve one token, [B, channels, 1], with those before it in the state, [B, channels, width], as its last."""
    out = None if rows is None else recurrence.convolve_token(rows, state, x, weight, bias, activation)
    if out is not None:
        return out
    window = torch.cat([_take(state, rows), x.to(state.dtype)], -1)
    _put(state, rows, window[..., -state.shape[-1] :])
    return _convolve_window(window[..., -weight.shape[-1] :], weight, bias, activation).to(x.dtype)


def _convolve_tokens(
    plain: object, rows: object, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **kwargs: object,
) -> Tensor:  # fmt: skip
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


def _apply_delta_rule(
    plain: Callable[..., Any], rows: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor,
    beta: Tensor, initial_state: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Apply a delta rule to one token, [B, 1, heads, size] each of its parts; return its output, and the state."""
    how = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **kwargs}
    if rows is None:
        return plain(query, key, value, initial_state=initial_state, **how)
    parts = (query, key, value, beta)
    out = recurrence.apply_delta_rule(rows, initial_state, parts, g, is_normed=use_qk_l2norm_in_kernel)
    if out is None:
        out, new = plain(query, key, value, initial_state=initial_state[rows], **how)
        _put(initial_state, rows, new)
    return out, initial_state


def _update_state_space(
    plain: Callable[..., Tensor], rows: Tensor | None, state: Tensor, x: Tensor, steps: Tensor, rates: Tensor,
    b: Tensor, c: Tensor, skip: Tensor | None = None, *, dt_bias: Tensor | None = None, z: Tensor | None = None,
    dt_softplus: bool = False, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Read one token into the states of a state space, and return its output."""
    if rows is not None:
        inputs, of_heads = (steps, rates, b, c), (dt_bias, skip)
        out = recurrence.update_state_space(rows, state, x, inputs, of_heads, z, has_softplus=dt_softplus)
        if out is not None:
            return out
    mine = _take(state, rows)
    out = plain(mine, x, steps, rates, b, c, skip, dt_bias=dt_bias, z=z, dt_softplus=dt_softplus, **kwargs)
    _put(state, rows, mine)
    return out


def _take(state: Tensor, rows: Tensor | None) -> Tensor:
    return state if rows is None else state[rows]


def _put(state: Tensor, rows: Tensor | None, new: Tensor) -> None:
    if rows is None:
        state.copy_(new)
    else:
        state[rows] = new.to(state.dtype)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _convolve_token,
    "causal_conv1d_fn": _convolve_tokens,
    "torch_recurrent_gated_delta_rule": _apply_delta_rule,
    "recurrent_kimi_delta_attention": _apply_delta_rule,
    "mamba2_selective_state_update": _update_state_space,
    "mamba_selective_state_update": _update_state_space,
}
