"""Log probabilities of the model's own distribution: before bias, penalties, temperature and filters."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.kernels.packed import find_library
from penstock.engine.sampling.draw import SamplingParams
from penstock.engine.sampling.native import rank_rows
from penstock.engine.sampling.ranking import count_chunk_rows, top_tokens
from penstock.engine.sampling.shares import WEIGHT_SCALE, compute_rate, to_weights
from penstock.messages import MIN_LOGPROB, Logprobs, TokenLogprob


def compute_logprobs(logits: Tensor, draws: Sequence[SamplingParams], tokens: Sequence[int]) -> list[Logprobs | None]:
    """Return log probabilities of the chosen and the likeliest tokens, for each row of `logits` that asks for them.

    Natural logarithms with six decimals, likeliest first, of equal ones the lowest id. `logits`: [rows, vocabulary].
    """
    found: list[Logprobs | None] = [None] * len(draws)
    asked = [(row, draw.sampling.logprobs) for row, draw in enumerate(draws)]
    counts = {row: count for row, count in asked if count is not None}
    if counts:
        rows = list(counts)
        computed = compute_row_logprobs(logits[rows], list(counts.values()), [tokens[row] for row in rows])
        for row, one in zip(rows, computed, strict=True):
            found[row] = one
    return found


def compute_row_logprobs(logits: Tensor, counts: Sequence[int], tokens: Sequence[int]) -> list[Logprobs]:
    """Return log probabilities of a token and of the `counts` likeliest ones, for each row of `logits`."""
    width = min(max(1, *counts), logits.shape[1])
    native = find_library(logits)
    if native is not None:
        values, ids, totals = rank_rows(native, logits, width)
    else:
        parts = torch.split(logits, count_chunk_rows(logits))
        values, ids, totals = map(torch.cat, zip(*(_rank_rows(part.float(), width) for part in parts), strict=True))
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None]).float()
    found = []
    lines = zip(counts, chosen[:, 0].tolist(), values.tolist(), ids.tolist(), totals.tolist(), strict=True)
    for count, value, best, best_ids, total in lines:
        shift = best[0] + math.log(max(total, 1) / WEIGHT_SCALE)
        pairs = list(zip(best_ids, best, strict=True))[:count]
        top = [TokenLogprob(token=token, logprob=_round_logprob(score - shift)) for token, score in pairs]
        found.append(Logprobs(logprob=_round_logprob(value - shift), top=top))
    return found


def _rank_rows(scores: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the kernels' `rank_rows` does."""
    values, ids = top_tokens(scores, width)
    rates = torch.full((len(scores), 1), compute_rate(1.0), device=scores.device)
    return values, ids, to_weights(scores, values[:, :1], rates).sum(-1)


def _round_logprob(logprob: float) -> float:
    """Round a log probability for the wire format, which has no infinity."""
    return min(0.0, max(MIN_LOGPROB, round(logprob, 6)))
