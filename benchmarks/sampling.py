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

from benchmarks.common import Arguments, describe_machine, parse_arguments, report_figures
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.peers.write import make_model_directory
from penstock.config.settings import EngineSettings
from penstock.engine import sampler
from penstock.engine.loading import open_engine
from penstock.engine.sampler import SamplingParams
from penstock.engine.sampling.counts import TokenCounts
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling

ROWS, THREADS, CONTEXT_TOKENS = 32, 2, 4096


def measure_share(num_steps: int, shape: Shape) -> float:
    """Return the median share of the sampler in decode steps."""
    model = make_model_directory(shape, DIRECTORY / "models")
    core = open_engine(
        EngineSettings(model=str(model), dtype="bfloat16", threads=THREADS, pool_mb=1024, max_step_tokens=2048)
    )
    spent_s = [0.0]
    chance = np.random.default_rng(0)
    for seed in range(ROWS):
        prompt = chance.integers(0, shape.vocabulary, 64).tolist()
        core.add_sequence(
            Sequence(str(seed), prompt, sampling=Sampling(ignore_eos=True), seed=seed, max_new_tokens=999)
        )

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
    kinds = [Sampling(), Sampling(repetition_penalty=1.2, presence_penalty=0.5)]
    added_ms = []
    for position in range(num_rounds):
        times_s = []
        for kind in kinds:
            begun_s = time.perf_counter()
            for one in counts if kind is kinds[1] else []:
                one.add_output([position])
            counted = counts if kind is kinds[1] else [None] * ROWS
            draws = [SamplingParams(kind, row, position, one) for row, one in enumerate(counted)]
            sampler.sample_tokens(logits, draws)
            times_s.append(time.perf_counter() - begun_s)
        added_ms.append((times_s[1] - times_s[0]) * 1e3)
    return statistics.median(added_ms)


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    print(f"{describe_machine()}; {THREADS} threads")
    shape = SHAPES[given.choose_size("q06", "q06", "smoke")]
    return {
        "sampler_share_b32_temperature": measure_share(given.choose_size(100, 10, 2), shape),
        "penalty_ms_b32_4k": measure_penalties(given.choose_size(200, 20, 2), shape.vocabulary),
    }


def main() -> None:
    given = parse_arguments(__doc__ or "")
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
