"""What drawing tokens costs on a CPU: its share of a step, and what penalties add.

python -m benchmarks.sampling [--quick | --smoke] [--json FILE]

The 0.6B shape with random bf16 weights and 151,936 words, two threads, 32 sequences at temperature 1. The share is the
time in the sampler by that of whole decode steps. Penalties are measured on random logits, 4,096 tokens of context.
"""

import statistics
import time
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import measure_in_turns
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.systems import open_shape
from penstock.engine import sampler
from penstock.engine.sampler import SamplingParams
from penstock.engine.sampling.counts import TokenCounts
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling

ROWS, THREADS, CONTEXT_TOKENS = 32, 2, 4096


def measure_share(num_steps: int, shape: Shape) -> float:
    """Return the median share of the sampler in decode steps."""
    core = open_shape(shape, threads=THREADS, pool_mb=1024, max_step_tokens=2048)
    spent_s, chance, sampling = [0.0], np.random.default_rng(0), Sampling(ignore_eos=True)
    for seed in range(ROWS):
        prompt = chance.integers(0, shape.vocabulary, 64).tolist()
        core.add_sequence(Sequence(str(seed), prompt, sampling=sampling, seed=seed, max_new_tokens=999))

    def draw_timed(logits: Any, draws: Any) -> list[int]:
        begun_s = time.perf_counter()
        tokens = sampler.sample_tokens(logits, draws)
        spent_s[0] += time.perf_counter() - begun_s
        return tokens

    shares: list[float] = []
    with patch("penstock.engine.engine.sample_tokens", draw_timed):
        while len(shares) < num_steps:
            begun_s, spent_s[0] = time.perf_counter(), 0.0
            if len(core.step()) == ROWS:
                shares.append(spent_s[0] / (time.perf_counter() - begun_s))
    return statistics.median(shares)


def measure_penalties(num_rounds: int, vocabulary: int) -> float:
    """Return the milliseconds that penalties add to drawing the tokens of a batch, in the median of the rounds."""
    chance = np.random.default_rng(0)
    logits = (torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()  # the shape's
    counts = [TokenCounts(chance.integers(0, vocabulary, CONTEXT_TOKENS).tolist()) for _ in range(ROWS)]

    def draw(sampling: Sampling, counted: list[TokenCounts], position: int) -> float:
        begun_s = time.perf_counter()
        for one in counted:
            one.add_output([position])
        draws = [SamplingParams(sampling, row, position, one) for row, one in enumerate(counted or [None] * ROWS)]
        sampler.sample_tokens(logits, draws)
        return time.perf_counter() - begun_s

    penalties = Sampling(repetition_penalty=1.2, presence_penalty=0.5)
    sides = {
        "plain": lambda number: draw(Sampling(), [], number),
        "with": lambda number: draw(penalties, counts, number),
    }
    times_s = measure_in_turns(sides, num_rounds)
    return statistics.median(more - less for more, less in zip(times_s["with"], times_s["plain"], strict=True)) * 1e3


def run(given: Arguments) -> dict[str, float]:
    """Measure; return the figures."""
    shape = SHAPES[given.choose_size("q06", "q06", "smoke")]
    return {
        "sampler_share_b32_temperature": measure_share(given.choose_size(100, 10, 2), shape),
        "penalty_ms_b32_4k": measure_penalties(given.choose_size(200, 20, 2), shape.vocabulary),
    }


if __name__ == "__main__":
    run_benchmark(__doc__, run)
