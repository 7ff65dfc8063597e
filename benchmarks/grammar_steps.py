"""Masks as a share of a step of the 0.6B shape, at batch 32 and with a vocabulary of 152,000 words."""

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Values
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import count, cycle
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.comparison import compute_ratio, measure_in_turns
from benchmarks.grammar_answers import make_joined_schemas
from benchmarks.peers.shapes import Shape
from benchmarks.systems import open_shape
from penstock.engine import sampler
from penstock.engine.engine import Engine
from penstock.engine.sampling.allowed import make_scores
from penstock.engine.sampling.draw import SamplingParams
from penstock.engine.sequence import Sequence
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.messages import GrammarSpec, Sampling
from sim.schemas import make_schemas

BATCH = 32
MAX_TOKENS = 200
THREADS = 2
NUM_WARM_STEPS = 3
_SAMPLING = Sampling(temperature=1.0, max_tokens=MAX_TOKENS)


class StepBench:
    """An engine whose batch is always full."""

    def __init__(self, tokenizer: GrammarTokenizer, shape: Shape, specs: Values[GrammarSpec]) -> None:
        """Open the engine; `tokenizer` is the one of the shape's vocabulary."""
        # Without drafts each sequence has one row in each step.
        self._engine = open_shape(shape, threads=THREADS, pool_mb=1024, max_batch=BATCH, speculate=False)
        self._numbers = count()
        self._tokenizer, self._eos_ids = tokenizer, tokenizer.eos_token_ids
        self._seqs: list[Sequence] = []
        self.use_grammars(specs)

    def use_grammars(self, specs: Values[GrammarSpec]) -> None:
        """Give new sequences these grammars in turn."""
        self._grammars = cycle([CompiledGrammar(spec, self._tokenizer) for spec in specs])

    def time_masks(self, num_steps: int) -> dict[str, list[float]]:
        """Return the seconds that grammars take of each step, and those of the step."""
        self.fill_batch(with_grammars=True)
        found: dict[str, list[float]] = {"mask": [], "step": []}
        with time_masks() as watch:
            for _ in range(num_steps):
                watch.spent_s = 0.0
                found["step"].append(self.run_step() - watch.extra_s)
                found["mask"].append(watch.spent_s)
        return found

    def fill_batch(self, *, with_grammars: bool) -> None:
        """Replace all sequences by new ones, and step until each decodes."""
        for seq in self._seqs:
            self._engine.remove_sequence(seq)
        self._seqs = [self._add_sequence(with_grammars=with_grammars) for _ in range(BATCH)]
        for _ in range(NUM_WARM_STEPS):
            self.run_step()

    def run_step(self) -> float:
        """Run a step of `BATCH` rows, replace answers that have ended, and return the seconds of the step."""
        started_s = time.perf_counter()
        sampled = self._engine.step()
        elapsed_s = time.perf_counter() - started_s
        assert len({item.seq for item in sampled}) == BATCH
        for item in sampled:
            seq = item.seq
            if seq.is_grammar_ended or item.token_id in self._eos_ids or seq.num_output_tokens == MAX_TOKENS:
                self._engine.remove_sequence(seq)
                self._seqs.remove(seq)
                self._seqs.append(self._add_sequence(with_grammars=seq.grammar is not None))
        return elapsed_s

    def _add_sequence(self, *, with_grammars: bool) -> Sequence:
        """Add a sequence whose prompt is a token: it is a row like those of the others at once."""
        number, grammar = next(self._numbers), GrammarState(next(self._grammars)) if with_grammars else None
        seq = Sequence(
            str(number), [1000 + number % 1000], sampling=_SAMPLING, seed=number, max_new_tokens=MAX_TOKENS,
            grammar=grammar,
        )  # fmt: skip
        self._engine.add_sequence(seq)
        return seq


class Stopwatch:
    """Adds up the time of calls."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.extra_s = 0.0
        """What the last step did for the measurement alone."""

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and whose time counts."""

        def timed(*given: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return call(*given)
            finally:
                self.spent_s += time.perf_counter() - started_s

        return timed


@contextmanager
def time_masks() -> Iterator[Stopwatch]:
    """Time all that a grammar adds to a step: computing masks, applying them, going on by a token.

    Applying them is part of making scores. What that takes without masks is done once more, and taken off.
    """
    watch = Stopwatch()

    def make_scores_twice(logits: Tensor, draws: Values[SamplingParams]) -> Tensor:
        started_s = time.perf_counter()
        make_scores(logits, [replace(draw, allowed=None) for draw in draws])
        watch.extra_s = time.perf_counter() - started_s
        scores: Tensor = watch.wrap(make_scores)(logits, draws)
        watch.spent_s -= watch.extra_s
        return scores

    with ExitStack() as stack:
        for owner, name in ((Engine, "_compute_batch_masks"), (GrammarState, "advance")):
            stack.enter_context(patch.object(owner, name, watch.wrap(getattr(owner, name))))
        stack.enter_context(patch.object(sampler, "make_scores", make_scores_twice))
        yield watch


def measure_steps(tokenizer: GrammarTokenizer, shape: Shape, num_steps: int) -> dict[str, float]:
    """Return the share of masks in a step, and what the code for grammars costs a step without any."""
    specs = [make_schema_spec(schema, "schema") for schema in make_schemas(4 * BATCH, 5)]
    bench = StepBench(tokenizer, shape, specs)
    own = bench.time_masks(num_steps)
    bench.use_grammars([spec for _, spec in make_joined_schemas(2 * BATCH, 5)])
    joined = bench.time_masks(num_steps)
    bench.fill_batch(with_grammars=False)

    def run_step(*, is_whole: bool) -> float:
        with nullcontext() if is_whole else patch.object(sampler, "has_mask", lambda draw: False):
            return bench.run_step()

    sides = {"without": lambda _: run_step(is_whole=False), "whole": lambda _: run_step(is_whole=True)}
    plain_s = measure_in_turns(sides, num_steps)
    return {
        "mask_share_b32_152k": compute_ratio(own, "mask", "step"),
        "joined_mask_share_b32_152k": compute_ratio(joined, "mask", "step"),
        "mask_ms_b32_152k": statistics.median(own["mask"]) * 1e3,
        "constrained_step_ms_b32": statistics.median(own["step"]) * 1e3,
        "unconstrained_step_ms_b32": statistics.median(plain_s["whole"]) * 1e3,
        "unconstrained_b32_ratio": compute_ratio(plain_s, "whole", "without"),
    }
