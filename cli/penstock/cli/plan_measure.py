"""Measures how fast the engine runs a model on this machine, for `penstock plan --measure`."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.config.settings import EngineSettings
from penstock.engine.weights.files import check_model_here, ignore_progress
from penstock.errors import DependencyMissing
from penstock.messages import Sampling
from penstock.plan.rates import DecodeBatch, WorkerRates

if TYPE_CHECKING:
    from penstock.engine.opening import Engine
    from penstock.engine.sequence import Sequence

MIN_MEASURE_S, MIN_MEASURE_ROUNDS = 0.5, 3
"""Each rate is measured for at least this time, and over at least this many prompts or steps, after a warm-up."""


def measure_engine(settings: EngineSettings, num_prompt: int) -> WorkerRates:
    """Open the engine and measure prompts of `num_prompt` tokens, as far as they fit, and decode by batch size.

    Raises `ModelLoadError`, `DependencyMissing`.
    """
    check_model_here(settings.model, ignore_progress)
    try:
        from penstock.engine.opening import open_engine
    except ImportError as error:
        raise DependencyMissing(f"--measure needs pip install 'penstock[worker]' ({error})") from None
    engine = open_engine(settings)
    engine.pool_mapping.wait_until_done()
    capacity_tokens = engine.pool.num_blocks * settings.block_size
    num_prompt = max(1, min(num_prompt, engine.model.context_length // 2, capacity_tokens // 2))
    return WorkerRates(
        source=f"measuring {settings.model} here, prompts of {num_prompt:,} tokens, {settings.num_threads} threads",
        prefill_tokens_per_s=_measure_prefill(engine, num_prompt),
        batches=tuple(_measure_batches(engine, num_prompt)),
        block_size=settings.block_size,
        pool_blocks=engine.pool.num_blocks,
        block_bytes=engine.block_bytes,
    )


def _measure_prefill(engine: "Engine", num_prompt: int) -> float:
    """Return prompt tokens per second, for one prompt after the other."""
    _step_until_first_tokens(engine, _add_sequences(engine, 1, num_prompt, 1))
    rounds, begun_s = 0, time.perf_counter()
    while rounds < MIN_MEASURE_ROUNDS or time.perf_counter() - begun_s < MIN_MEASURE_S:
        _step_until_first_tokens(engine, _add_sequences(engine, 1, num_prompt, 1))
        rounds += 1
    return rounds * num_prompt / (time.perf_counter() - begun_s)


def _measure_batches(engine: "Engine", num_prompt: int) -> Iterator[DecodeBatch]:
    """Yield the decode rates of 1, 2, 4, … sequences, up to the limits of batch and pool."""
    size, block = 1, engine.settings.block_size
    while size <= engine.settings.max_batch:
        num_left = engine.pool.num_blocks // size * block - num_prompt
        max_new = min(num_left, engine.model.context_length - num_prompt)
        if max_new < MIN_MEASURE_ROUNDS + 2:
            return
        yield DecodeBatch(size, _measure_decode(engine, _add_sequences(engine, size, num_prompt, max_new), max_new))
        size *= 2


def _measure_decode(engine: "Engine", seqs: list["Sequence"], max_new: int) -> float:
    """Return output tokens per second of all sequences together, after each has its first token."""
    _step_until_first_tokens(engine, seqs, remove=False)
    engine.step()
    max_rounds = max_new - max(seq.num_output_tokens for seq in seqs)
    tokens, rounds, begun_s = 0, 0, time.perf_counter()
    while rounds < max_rounds and (rounds < MIN_MEASURE_ROUNDS or time.perf_counter() - begun_s < MIN_MEASURE_S):
        tokens += len(engine.step())
        rounds += 1
    taken_s = time.perf_counter() - begun_s
    for seq in seqs:
        engine.remove_sequence(seq)
    return tokens / taken_s


def _add_sequences(engine: "Engine", num_seqs: int, num_prompt: int, max_new: int) -> list["Sequence"]:
    from penstock.engine.sequence import Sequence

    prompt = [at * 7 % engine.model.vocab_size for at in range(num_prompt)]
    greedy = Sampling(temperature=0.0)
    seqs = [
        Sequence(f"measure-{at}", prompt, sampling=greedy, seed=0, max_new_tokens=max_new) for at in range(num_seqs)
    ]
    for seq in seqs:
        engine.add_sequence(seq)
    return seqs


def _step_until_first_tokens(engine: "Engine", seqs: list["Sequence"], *, remove: bool = True) -> None:
    """Step until each sequence has a token, then remove the sequences unless told not to."""
    while any(seq.num_output_tokens == 0 for seq in seqs):
        engine.step()
    if remove:
        for seq in seqs:
            engine.remove_sequence(seq)
