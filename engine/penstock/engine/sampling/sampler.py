"""From logits to tokens. A token depends on its own logits, its sequence's tokens, its request's seed and its position,
and on nothing else.

The scores are the logits in float32, minus infinity where grammar or `min_tokens` do not let a token follow, whatever
is done to them. Bias and then penalties change them; temperature divides them; then top-k, top-p and min-p, in this
order, say what can be drawn. Temperature 0 takes the best, of equal ones the lowest id.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from penstock.engine.kernels import packed
from penstock.engine.kernels.packed import find_best_columns, find_library
from penstock.engine.sampling.allowed import make_scores
from penstock.engine.sampling.draw import SamplingParams, draw_uniform
from penstock.engine.sampling.filters import draw_at_random, set_rows
from penstock.engine.sampling.logprobs import compute_logprobs, compute_row_logprobs
from penstock.engine.sampling.native import draw_rows
from penstock.engine.sampling.penalties import apply_penalties
from penstock.engine.sampling.ranking import count_chunk_rows

__all__ = [
    "NOT_FINITE",
    "SamplingParams",
    "compute_logprobs",
    "compute_row_logprobs",
    "draw_uniform",
    "find_broken_rows",
    "sample_tokens",
]

NOT_FINITE = "the model computed logits that are not finite"
"""The error text of a sequence that no token can be drawn for."""


def find_broken_rows(logits: Tensor) -> set[int]:
    """Return the rows of `logits` [rows, vocabulary] that no token can be drawn from: one of their numbers is none, or
    the highest is infinite.
    """
    # What a model forbids by minus infinity is no fault. Behind a step that has read all weights, each operation of
    # torch takes a tenth of a millisecond, hence the kernel.
    if (native := find_library(logits)) is not None:
        return packed.find_broken_rows(native, logits)
    # The maximum is no number where one of the numbers is none.
    return {row for row, high in enumerate(logits.amax(1).tolist()) if not math.isfinite(high)}


def sample_tokens(logits: Tensor, draws: Sequence[SamplingParams]) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary], which stay as they are."""
    assert len(logits) == len(draws)
    if not any(draw.sampling.temperature > 0 or draw.changes_scores for draw in draws):
        return _take_best(logits)
    native = find_library(logits)
    return draw_rows(native, logits, draws) if native is not None else draw_with_torch(logits, draws)


def draw_with_torch(logits: Tensor, draws: Sequence[SamplingParams]) -> list[int]:
    """Draw as the native sampler does, to the last bit: for devices, and where the kernels were not built."""
    step, tokens = count_chunk_rows(logits), list[int]()
    for begin in range(0, len(draws), step):
        tokens += _draw_chunk(logits[begin : begin + step], draws[begin : begin + step])
    return tokens


def _draw_chunk(logits: Tensor, draws: Sequence[SamplingParams]) -> list[int]:
    scores = make_scores(logits, draws)
    apply_penalties(scores, draws)
    at_random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if len(at_random) == len(draws):
        return draw_at_random(scores, draws)
    tokens = _take_best(scores)
    if at_random:
        set_rows(tokens, at_random, draw_at_random(scores[at_random], [draws[row] for row in at_random]))
    return tokens


def _take_best(scores: Tensor) -> list[int]:
    """Return the id of each row's highest score, the lowest of equal ones. Scores are [rows, vocabulary]."""
    if (native := find_library(scores)) is not None:
        return find_best_columns(native, scores)
    found: list[int] = scores.argmax(-1).tolist()
    return found
