"""The paged attention kernel against a reference in float64, and the promise that a row's bits do not depend on the
batch: on every instruction set that this processor has."""

import ctypes
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels.library import Library, Segment, WriteArgs
from penstock.engine.memory.storage import BlockLayout, KVStorage, LayerShape
from penstock.engine.steps.native_step import describe_attention
from tests.draws import draw_cases

LENGTHS = (150, 70, 9)


@dataclass(frozen=True)
class Case:
    """A layer's shape and options."""

    kv_heads: int = 2
    group: int = 2
    k_size: int = 32
    v_size: int = 32
    block_size: int = 16
    softcap: float = 0.0
    sinks: bool = False
    window: int | None = None
    value_scale: float = 1.0
    """What the values are multiplied by."""


CASES = {
    "grouped": Case(),
    "multi-head": Case(kv_heads=3, group=1, k_size=64, v_size=64),
    "multi-query": Case(kv_heads=1, group=16, k_size=80, v_size=80),
    "values of another size": Case(group=7, k_size=96, v_size=40),
    "odd sizes": Case(group=3, k_size=7, v_size=5, block_size=5),
    "values that end within a line": Case(k_size=32, v_size=24),
    "one token a block": Case(k_size=33, v_size=16, block_size=1),
    "large blocks": Case(block_size=128, k_size=128, v_size=128),
    "softcap": Case(softcap=5.0),
    "sinks": Case(sinks=True),
    "window": Case(window=20, block_size=24),
    "around the least normal number": Case(group=4, value_scale=2e-38),
    "everything": Case(group=4, softcap=5.0, sinks=True, window=70),
}

numbers = pytest.mark.parametrize(
    ("dtype", "is_int8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)],
)
"""The dtype of queries and results, and whether K and V are int8."""


def round_to_int8(x: Tensor) -> Tensor:
    """What is kept of K or V: each vector as integers up to 127, times a scale."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round() * scale


class Layer:
    """Random sequences of LENGTHS, and a pool whose unwritten rows are not numbers."""

    def __init__(self, native: Library, dtype: torch.dtype, is_int8: bool, case: Case) -> None:
        torch.manual_seed(1)
        self.native, self.case, self.dtype, self.is_int8 = native, case, dtype, is_int8
        self.heads = case.kv_heads * case.group
        self.scale = 2 * case.k_size**-0.5
        self.q = [torch.randn(n, self.heads, case.k_size).to(dtype) for n in LENGTHS]
        self.k = [torch.randn(n, case.kv_heads, case.k_size).to(dtype) for n in LENGTHS]
        self.v = [(torch.randn(n, case.kv_heads, case.v_size) * case.value_scale).to(dtype) for n in LENGTHS]
        self.sinks = torch.randn(self.heads) if case.sinks else None
        nums = [math.ceil(n / case.block_size) for n in LENGTHS]
        self.table = torch.randperm(sum(nums) + 2)[: sum(nums)].int()
        self.table_at = [sum(nums[:i]) for i in range(len(nums))]
        shapes = tuple((case.kv_heads, size) for size in (case.k_size, case.v_size))
        self.layout = BlockLayout((LayerShape(0, *shapes),), case.block_size, dtype, self.is_int8)
        self.storage = KVStorage(self.layout, sum(nums) + 2, torch.device("cpu"))
        # Of int8 these bytes are the code -1, and a scale that is not a number.
        self.storage.data.fill_(-1 if self.is_int8 else math.nan)

    def first_seen(self, start: int, num: int) -> Tensor:
        window = self.case.window or 10**6
        return torch.arange(start, start + num).sub(window - 1).clamp(min=0).int()

    def step(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Write and attend to new tokens, each part (sequence, start, number); the outputs of each part."""
        segments, first_seen, row = [], [], 0
        for i, start, num in parts:
            segments.append(Segment(row, num, start, self.table_at[i]))
            first_seen.append(self.first_seen(start, num))
            self._write(i, start, num, self.k[i], 0)
            self._write(i, start, num, self.v[i], 1)
            row += num
        # Queries are a strided view, as those of a fused projection are.
        fused = torch.full((row, self.heads + 3, self.case.k_size), math.nan, dtype=self.dtype)
        q = fused[:, 1 : self.heads + 1]
        q.copy_(torch.cat([self.q[i][start : start + num] for i, start, num in parts]))
        out = self._attend(q, segments, torch.cat(first_seen))
        return list(torch.split(out, [num for _, _, num in parts]))

    def _write(self, i: int, start: int, num: int, x: Tensor, kind: int) -> None:
        positions = torch.arange(start, start + num)
        blocks = self.table[self.table_at[i] + positions // self.case.block_size].long()
        offsets = positions % self.case.block_size
        x = x[start : start + num]
        args = WriteArgs(
            x.data_ptr(), x.stride(0), x.stride(1), self.storage.addresses[0][kind],
            self.storage.scale_addresses[0][kind], self.layout.block_elements, blocks.data_ptr(),
            offsets.data_ptr(), num, x.shape[1], x.shape[2], self.case.block_size, x.element_size(),
        )  # fmt: skip
        self.native.write(ctypes.addressof(args))

    def _attend(self, q: Tensor, segments: list[Any], first_seen: Tensor) -> Tensor:
        case = self.case
        array = (Segment * len(segments))(*segments)
        out = torch.full((len(q), self.heads, case.v_size), math.nan, dtype=self.dtype)
        args = describe_attention(self.storage, 0, self.heads, self.scale)
        args.q, args.q_row_stride, args.q_head_stride, args.out = q.data_ptr(), q.stride(0), q.stride(1), out.data_ptr()
        args.tables, args.segments, args.num_segments = self.table.data_ptr(), ctypes.addressof(array), len(segments)
        args.first_key = None if case.window is None else first_seen.data_ptr()
        args.sinks = None if self.sinks is None else self.sinks.data_ptr()
        args.softcap = case.softcap
        self.native.attention(ctypes.addressof(args))
        return out

    def run(self, plan: Callable[[list[int]], list[tuple[int, int, int]]]) -> list[Tensor]:
        """All tokens of all sequences, in the steps that `plan` makes of how many each has done."""
        done = [0] * len(LENGTHS)
        outputs: list[list[Tensor]] = [[] for _ in LENGTHS]
        while parts := plan(done):
            for (i, _, num), out in zip(parts, self.step(parts), strict=True):
                outputs[i].append(out)
                done[i] += num
        return [torch.cat(parts) for parts in outputs]

    def reference(self, i: int) -> Tensor:
        group = self.case.group
        q, k, v = self.q[i].double(), self.k[i], self.v[i]
        k, v = (round_to_int8(x).double() if self.is_int8 else x.double() for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * self.scale
        if self.case.softcap:
            scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
        positions = torch.arange(len(q))
        hidden = (positions > positions[:, None]) | (positions < self.first_seen(0, len(q))[:, None])
        scores.masked_fill_(hidden, -math.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
        weights = torch.softmax(scores, -1)[..., : len(q)]
        return torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1))


def whole(done: list[int]) -> list[tuple[int, int, int]]:
    return [(i, 0, n) for i, n in enumerate(LENGTHS) if not done[i]]


def token_by_token(done: list[int]) -> list[tuple[int, int, int]]:
    return [(i, done[i], 1) for i, n in enumerate(LENGTHS) if done[i] < n]


def one_sequence_at_a_time(done: list[int]) -> list[tuple[int, int, int]]:
    return whole(done)[:1]


def random_chunks(done: list[int]) -> list[tuple[int, int, int]]:
    rng = random.Random(sum(done))
    left = [i for i, n in enumerate(LENGTHS) if done[i] < n]
    chosen = rng.sample(left, rng.randint(1, len(left))) if left else []
    return [(i, done[i], rng.randint(1, LENGTHS[i] - done[i])) for i in chosen]


@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name) for name in draw_cases(CASES, 5)])
@numbers
def test_it_is_attention_and_its_bits_do_not_depend_on_batch_chunks_or_threads(
    native_or_emulated: Library, dtype: torch.dtype, is_int8: bool, case: Case
) -> None:
    native = native_or_emulated
    native.set_threads(1)
    layer = Layer(native, dtype, is_int8, case)
    expected = layer.run(whole)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for i, out in enumerate(expected):
        torch.testing.assert_close(out.double(), layer.reference(i), atol=tolerance, rtol=tolerance)
    if is_int8 and case not in (CASES["odd sizes"], CASES["everything"]):
        return  # it changes how rows are read, and nothing of what these cases are about
    for threads, plan in ((2, whole), (1, token_by_token), (3, random_chunks), (2, one_sequence_at_a_time)):
        native.set_threads(threads)
        for out, want in zip(Layer(native, dtype, is_int8, case).run(plan), expected, strict=True):
            assert torch.equal(_bits(out), _bits(want)), (threads, plan.__name__)


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@numbers
def test_a_row_of_another_sequence_that_is_not_a_number_harms_nobody(
    native: Library, dtype: torch.dtype, is_int8: bool
) -> None:
    good, bad = (Layer(native, dtype, is_int8, Case()) for _ in range(2))
    bad.k[1].fill_(math.nan)
    bad.v[1].fill_(math.inf)
    expected, got = good.run(whole), bad.run(whole)
    assert torch.equal(_bits(got[0]), _bits(expected[0]))
    assert torch.equal(_bits(got[2]), _bits(expected[2]))
    assert got[1].isnan().all()
