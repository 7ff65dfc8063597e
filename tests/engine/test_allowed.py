"""Masks of grammars on scores: what is not allowed is minus infinity, everything else stays as it was."""

import math

import numpy as np
import pytest
import torch

from penstock.engine.sampling.allowed import make_scores
from penstock.engine.sampling.draw import SamplingParams
from penstock.engine.sampling.shares import to_weights
from penstock.messages import Sampling


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
