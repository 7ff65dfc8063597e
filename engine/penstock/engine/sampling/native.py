"""The sampler on the native kernels. A token and its log probability are those of the sampler in torch, bit for bit."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.engine.kernels import library
from penstock.engine.kernels.library import Library
from penstock.engine.sampling.allowed import find_masks
from penstock.engine.sampling.draw import SamplingParams, draw_uniform
from penstock.engine.sampling.shares import compute_rate


def draw_rows(native: Library, logits: Tensor, draws: Sequence[SamplingParams]) -> list[int]:
    """Draw a token for each row of `logits` [rows, vocabulary], which stay as they are."""
    count, size = logits.shape
    masks, forbidden = find_masks(draws, size)
    rows = (library.SampleRow * count)()
    kept: list[object] = []
    """Holds the arrays that the rows point to."""
    for row, draw, mask, others in zip(rows, draws, masks, forbidden, strict=True):
        sampling = draw.sampling
        if mask is not None:
            assert 32 * mask.size >= size
            assert mask.flags.c_contiguous
            row.mask = mask.ctypes.data
        if others:
            tokens = np.array(others, np.int64)
            row.forbidden, row.num_forbidden = tokens.ctypes.data, len(tokens)
            kept.append(tokens)
        if sampling.logit_bias:
            biased = np.array([*sampling.logit_bias], np.int64)
            biases = np.array([*sampling.logit_bias.values()], np.float32)
            row.biased, row.biases, row.num_biased = biased.ctypes.data, biases.ctypes.data, len(biased)
            kept += [biased, biases]
        if draw.counts is not None:
            tokens, counts = draw.counts.token_ids, draw.counts.output_counts
            row.tokens, row.counts, row.num_tokens = tokens.ctypes.data, counts.ctypes.data, len(tokens)
        row.presence, row.frequency = sampling.presence_penalty, sampling.frequency_penalty
        row.repetition = sampling.repetition_penalty
        row.top_k, row.top_p, row.min_p = sampling.top_k, sampling.top_p, sampling.min_p
        if sampling.temperature > 0:
            row.rate, row.uniform = compute_rate(sampling.temperature), draw_uniform(draw.seed, draw.position)
    drawn = np.empty(count, np.int64)
    args = library.SampleArgs(
        logits.data_ptr(), count, size, logits.stride(0), ctypes.addressof(rows), drawn.ctypes.data,
        logits.element_size(),
    )  # fmt: skip
    native.sample(ctypes.addressof(args))
    return list(drawn.tolist())


def rank_rows(native: Library, logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores and ids of each row's top `width` tokens, both [rows, width], and the weights' sum, [rows].

    The lowest id goes first among equal scores.
    """
    count, size = logits.shape
    values, ids = torch.empty(count, width), torch.empty(count, width, dtype=torch.int64)
    totals = torch.empty(count, dtype=torch.int64)
    args = library.RankArgs(
        logits.data_ptr(), count, size, logits.stride(0), width, compute_rate(1.0), values.data_ptr(), ids.data_ptr(),
        totals.data_ptr(), logits.element_size(),
    )  # fmt: skip
    native.rank(ctypes.addressof(args))
    return values, ids, totals
