"""The functions that transformers' mixers call for tokens, in steps of the engine.

Their modules name them alike: a convolution, the gated delta rule, and the update of a state space. Where the layer
reads tokens of several sequences, a state is that of all rows of the storage, and the kernels read and write those of
the step's `state_runs`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from penstock.engine.kernels import recurrence
from penstock.engine.kernels.recurrence import Runs
from penstock.engine.steps.step import current_step


def replace_functions(names: dict[str, Any]) -> None:
    """Replace the functions of a module by those of the engine; outside of its steps they stay as they are."""
    for name, function in _FUNCTIONS.items():
        if name in names and not isinstance(names[name], partial):
            names[name] = partial(_call_in_step, function, names[name])


def _call_in_step(function: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    step = current_step.get(None)
    return plain(*args, **kwargs) if step is None else function(plain, step.state_runs, *args, **kwargs)


def _convolve_token(
    plain: object, runs: Runs | None, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Convolve tokens, [B, channels, 1], with those before them in the state, [B, channels, width], as its last."""
    if runs is not None:
        return recurrence.convolve_tokens(runs, state, x, weight, bias, activation)
    window = torch.cat([state, x.to(state.dtype)], -1)
    state.copy_(window[..., -state.shape[-1] :])
    return _convolve_window(window[..., -weight.shape[-1] :], weight, bias, activation).to(x.dtype)


def _convolve_tokens(
    plain: object, runs: object, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
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
    plain: Callable[..., Any], runs: Runs | None, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor,
    beta: Tensor, initial_state: Tensor, use_qk_l2norm_in_kernel: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Apply a delta rule to tokens, [B, 1, heads, size] each of their parts; return its output, and the state."""
    if runs is None:
        how = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **kwargs}
        return plain(query, key, value, initial_state=initial_state, **how)
    parts, is_normed = (query, key, value, beta), use_qk_l2norm_in_kernel
    return recurrence.apply_delta_rule(runs, initial_state, parts, g, is_normed=is_normed), initial_state


def _update_state_space(
    plain: Callable[..., Tensor], runs: Runs | None, state: Tensor, x: Tensor, steps: Tensor, rates: Tensor,
    b: Tensor, c: Tensor, skip: Tensor | None = None, *, dt_bias: Tensor | None = None, z: Tensor | None = None,
    dt_softplus: bool = False, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Read tokens into the states of a state space, and return its output."""
    if runs is None:
        return plain(state, x, steps, rates, b, c, skip, dt_bias=dt_bias, z=z, dt_softplus=dt_softplus, **kwargs)
    inputs, of_heads = (steps, rates, b, c), (dt_bias, skip)
    return recurrence.update_state_space(runs, state, x, inputs, of_heads, z, has_softplus=dt_softplus)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _convolve_token,
    "causal_conv1d_fn": _convolve_tokens,
    "torch_recurrent_gated_delta_rule": _apply_delta_rule,
    "recurrent_kimi_delta_attention": _apply_delta_rule,
    "mamba2_selective_state_update": _update_state_space,
    "mamba_selective_state_update": _update_state_space,
}
