import math
from collections import Counter
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.counts import TokenCounts
from penstock.engine.kernels import build, library
from penstock.engine.kernels.packed import find_library
from penstock.engine.sampling.allowed import make_scores
from penstock.engine.sampling.sampler import (
    SamplingParams,
    compute_logprobs,
    draw_uniform,
    draw_with_torch,
    sample_tokens,
)
from penstock.engine.sampling.shares import to_weights
from penstock.errors import SettingsError
from penstock.messages import MIN_LOGPROB, MIN_REPETITION_PENALTY, Logprobs, Sampling
from tests.engine.reference_sampler import reference_token


def _draws(num: int, **sampling: Any) -> list[SamplingParams]:
    return [SamplingParams(Sampling.model_validate(sampling), seed=3, position=i) for i in range(num)]


@pytest.mark.proof
def test_these_numbers_never_change() -> None:
    """A rolling upgrade may hand a request to a newer worker: both must draw the same."""
    drawn = [draw_uniform(0, 0), draw_uniform(0, 1), draw_uniform(1, 0), draw_uniform(2**63 - 1, 4095)]
    assert drawn == [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.5268763636163535]


def test_uniform_is_uniform() -> None:
    values = torch.tensor(
        [draw_uniform(seed, position) for seed in range(200) for position in range(200)], dtype=torch.float64
    )
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 45  # chi-square, 19 degrees of freedom: p < 0.001
    assert len(set(values.tolist())) == 40_000
    grid = values.view(200, 200)
    assert abs(float(torch.corrcoef(grid.flatten().unfold(0, 2, 1).T)[0, 1])) < 0.02
    assert float((grid.mean(0) - 0.5).abs().max()) < 0.1


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9}])
def test_frequencies_follow_the_distribution(filters: dict[str, Any]) -> None:
    logits = torch.tensor([0.3, -0.9, 1.4, 0.1, -0.2, 0.8])
    shares = torch.softmax(logits.double() / 0.7, -1)
    kept = {"": range(6), "top_k": [2, 5, 0, 3], "top_p": [2, 5, 0], "min_p": [2, 5, 0]}["".join(filters)] \
        if len(filters) < 2 else [2, 5, 0, 3]  # fmt: skip
    expected = torch.zeros(6, dtype=torch.float64)
    expected[list(kept)] = shares[list(kept)] / shares[list(kept)].sum()
    tokens = sample_tokens(logits.expand(20_000, 6), _draws(20_000, temperature=0.7, **filters))
    found = torch.bincount(torch.tensor(tokens), minlength=6)
    possible = expected > 0
    assert int(found[~possible].sum()) == 0
    wanted = 20_000 * expected[possible]
    assert float(((found[possible] - wanted) ** 2 / wanted).sum()) < 20.5  # chi-square, 5 degrees: p < 0.001


def test_at_temperatures_next_to_none_only_the_likeliest_is_drawn() -> None:
    many = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(500, 4)
    for temperature in (1e-9, 1e-300):
        assert set(sample_tokens(many, _draws(500, temperature=temperature))) == {0}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 9), -torch.inf)
    logits[:, 4] = 1.0
    assert set(sample_tokens(logits, _draws(500, temperature=100.0))) == {4}
    assert set(sample_tokens(logits, _draws(500, temperature=100.0, top_p=0.999))) == {4}


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": MIN_REPETITION_PENALTY}, {"temperature": 5e-324}, {"temperature": 1e-39},
        {"top_p": 5e-324}, {"top_p": 1e-39}, {"min_p": 1.0}, {"presence_penalty": 5e-324, "temperature": 1e-39},
    ],
)  # fmt: skip
def test_the_least_values_still_tell_tokens_apart(given: dict[str, Any]) -> None:
    """In float32 some are 0 or have no reciprocal. Both tokens have occurred, and the likelier one is drawn."""
    logits = torch.tensor([[-1.0, 30.0, 31.0, 2.0]])
    draws = [SamplingParams(Sampling(**given), 3, 0, TokenCounts([1, 2]))]
    assert sample_tokens(logits, draws) == draw_with_torch(logits, draws) == [2]


@pytest.mark.proof
def test_penalties_and_bias() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.0]])

    def greedy(output: list[int], prompt: tuple[int, ...] = (), **changes: Any) -> int:
        sampling = Sampling(temperature=0, **changes)
        return sample_tokens(logits, [SamplingParams(sampling, 0, len(output), TokenCounts(prompt, output))])[0]

    assert greedy([0, 0]) == 0
    assert greedy([0], presence_penalty=0.2) == 1
    assert greedy([], prompt=(0,), presence_penalty=2) == 0  # the prompt is not counted
    assert greedy([0, 0], frequency_penalty=0.06) == 1
    assert greedy([0], frequency_penalty=0.06) == 0
    assert greedy([1], presence_penalty=-0.2) == 1
    assert greedy([], prompt=(0,), repetition_penalty=1.1) == 1  # here it is
    low = {0: -100, 1: -100, 3: -2}
    assert greedy([2], logit_bias=low, repetition_penalty=1.9) == 2  # -1.9 against -2
    assert greedy([2], logit_bias=low, repetition_penalty=2.1) == 3
    assert greedy([2], repetition_penalty=0.9) == 0
    assert greedy([], logit_bias={2: 3.5}) == 2
    assert greedy([2], logit_bias={2: 3.5}, repetition_penalty=2) == 0  # bias first
    assert greedy([], logit_bias={0: -100, 1: -100, 3: -100}) == 2
    assert logits.tolist() == torch.tensor([[2.0, 1.9, -1.0, 0.0]]).tolist()  # read only


def _draw_with_ends(sampling: Sampling, position: int, allowed: list[int] | None = None) -> int:
    """Draw from tokens of which 0 and 1 end the answer, and are the likeliest. `allowed` is what a grammar allows."""
    mask = None if allowed is None else np.array([sum(1 << token for token in allowed)], np.int32)
    draw = SamplingParams(sampling, 0, position, allowed=mask, end_token_ids={0, 1, 700})
    return sample_tokens(torch.tensor([[9.0, 8.0, 1.0, 2.0]]), [draw])[0]


@pytest.mark.proof
def test_tokens_that_end_an_answer_are_not_drawn_before_min_tokens() -> None:
    for temperature in (0.0, 0.01):
        sampling = Sampling(temperature=temperature, min_tokens=3)
        assert [_draw_with_ends(sampling, position) for position in range(5)] == [3, 3, 3, 0, 0]
        assert _draw_with_ends(sampling, 2, [0, 2]) == 2
        assert _draw_with_ends(sampling, 2, [1]) == 1, "the grammar allows nothing else"
        assert _draw_with_ends(Sampling(temperature=temperature), 0) == 0


SAMPLINGS = st.builds(
    Sampling, temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]), top_k=st.sampled_from([0, 1, 5, 100, 129, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.95, 1.0]), min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.3]), frequency_penalty=st.sampled_from([0.0, 0.0, -0.1, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, 6), st.floats(-100, 100, width=32), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
)  # fmt: skip
ROWS = st.tuples(
    SAMPLINGS, st.integers(0, 2**63 - 1), st.lists(st.integers(0, 6), max_size=4), st.lists(st.integers(0, 6))
)
Row = tuple[Sampling, int, list[int], list[int]]


def _draw(row: Row) -> SamplingParams:
    sampling, seed, prompt, output = row
    return SamplingParams(sampling, seed, len(output), TokenCounts(prompt, output))


def _logits(rows: int, size: int, seed: int, step: float, dtype: torch.dtype) -> Tensor:
    """Random ones; with a step, many are equal; a few are impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator) * 3
    logits = (logits / step).round() * step if step else logits
    return logits.masked_fill(torch.rand(rows, size, generator=generator) < 0.02, -30.0).to(dtype)


SIZES = st.sampled_from([7, 64, 65, 200, 8300])
STEPS = st.sampled_from([0.0, 0.5, 3.0])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
WIDE = (Sampling(top_p=0.95, temperature=5.0), 5, [1], [2])  # a nucleus of thousands
PAST_FIRST: Row = (Sampling(temperature=0.3, top_k=129, top_p=0.5, min_p=0.01), 0, [], [])  # more than is ranked first


@given(row=ROWS, size=SIZES, seed=st.integers(0, 1000), step=STEPS, dtype=DTYPES)
@example(row=WIDE, size=8300, seed=1, step=0.5, dtype=torch.float32)
@example(row=PAST_FIRST, size=200, seed=1, step=0.0, dtype=torch.float32)
@example(row=(Sampling(top_k=5000), 7, [], [1]), size=8300, seed=2, step=3.0, dtype=torch.float32)
def test_the_token_is_that_of_the_reference(row: Row, size: int, seed: int, step: float, dtype: torch.dtype) -> None:
    """Of equals the one with the lowest id. The logits are only read."""
    logits, draw = _logits(1, size, seed, step, dtype), _draw(row)
    given, expected = logits.clone(), reference_token(logits[0], draw)
    assert sample_tokens(logits, [draw]) == [expected]
    assert torch.equal(logits, given)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=9), size=SIZES, seed=st.integers(0, 1000), step=STEPS, dtype=DTYPES
)  # fmt: skip
@example(rows=[WIDE] * 3 + [(Sampling(temperature=0, logprobs=3), 0, [], [])], size=8300, seed=1, step=0.5,
         dtype=torch.float32)  # fmt: skip
@example(rows=[(Sampling(temperature=0.3, top_p=1e-9), 0, [], []), (Sampling(temperature=0.3), 0, [], [])], size=7,
         seed=0, step=0.0, dtype=torch.float32)  # fmt: skip
@example(rows=[(Sampling(top_p=0.9), 1, [], []), (Sampling(top_k=3), 2, [], []), (Sampling(), 3, [], [])] * 3,
         size=200, seed=4, step=0.0, dtype=torch.float32)  # fmt: skip
def test_a_row_does_not_depend_on_the_others(
    rows: list[Row], size: int, seed: int, step: float, dtype: torch.dtype
) -> None:
    logits, draws = _logits(len(rows), size, seed, step, dtype), [_draw(row) for row in rows]
    together = sample_tokens(logits, draws)
    logprobs = compute_logprobs(logits, draws, together)
    alone = [logits[i : i + 1] for i in range(len(rows))]
    assert together == [sample_tokens(row, [draw])[0] for row, draw in zip(alone, draws, strict=True)]
    assert sample_tokens(logits.flip(0), draws[::-1]) == together[::-1]
    assert logprobs == [
        compute_logprobs(row, [draw], [token])[0] for row, draw, token in zip(alone, draws, together, strict=True)
    ]


@given(size=SIZES, seed=st.integers(0, 1000), count=st.integers(0, 20), step=STEPS)
def test_logprobs_are_those_of_the_raw_distribution(size: int, seed: int, count: int, step: float) -> None:
    logits = _logits(2, size, seed, step, torch.float32)
    sampling = Sampling(temperature=0.5, top_k=2, logprobs=count, logit_bias={0: 5.0}, repetition_penalty=2.0)
    counts = TokenCounts([3], [4])
    draws = [SamplingParams(sampling, 1, 1, counts), SamplingParams(Sampling(), 1, 1, counts)]
    logprobs, absent = compute_logprobs(logits, draws, [5, 6])
    assert absent is None
    assert logprobs is not None
    expected = torch.log_softmax(logits[0].double(), -1)
    assert math.isclose(logprobs.logprob, float(expected[5]), abs_tol=2e-6)
    ranked = sorted(range(size), key=lambda token: (-float(logits[0, token]), token))[:count]
    assert [entry.token for entry in logprobs.top] == ranked
    for entry in logprobs.top:
        assert math.isclose(entry.logprob, float(expected[entry.token]), abs_tol=2e-6)


def test_an_impossible_token_has_the_least_logprob() -> None:
    logits = torch.tensor([[0.0, -torch.inf]])
    (logprobs,) = compute_logprobs(logits, _draws(1, logprobs=2), [0])
    assert logprobs is not None
    assert [(entry.token, entry.logprob) for entry in logprobs.top] == [(0, 0.0), (1, MIN_LOGPROB)]


needs_kernels = pytest.mark.skipif(library.load_library() is None, reason="the kernels were not built")


def _draw_in_torch(logits: Tensor, draws: list[SamplingParams]) -> tuple[list[int], list[Logprobs | None]]:
    with patch.object(library, "load_library", return_value=None):
        return sample_tokens(logits, draws), compute_logprobs(logits, draws, [1] * len(draws))


def _draw_natively(logits: Tensor, draws: list[SamplingParams]) -> tuple[list[int], list[Logprobs | None]]:
    assert find_library(logits) is not None
    return sample_tokens(logits, draws), compute_logprobs(logits, draws, [1] * len(draws))


ALL_KINDS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1e-30}, {"temperature": 100.0}, {"top_k": 1},
    {"top_k": 40}, {"top_k": 5000, "temperature": 3.0}, {"top_p": 0.9}, {"top_p": 0.999, "temperature": 20.0},
    {"top_p": 1e-9}, {"min_p": 0.05}, {"min_p": 1e-9}, {"min_p": 1.0}, {"top_k": 300, "top_p": 0.5, "min_p": 0.01},
    {"top_p": 0.95, "min_p": 0.02}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"logit_bias": {3: 7.25, 5: -100.0}, "top_p": 0.8}, {"temperature": 0.0, "repetition_penalty": 0.7},
]  # fmt: skip


def _kinds(seed: int, vocabulary: int, position: int = 3) -> list[SamplingParams]:
    """One row of each kind, some of them with a grammar's mask or with tokens that may not end the answer."""
    chance = np.random.default_rng(seed)
    found = []
    for number, kind in enumerate(ALL_KINDS):
        counts = TokenCounts(chance.integers(0, vocabulary, 50).tolist(), chance.integers(0, 9, 20).tolist())
        mask = chance.integers(-(2**31), 2**31, -(-vocabulary // 32), dtype=np.int32) if number % 3 == 1 else None
        sampling = Sampling.model_validate({**kind, "min_tokens": 9, "logprobs": number % 7})
        ends = (2, 4, 10**6) if number % 2 else ()
        found.append(SamplingParams(sampling, seed, position, counts, mask, end_token_ids=ends))
    return found


def _adverse(name: str, rows: int, size: int) -> Tensor:
    chance = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size, generator=chance) * 4
    match name:
        case "ties":
            return (logits / 3).round() * 3
        case "equal":
            return torch.zeros(rows, size)
        case "spike":
            return torch.full((rows, size), -60.0).index_fill(1, torch.tensor([size // 2]), 25.0)
        case "forbidden":
            return logits.masked_fill(torch.rand(rows, size, generator=chance) < 0.9, -torch.inf)
        case "nothing":
            return torch.full((rows, size), -torch.inf)
        case "rising":
            return torch.linspace(-30, 30, size).expand(rows, size).contiguous()
        case "infinite":
            return logits.index_fill(1, torch.tensor([6]), torch.inf)
        case "zeros":
            return torch.where(torch.rand(rows, size, generator=chance) < 0.5, 0.0, -0.0)
    return logits


@needs_kernels
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 11), (torch.bfloat16, 1025), (torch.float32, 9001)])
@pytest.mark.parametrize(
    "name", ["random", "ties", "equal", "spike", "forbidden", "nothing", "rising", "infinite", "zeros"]
)
def test_the_native_sampler_is_that_in_torch(name: str, size: int, dtype: torch.dtype) -> None:
    logits, draws = _adverse(name, len(ALL_KINDS), size).to(dtype), _kinds(size, size)
    assert _draw_natively(logits, draws) == _draw_in_torch(logits, draws)


@needs_kernels
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_is_not_a_number_is_drawn_from_as_in_torch(sign: float) -> None:
    logits = _adverse("random", len(ALL_KINDS), 9001)
    logits[:, 7::900] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
    draws = [draw for draw in _kinds(1, 9001) if draw.sampling.temperature > 0]
    logits = logits[: len(draws)]
    assert sample_tokens(logits, draws) == _draw_in_torch(logits, draws)[0]


@needs_kernels
def test_a_large_vocabulary_is_drawn_from_as_in_torch_on_every_instruction_set() -> None:
    native = library.load_library()
    assert native is not None
    size, isas = 151_936, []
    draws = _kinds(5, size)
    logits = _adverse("random", len(draws), size)
    expected = _draw_in_torch(logits, draws)
    before = native.isa
    try:
        for isa in build.instruction_sets():
            with suppress(SettingsError):
                native.select_isa(isa)
                isas.append(isa)
                for threads in (1, 3):
                    native.set_threads(threads)
                    assert _draw_natively(logits, draws) == expected
        order = torch.randperm(len(draws), generator=torch.Generator().manual_seed(1)).tolist()
        assert sample_tokens(logits[order], [draws[row] for row in order]) == [expected[0][row] for row in order]
    finally:
        native.select_isa(before)
        native.set_threads(1)
    assert "plain" in isas


@needs_kernels
def test_a_token_outside_the_vocabulary_is_refused() -> None:
    draw = SamplingParams(Sampling(repetition_penalty=2.0), 0, 0, TokenCounts([12]))
    with pytest.raises(IndexError):
        sample_tokens(torch.zeros(1, 12), [draw])


@given(st.lists(st.integers(0, 40), max_size=20), st.lists(st.integers(0, 600), max_size=300), st.integers(0, 300))
def test_counts_grow_with_the_output(prompt: list[int], output: list[int], number: int) -> None:
    counts = TokenCounts(prompt, output[:number])
    copied = counts.copy_with(output[number:])
    assert _as_counter(counts) == Counter(output[:number])
    counts.add_output(output[number:])
    for grown in (counts, copied):
        assert _as_counter(grown) == Counter(output)
        assert sorted(grown.token_ids.tolist()) == sorted({*prompt, *output})


def _as_counter(counts: TokenCounts) -> Counter[int]:
    return +Counter(dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True)))


# Masks of grammars: what is not allowed is minus infinity, everything else stays as it was


@pytest.mark.parametrize("vocabulary", [31, 64, 1000, 140_000])
@pytest.mark.parametrize("masked_rows", [(), (1,), (0, 2), (1, 2), (0, 1, 2)])
def test_only_allowed_tokens_keep_their_scores(vocabulary: int, masked_rows: tuple[int, ...]) -> None:
    chance = np.random.default_rng(vocabulary)
    scores = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0))
    expected, draws = scores.clone(), []
    for row in range(3):
        allowed = chance.random(vocabulary) < 0.4
        bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
        bits[:vocabulary] = allowed
        mask = np.packbits(bits, bitorder="little").view(np.int32) if row in masked_rows else None
        draws.append(SamplingParams(Sampling(), seed=0, position=0, allowed=mask))
        if row in masked_rows:
            expected[row, torch.from_numpy(~allowed)] = -torch.inf
    assert torch.equal(make_scores(scores, draws), expected)
    assert torch.equal(
        make_scores(scores.bfloat16(), draws), torch.where(expected.isinf(), expected, scores.bfloat16())
    )


def test_what_is_forbidden_or_unlikely_has_no_weight() -> None:
    scores = torch.tensor([[0.0, -1.0, -27.0, -28.0, -79.0, -81.0, -1e30, -torch.inf, torch.nan]])
    weights = to_weights(scores, torch.zeros(1, 1), torch.full((1, 1), math.log2(math.e)))[0].tolist()
    assert weights[0] == 2**40
    assert math.isclose(weights[1], 2**40 / math.e, rel_tol=1e-6)
    assert weights[2:] == [int(2**40 * math.exp(-27)), 0, 0, 0, 0, 0, 0]
