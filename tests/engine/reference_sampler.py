"""The sampler in plain Python, a token at a time: slow, and the same to the last bit."""

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from penstock.engine.sampler import SamplingParams, draw_uniform

f32 = np.float32


def reference_scores(logits: Tensor, draw: SamplingParams) -> list[f32]:
    """A row's scores after bias and penalties."""
    sampling = draw.sampling
    scores = [f32(x) for x in logits.float().tolist()]
    for token, bias in sampling.logit_bias.items():
        scores[token] += f32(bias)
    for token in set(draw.token_ids):
        factor = f32(sampling.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in Counter(draw.output_token_ids).items():
        scores[token] -= f32(sampling.presence_penalty + count * sampling.frequency_penalty)
    return scores


def reference_token(logits: Tensor, draw: SamplingParams) -> int:
    """The token of one row of logits [vocabulary]."""
    sampling, scores = draw.sampling, reference_scores(logits, draw)
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    best = ranked[0]
    if sampling.temperature == 0:
        return best
    exponents = torch.tensor([float((score - scores[best]) / f32(sampling.temperature)) for score in scores])
    weights = [int(share * 2.0**40) for share in exponents.exp().tolist()]
    kept = ranked[: sampling.top_k or None]
    if sampling.top_p < 1:
        limit, before, nucleus = float(sum(weights[token] for token in kept)) * sampling.top_p, 0, []
        for token in kept:
            if before < limit:
                nucleus.append(token)
            before += weights[token]
        kept = nucleus
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[best]]
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        kept.sort()
    total = sum(weights[token] for token in kept)
    wanted = min(int(float(total) * draw_uniform(draw.seed, draw.position)), total - 1)
    for token in kept:
        wanted -= weights[token]
        if wanted < 0:
            return token
    raise AssertionError("nothing can be drawn")
