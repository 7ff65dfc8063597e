"""Structured output: what grammars cost.

python -m benchmarks.grammar [--quick | --smoke] [--json FILE]

    costs    processor times of one thread: compiling a grammar, each mask at the place in its answer where it is
             needed, and the replay of an answer in one call; with the demo model's 1,024 words and with a byte-level
             vocabulary of 152,000 words that the script makes: pieces of words, with and without a blank, numbers,
             punctuation and pieces of other scripts
    steps    the engine of the 0.6B shape at batch 32 with that vocabulary: the time of computing and applying masks as
             a share of the step, with grammars of schemas (`sim/schemas.py`) and with joined ones (calls of two tools,
             or else JSON by a schema), and steps without grammars against the same steps with the code for grammars
             taken out
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, cycle
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, measure_in_turns
from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.systems import open_shape
from penstock.engine.engine import Engine
from penstock.engine.sampling import sampler
from penstock.engine.sampling.allowed import make_scores
from penstock.engine.sampling.draw import SamplingParams
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.weights.files import DEMO_MODEL
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.grammar.tools import ConstrainedTool, constrain_calls
from penstock.messages import GrammarSpec, Sampling
from sim.schemas import make_schemas
from sim.workload import load_tool_model

T = TypeVar("T")
MAX_TOKENS, BATCH, THREADS, NUM_WARM_STEPS = 200, 32, 2, 3
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Those of the tool model's answers."""
SAMPLING = Sampling(temperature=1.0, max_tokens=MAX_TOKENS)
_KINDS = {
    "word": (b"abcdefghijklmnopqrstuvwxyz", 70, 12),
    "capital": (b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", 8, 12),
    "number": (b"0123456789", 2, 3),
    "sign": (b"\"':,.{}[]()/\\_-=<>#;!? \n\t", 5, 6),
    "other": (bytes(range(128, 256)), 15, 9),
}
"""By kind of word: its bytes, how frequent it is, and the bytes of the longest."""


def make_large_tokenizer(num_words: int, seed: int = 0) -> str:
    """Return the text of a `tokenizer.json` with that many words; word 0 ends an answer, marks follow it."""
    draw = random.Random(seed)
    letters = bytes_to_unicode()
    words = dict.fromkeys(["<eos>", *MARKS, *letters.values()])
    merges: list[tuple[str, str]] = []
    groups = {kind: [letters[byte] for byte in own] for kind, (own, _, _) in _KINDS.items()}
    weights, blank = [weight for _, weight, _ in _KINDS.values()], letters[0x20]
    while len(words) < num_words:
        kind = draw.choices(list(_KINDS), weights)[0]
        # The second half of a capitalised word is in small letters. Mostly early, so short, pieces: most others would
        # be too long together.
        halves = (groups[kind], groups["word" if kind == "capital" else kind])
        left, right = (group[int(len(group) * draw.random() ** 4)] for group in halves)
        if kind in {"word", "capital"} and draw.random() < 0.25:
            left = blank
        made = left + right
        if len(made) > _KINDS[kind][2] or made in words or blank in right:
            continue
        words[made] = None
        merges.append((left, right))
        groups[kind].append(made)
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<eos>", *MARKS)])
    return str(tokenizer.to_str())


def time_call(found: list[float], call: Callable[[], T], count: int = 1) -> T:
    """Add the processor time of a call, or of one of the `count` things that it does; return what it returns."""
    started_s = time.thread_time()
    result = call()
    found.append((time.thread_time() - started_s) / count)
    return result


def measure_tokenizer(name: str, tokenizer: GrammarTokenizer, num_schemas: int) -> dict[str, float]:
    """Return the times of one tokenizer, in the units that the figures' names say."""
    compiles, masks, replays = (list[float]() for _ in range(3))
    row = np.zeros(tokenizer.num_mask_words, np.int32)
    for number, schema in enumerate(make_schemas(num_schemas, seed=5)):
        grammar = time_call(compiles, lambda: CompiledGrammar(make_schema_spec(schema, "schema"), tokenizer))  # noqa: B023
        state, draw = GrammarState(grammar), np.random.default_rng(number)
        while len(state.token_ids) < MAX_TOKENS and not state.is_ended:
            time_call(masks, lambda: state.fill_mask(row))  # noqa: B023
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(allowed[draw.integers(len(allowed))])
            if token in tokenizer.eos_token_ids:
                break
            state.advance([token])
        if (num_tokens := len(state.token_ids)) > 20:
            fresh = GrammarState(CompiledGrammar(grammar.spec, tokenizer))
            time_call(replays, lambda: fresh.advance(state.token_ids), num_tokens)  # noqa: B023
    figures = {f"{name}_mask_us_mean": statistics.fmean(masks) * 1e6}
    for what, found in ((f"{name}_compile_ms", compiles), (f"{name}_mask_us", masks)):
        for percent in (50, 99):
            figures[f"{what}_p{percent}"] = float(np.percentile(found, percent)) * (1e6 if "us" in what[-2:] else 1e3)
    return figures | {f"{name}_replay_us_per_token": statistics.median(replays) * 1e6}


def make_joined_specs(number: int, seed: int) -> list[GrammarSpec]:
    """Return that many grammars of answers that call one of two tools, by the tool model's response template, or else
    are JSON.
    """
    template = load_tool_model().response_template
    assert template is not None
    objects = [schema for schema in make_schemas(4 * number + 40, seed + 1) if schema.get("type") == "object"]
    found = []
    for place, answer in enumerate(make_schemas(number, seed)):
        tools = [ConstrainedTool(f"tool{one}", objects[(place + one) % len(objects)]) for one in range(2)]
        joined = constrain_calls(template, tools, is_required=False, is_parallel=True, answer=answer)
        found.append(joined.make_spec())
    return found


class StepBench:
    """An engine whose batch is always full."""

    def __init__(self, tokenizer: GrammarTokenizer, shape: Shape) -> None:
        """Open the engine; `tokenizer` is the one of the shape's vocabulary."""
        # Without drafts each sequence has one row in each step.
        self._engine = open_shape(shape, threads=THREADS, pool_mb=1024, max_batch=BATCH, speculate=False)
        self._numbers, self._tokenizer, self._seqs = count(), tokenizer, list[EngineSequence]()

    def time_masks(self, specs: Sequence[GrammarSpec], num_steps: int) -> dict[str, list[float]]:
        """Return the seconds that these grammars take of each step, and those of the step."""
        self.fill_batch(specs)
        found: dict[str, list[float]] = {"mask": [], "step": []}
        with time_masks() as spent:
            for _ in range(num_steps):
                spent.mask_s = 0.0
                found["step"].append(self.run_step() - spent.extra_s)
                found["mask"].append(spent.mask_s)
        return found

    def fill_batch(self, specs: Sequence[GrammarSpec]) -> None:
        """Replace all sequences by new ones with these grammars in turn, or none, and step until each decodes."""
        self._grammars = cycle([CompiledGrammar(spec, self._tokenizer) for spec in specs] or [None])
        for seq in self._seqs:
            self._engine.remove_sequence(seq)
        self._seqs = [self._add_sequence() for _ in range(BATCH)]
        for _ in range(NUM_WARM_STEPS):
            self.run_step()

    def run_step(self) -> float:
        """Run a step of `BATCH` rows, replace answers that have ended, and return the seconds of the step."""
        started_s = time.perf_counter()
        sampled = self._engine.step()
        elapsed_s = time.perf_counter() - started_s
        assert len({item.seq for item in sampled}) == BATCH
        for seq, token_id, *_ in sampled:
            is_end = token_id in self._tokenizer.eos_token_ids
            if seq.is_grammar_ended or is_end or seq.num_output_tokens == MAX_TOKENS:
                self._engine.remove_sequence(seq)
                self._seqs.remove(seq)
                self._seqs.append(self._add_sequence())
        return elapsed_s

    def _add_sequence(self) -> EngineSequence:
        """Add a sequence whose prompt is a token: it is a row like those of the others at once."""
        number, grammar = next(self._numbers), next(self._grammars)
        seq = EngineSequence(
            str(number), [1000 + number % 1000], sampling=SAMPLING, seed=number, max_new_tokens=MAX_TOKENS,
            grammar=None if grammar is None else GrammarState(grammar),
        )  # fmt: skip
        self._engine.add_sequence(seq)
        return seq


@dataclass
class Spent:
    """What a step took of a grammar's time."""

    mask_s: float = 0.0
    extra_s: float = 0.0
    """What the step did for the measurement alone."""


@contextmanager
def time_masks() -> Iterator[Spent]:
    """Time all that a grammar adds to a step: computing masks, applying them, going on by a token.

    Applying them is part of making scores. What that takes without masks is done once more, and taken off.
    """
    spent = Spent()

    def time_calls(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_time(*given: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return call(*given)
            finally:
                spent.mask_s += time.perf_counter() - started_s

        return call_and_time

    def make_scores_twice(logits: Tensor, draws: Sequence[SamplingParams]) -> Tensor:
        started_s = time.perf_counter()
        make_scores(logits, [replace(draw, allowed=None) for draw in draws])
        spent.extra_s = time.perf_counter() - started_s
        scores: Tensor = time_calls(make_scores)(logits, draws)
        spent.mask_s -= spent.extra_s
        return scores

    with ExitStack() as stack:
        for owner, name in ((Engine, "_compute_batch_masks"), (GrammarState, "advance")):
            stack.enter_context(patch.object(owner, name, time_calls(getattr(owner, name))))
        stack.enter_context(patch.object(sampler, "make_scores", make_scores_twice))
        yield spent


def measure_steps(tokenizer: GrammarTokenizer, shape: Shape, num_steps: int) -> dict[str, float]:
    """Return the share of masks in a step, and what the code for grammars costs a step without any."""
    specs = [make_schema_spec(schema, "schema") for schema in make_schemas(4 * BATCH, 5)]
    bench = StepBench(tokenizer, shape)
    own = bench.time_masks(specs, num_steps)
    joined = bench.time_masks(make_joined_specs(2 * BATCH, 5), num_steps)
    bench.fill_batch([])

    def run_step(*, is_whole: bool) -> float:
        with nullcontext() if is_whole else patch.object(SamplingParams, "changes_scores", new=False):
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


def run(given: Arguments) -> dict[str, float]:
    """Measure; return the figures."""
    num_schemas, shape = given.choose_size(500, 50, 5), SHAPES[given.choose_size("q06", "q06", "smoke")]
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    demo = GrammarTokenizer.from_json(text, vocab_size=1024, eos_token_ids=[1])
    made = make_large_tokenizer(shape.vocabulary)
    large = GrammarTokenizer.from_json(made, vocab_size=shape.vocabulary, eos_token_ids=[0])
    figures = measure_tokenizer("demo", demo, num_schemas) | measure_tokenizer("large", large, num_schemas)
    return figures | measure_steps(large, shape, given.choose_size(100, 20, 2))


if __name__ == "__main__":
    run_benchmark(__doc__, run)
