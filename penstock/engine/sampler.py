"""From logits to tokens. A token depends on its own logits, its sequence's tokens, its request's seed and its position,
and on nothing else.

The scores are the logits in float32. Bias and then penalties change them; temperature divides them; then top-k, top-p
and min-p, in this order, say what can be drawn. Temperature 0 takes the best, of equal ones the lowest id.
"""

from collections.abc import Sequence

from torch import Tensor

from penstock.engine.sampling.draw import Draw, uniform
from penstock.engine.sampling.filters import draw_at_random, put
from penstock.engine.sampling.logprobs import logprobs
from penstock.engine.sampling.penalties import adjust, changes_scores
from penstock.engine.sampling.ranking import best
from penstock.engine.sampling.shares import take

__all__ = ["Draw", "logprobs", "sample", "uniform"]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary], which stay as they are."""
    assert len(logits) == len(draws)
    if not any(changes_scores(draw.sampling) or draw.sampling.temperature > 0 for draw in draws):
        return list(best(logits).tolist())
    scores = logits.float()
    if any(changes_scores(draw.sampling) for draw in draws):
        scores = scores.clone() if scores is logits else scores
        adjust(scores, draws)
    at_random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    tokens: list[int] = [0] * len(draws) if len(at_random) == len(draws) else best(scores).tolist()
    if at_random:
        put(tokens, at_random, draw_at_random(take(scores, at_random), [draws[row] for row in at_random]))
    return tokens
