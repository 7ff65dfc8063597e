"""The sampler in plain Python, a token at a time: slow, and the same to the last bit."""

import math

import numpy as np
from torch import Tensor

from penstock.engine.sampling.sampler import SamplingParams, draw_uniform

f32 = np.float32


def reference_scores(logits: Tensor, draw: SamplingParams) -> list[f32]:
    """A row's scores after bias and penalties."""
    sampling = draw.sampling
    scores = [f32(x) for x in logits.float().tolist()]
    for token, bias in sampling.logit_bias.items():
        scores[token] += f32(bias)
    assert draw.counts is not None
    tokens, counts = draw.counts.token_ids.tolist(), draw.counts.output_counts.tolist()
    for token in tokens:
        factor = f32(sampling.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token, count in zip(tokens, counts, strict=True):
        if count:
            scores[token] -= f32(sampling.presence_penalty + count * sampling.frequency_penalty)
    return scores


def reference_weight(exponent: f32) -> int:
    """2^(40 + exponent), by the float32 operations that the sampler names."""
    exponent = max(exponent, f32(-64))
    whole = np.rint(exponent)
    part, value = exponent - whole, f32(0)
    for coefficient in (1.32647203e-3, 9.67151299e-3, 5.55073358e-2, 2.40222424e-1, 6.93147004e-1):
        value = (value + f32(coefficient)) * part
    return int(float(value + f32(1)) * 2.0 ** (40 + int(whole)))


def reference_token(logits: Tensor, draw: SamplingParams) -> int:
    """The token of one row of logits [vocabulary]."""
    sampling, scores = draw.sampling, reference_scores(logits, draw)
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    best = ranked[0]
    if sampling.temperature == 0:
        return best
    rate = f32(math.log2(math.e) / sampling.temperature)
    weights = [reference_weight((score - scores[best]) * rate) for score in scores]
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
