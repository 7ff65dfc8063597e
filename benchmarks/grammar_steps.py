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

from benchmarks.grammar_answers import make_joined_schemas
from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import Shape
from benchmarks.peers.write import make_model_directory
from penstock.config.settings import EngineSettings
from penstock.engine import sampler
from penstock.engine.engine import Engine
from penstock.engine.loading import open_engine
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
        model = make_model_directory(shape, DIRECTORY / "models")
        settings = EngineSettings(
            model=str(model), dtype="bfloat16", device="cpu", threads=THREADS, pool_mb=1024, max_batch=BATCH,
            speculate=False,
        )  # fmt: skip
        # Without drafts each sequence has one row in each step.
        self._engine: Engine = open_engine(settings)
        self._numbers = count()
        self._tokenizer, self._eos_ids = tokenizer, tokenizer.eos_token_ids
        self._seqs: list[Sequence] = []
        self.use_grammars(specs)

    def use_grammars(self, specs: Values[GrammarSpec]) -> None:
        """Give new sequences these grammars in turn."""
        self._grammars = cycle([CompiledGrammar(spec, self._tokenizer) for spec in specs])

    def time_masks(self, num_steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds that grammars take of each step, and those of the step."""
        self.fill_batch(with_grammars=True)
        mask_s, step_s = list[float](), list[float]()
        with time_masks() as watch:
            for _ in range(num_steps):
                watch.spent_s = 0.0
                step_s.append(self.run_step() - watch.extra_s)
                mask_s.append(watch.spent_s)
        return mask_s, step_s

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
        number = next(self._numbers)
        seq = Sequence(
            str(number),
            [1000 + number % 1000],
            sampling=_SAMPLING,
            seed=number,
            max_new_tokens=MAX_TOKENS,
            grammar=GrammarState(next(self._grammars)) if with_grammars else None,
        )
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


@contextmanager
def leave_masks_out() -> Iterator[None]:
    """Let scores be as they are."""
    with patch.object(sampler, "has_mask", lambda draw: False):
        yield


def _find_share(mask_s: list[float], step_s: list[float]) -> float:
    return statistics.median(mask / step for mask, step in zip(mask_s, step_s, strict=True))


def measure_steps(tokenizer: GrammarTokenizer, shape: Shape, num_steps: int) -> dict[str, float]:
    """Return the share of masks in a step, and what the code for grammars costs a step without any."""
    specs = [make_schema_spec(schema, "schema") for schema in make_schemas(4 * BATCH, 5)]
    bench = StepBench(tokenizer, shape, specs)
    mask_s, step_s = bench.time_masks(num_steps)
    bench.use_grammars([one.make_spec() for one in make_joined_schemas(2 * BATCH, 5)])
    joined_mask_s, joined_step_s = bench.time_masks(num_steps)
    bench.fill_batch(with_grammars=False)
    unconstrained_s, ratios = [], []
    for number in range(num_steps):
        times_s = {}
        for is_whole in (True, False) if number % 2 else (False, True):
            with nullcontext() if is_whole else leave_masks_out():
                times_s[is_whole] = bench.run_step()
        unconstrained_s.append(times_s[True])
        ratios.append(times_s[True] / times_s[False])
    return {
        "mask_share_b32_152k": _find_share(mask_s, step_s),
        "joined_mask_share_b32_152k": _find_share(joined_mask_s, joined_step_s),
        "mask_ms_b32_152k": statistics.median(mask_s) * 1e3,
        "constrained_step_ms_b32": statistics.median(step_s) * 1e3,
        "unconstrained_step_ms_b32": statistics.median(unconstrained_s) * 1e3,
        "unconstrained_b32_ratio": statistics.median(ratios),
    }
