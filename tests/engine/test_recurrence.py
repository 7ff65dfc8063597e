"""Tokens through what keeps a state: the kernels give what transformers' functions give, in place and row by row."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from penstock.engine.kernels import build
from penstock.engine.kernels.recurrence import Run, Runs, apply_delta_rule, convolve_tokens, update_state_space
from tests.engine.helpers import needs_kernels, use_instruction_set

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative to the largest number."""
NUM_STATES, ROWS = 7, [5, 0, 3]
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)

pytestmark = needs_kernels


@pytest.fixture(autouse=True, params=build.instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels of each instruction set that this machine has."""
    with use_instruction_set(request.param):
        torch.manual_seed(2)
        yield


def check(states: Tensor, new: Tensor, out: Tensor, expected: Tensor, alone: Any) -> None:
    """Check states and output against the expected ones; `alone` computes a row of states by itself."""
    before = states.clone()
    limit = TOLERANCE[out.dtype]
    assert out.dtype == expected.dtype
    assert float((out.float() - expected.float()).abs().max() / expected.float().abs().max()) < limit
    assert float((states[ROWS].float() - new.float()).abs().max() / new.float().abs().max()) < limit
    for at, row in enumerate(ROWS):
        states[row] = alone(at, row, states)
        assert torch.equal(states, before), "a row's bits depend on no other"


def run_in_rows(states: Tensor, compute: Any) -> tuple[Tensor, Any]:
    """Return the output for all rows, and what computes one of them alone with the state it had before."""
    start = states.clone()
    check_runs(start, compute)
    out = compute(Runs(Run(row, at, 1, 1) for at, row in enumerate(ROWS)), states, slice(None))
    assert all(torch.equal(states[row], start[row]) for row in range(NUM_STATES) if row not in ROWS)

    def compute_alone(at: int, row: int, states: Tensor) -> Tensor:
        mine = start.clone()
        assert torch.equal(compute(Runs([Run(row, 0, 1, 1)]), mine, slice(at, at + 1))[0], out[at])
        return mine[row]

    return out, compute_alone


def check_runs(start: Tensor, compute: Any) -> None:
    """Check that tokens of one sequence have the bits that they have one by one, and guesses change no state."""
    alone, after = start.clone(), list[Tensor]()
    outputs = []
    for at in range(len(ROWS)):
        outputs.append(compute(Runs([Run(5, 0, 1, 1)]), alone, slice(at, at + 1)))
        after.append(alone.clone())
    for kept in range(len(ROWS) + 1):
        states, runs = start.clone(), Runs([Run(5, 0, len(ROWS), kept)])
        assert torch.equal(compute(runs, states, slice(None)), torch.cat(outputs))
        assert torch.equal(states, after[kept - 1] if kept else start)
        for right in range(kept, len(ROWS)):
            runs.repeat(Runs([Run(5, right, 1, 1)]))
            assert torch.equal(states, after[right])


@DTYPES
@pytest.mark.parametrize(("channels", "width", "activation"), [(96, 4, "silu"), (37, 3, None), (5, 2, "silu")])
def test_convolutions(dtype: torch.dtype, channels: int, width: int, activation: str | None) -> None:
    states = torch.randn(NUM_STATES, channels, width).to(dtype)
    x = torch.randn(len(ROWS), 1, channels).to(dtype).transpose(1, 2)
    weight, bias = torch.randn(channels, width).to(dtype), torch.randn(channels).to(dtype)
    new = states[ROWS]
    expected = modeling_lfm2.causal_conv1d_update(x, new, weight, bias, activation)
    out, alone = run_in_rows(states, lambda runs, s, of: convolve_tokens(runs, s, x[of], weight, bias, activation))
    check(states, new, out, expected, alone)


@DTYPES
@pytest.mark.parametrize(("heads", "key_heads", "keys", "values"), [(6, 2, 32, 64), (3, 3, 24, 21)])
@pytest.mark.parametrize("by_key", [False, True], ids=["decay by head", "decay by key"])
def test_delta_rules(dtype: torch.dtype, heads: int, key_heads: int, keys: int, values: int, *, by_key: bool) -> None:
    states, batch = torch.randn(NUM_STATES, heads, keys, values), len(ROWS)
    key_heads = heads if by_key else key_heads
    query, key = torch.randn(2, batch, 1, key_heads, keys).to(dtype)
    value, beta = torch.randn(batch, 1, heads, values).to(dtype), torch.rand(batch, 1, heads).to(dtype)
    logs = -torch.rand(batch, 1, heads, *([keys] if by_key else []))
    rule = (
        modeling_kimi_linear.recurrent_kimi_delta_attention
        if by_key
        else modeling_qwen3_next.torch_recurrent_gated_delta_rule
    )
    expected, new = rule(
        query, key, value, g=logs, beta=beta, initial_state=states[ROWS], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip

    def apply(runs: Runs, states: Tensor, of: slice) -> Tensor:
        parts = (query[of], key[of], value[of], beta[of])
        return apply_delta_rule(runs, states, parts, logs[of], is_normed=True)

    out, alone = run_in_rows(states, apply)
    check(states, new, out, expected, alone)


@DTYPES
@pytest.mark.parametrize("size", [128, 16, 11])
def test_state_spaces_of_heads(dtype: torch.dtype, size: int) -> None:
    heads, parts, groups, batch = 4, 8, 2, len(ROWS)
    states, x = torch.randn(NUM_STATES, heads, parts, size).to(dtype), torch.randn(batch, heads, parts).to(dtype)
    steps = torch.randn(batch, 1, heads).to(dtype).transpose(1, 2).expand(-1, -1, parts)
    rates = (-torch.rand(heads))[:, None, None].expand(-1, parts, size)
    b, c = torch.randn(2, batch, groups, size).to(dtype)
    bias, skip = (torch.randn(heads).to(dtype)[:, None].expand(-1, parts) for _ in range(2))
    new = states[ROWS]
    expected = modeling_bamba.mamba2_selective_state_update(
        new, x, steps, rates, b, c, skip, dt_bias=bias, dt_softplus=True
    )

    def update(runs: Runs, states: Tensor, of: slice) -> Tensor:
        inputs = (steps[of], rates, b[of], c[of])
        return update_state_space(runs, states, x[of], inputs, (bias, skip), None, has_softplus=True)

    out, alone = run_in_rows(states, update)
    check(states, new, out, expected, alone)


@DTYPES
@pytest.mark.parametrize("size", [16, 11])
def test_state_spaces_of_channels(dtype: torch.dtype, size: int) -> None:
    channels, batch = 70, len(ROWS)
    states, (x, steps, gate) = torch.randn(NUM_STATES, channels, size), torch.randn(3, batch, channels).to(dtype)
    rates, (b, c) = -torch.rand(channels, size), torch.randn(2, batch, size).to(dtype)
    bias, skip = torch.randn(channels), torch.randn(channels).to(dtype)
    new = states[ROWS]
    expected = modeling_jamba.mamba_selective_state_update(
        new, x, steps, rates, b, c, skip, z=gate, dt_bias=bias, dt_softplus=True
    )

    def update(runs: Runs, states: Tensor, of: slice) -> Tensor:
        inputs = (steps[of], rates, b[of], c[of])
        return update_state_space(runs, states, x[of], inputs, (bias, skip), gate[of], has_softplus=True)

    out, alone = run_in_rows(states, update)
    check(states, new, out, expected, alone)


def test_what_kernels_do_not_compute_is_refused() -> None:
    states, x, runs = torch.zeros(2, 4, 4), torch.zeros(1, 4, 1), Runs([Run(1, 0, 1, 1)])
    with pytest.raises(NotImplementedError):
        convolve_tokens(runs, states, x, torch.zeros(4, 4), None, "gelu")
    with pytest.raises(NotImplementedError):
        convolve_tokens(runs, states.double(), x.double(), torch.zeros(4, 4).double(), None, None)
    parts, logs = (torch.zeros(1, 1, 1, 4),) * 3, torch.zeros(1, 1, 1)
    with pytest.raises(NotImplementedError):
        apply_delta_rule(runs, states[:, None].half(), (*parts, logs), logs, is_normed=True)
