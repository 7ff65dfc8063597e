"""How one token is chosen, and its random number: a hash of (seed, position).

A resumed request draws the numbers it would have drawn, in another batch, on another worker or after a crash.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.counts import TokenCounts
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64


@dataclass(frozen=True)
class SamplingParams:
    """How the token of one row is chosen. `position` counts output tokens from 0."""

    sampling: Sampling
    seed: int
    position: int
    counts: TokenCounts | None = None
    """The tokens so far, if penalties read them."""
    allowed: NDArray[np.int32] | None = None
    """The mask of the tokens that may follow, if the sequence has a grammar (`GrammarState.fill_mask`)."""

    end_token_ids: Collection[int] = ()
    """The tokens that end the answer. They are not drawn before it has `min_tokens` tokens."""

    @property
    def forbidden_token_ids(self) -> Collection[int]:
        """The tokens that may not be drawn at this position, because the answer would be shorter than it must be."""
        return self.end_token_ids if self.position < (self.sampling.min_tokens or 0) else ()

    @property
    def changes_scores(self) -> bool:
        """Whether the row's scores are not its logits: tokens may not follow, or have a bias or a penalty."""
        changes = self.allowed is not None or bool(self.sampling.logit_bias) or has_penalties(self.sampling)
        return changes or bool(self.forbidden_token_ids)


def has_penalties(sampling: Sampling) -> bool:
    """Return whether a row of this sampling depends on the tokens before it."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def make_sampling_params(
    seq: Sequence, masks: list[NDArray[np.int32] | None], end_token_ids: frozenset[int]
) -> list[SamplingParams]:
    """Return how the sequence's next token is chosen, and those behind the tokens of its draft."""
    position = seq.num_output_tokens
    counts = seq.count_tokens() if has_penalties(seq.sampling) else None
    return [
        SamplingParams(
            seq.sampling,
            seq.seed,
            position + number,
            counts if counts is None or number == 0 else counts.copy_with(seq.draft[:number]),
            mask,
            end_token_ids,
        )
        for number, mask in enumerate(masks)
    ]


def draw_uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on `seed` and `position` only: 53 bits of SplitMix64's mixing."""
    start = _mix_bits((seed + _GOLDEN) & _MASK)
    return (_mix_bits((start + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix_bits(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
