"""Speculative decoding: how much sooner tokens come where text is copied, and what drafts cost where they fail.

python -m benchmarks.speculative [--quick | --smoke] [--json FILE]

First the tool model answers prompts of its own corpus that ask it to copy words and to extract JSON. Then the 0.6B
shape (`--quick`: that of 135 million weights) with random bf16 weights, one thread, says the time: what it would draw
is replaced by these answers, after it was drawn as always. The engine with drafts and the one without take turns on the
same weights. All times are processor time, of decode steps alone.

    acceptance           the share of drafted tokens that are accepted, with the costs of that shape
    tokens_a_step_copy   tokens that a decode step gives a sequence, one sequence at a time
    itl_speedup_copy_bN  the time between two tokens without drafts to that with them, N sequences at once
    itl_speedup_other_bN the same, for random text of 64 words, where guesses are always there and fail; _worst: the
                         least of them
    verify_N_rows        the time of a step with N rows of one sequence to that of a step with one
"""

import itertools
import statistics
import time
from collections.abc import Sequence as Values
from functools import partial
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import Arguments, format_spread, run_benchmark
from benchmarks.comparison import compute_ratios, measure_in_turns
from benchmarks.systems import draw_tokens, write_shape
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sampling.sampler import SamplingParams, sample_tokens
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling
from tools.tool_corpus import TOOL_MODEL, make_conversation, render_conversation

GREEDY = Sampling(temperature=0.0)
MIN_ANSWER_TOKENS = 24
OTHER_BATCHES = (1, 4, 16, 32)
NUM_OTHER_WORDS = 64
VERIFIED_ROWS = (1, 4, 8)
NUM_TRIALS, TRIAL_CONTEXT_TOKENS = 15, 128


class Exchange(NamedTuple):
    """A prompt and the answer that is given to it."""

    prompt: list[int]
    answer: list[int]


def record_answers(count: int) -> list[Exchange]:
    """Return the tool model's own answers to prompts that ask for copies and for extraction, in turns."""
    model = accelerate_model(load_model(EngineSettings(model=str(TOOL_MODEL), dtype="float32")))
    engine = Engine(model, EngineSettings(max_batch=1))
    found: dict[str, list[Exchange]] = {"repetition": [], "extraction": []}
    for number in itertools.count():
        if all(len(exchanges) == count // 2 for exchanges in found.values()):
            break
        conversation = make_conversation(f"speculative {number}", held_out=True, repetitions=0.5)
        kind = conversation.kind
        if kind not in found or len(found[kind]) == count // 2:
            continue
        text = render_conversation(model.tokenizer, conversation, whole=False)
        prompt = model.tokenizer.encode(text, add_special_tokens=False)
        seq = Sequence("copy", prompt, sampling=GREEDY, seed=0, max_new_tokens=120)
        engine.add_sequence(seq)
        while seq.num_output_tokens < 120 and not model.eos_token_ids & {*seq.output_token_ids}:
            engine.step()
        engine.remove_sequence(seq)
        answer = seq.output_token_ids
        if len(answer) >= MIN_ANSWER_TOKENS:
            found[kind].append(Exchange(prompt, answer))
    return [exchange for pair in zip(*found.values(), strict=True) for exchange in pair]


def make_other_text(count: int, num_tokens: int) -> list[Exchange]:
    """Return texts in which every token has come before, and what came behind it says nothing."""
    chance, words = Random(7), range(300, 300 + NUM_OTHER_WORDS)
    return [Exchange(draw_tokens(chance, 48, words), draw_tokens(chance, num_tokens, words)) for _ in range(count)]


def decode_answers(engine: Engine, exchanges: Values[Exchange]) -> tuple[float, int]:
    """Give all answers at once; return the seconds, and the steps, from when all have their first token to the end."""

    def draw_given(logits: Tensor, draws: Values[SamplingParams]) -> list[int]:
        sample_tokens(logits, draws)
        answers = [exchanges[draw.seed].answer for draw in draws]
        return [answer[min(draw.position, len(answer) - 1)] for answer, draw in zip(answers, draws, strict=True)]

    # Some more tokens, so that none ends before all have begun.
    seqs = [
        Sequence(f"s{seed}", one.prompt, sampling=GREEDY, seed=seed, max_new_tokens=len(one.answer) + 64)
        for seed, one in enumerate(exchanges)
    ]
    with patch("penstock.engine.engine.sample_tokens", draw_given):
        for seq in seqs:
            engine.add_sequence(seq)
        while any(seq.num_output_tokens == 0 for seq in seqs):
            engine.step()
        for seq, one in zip(seqs, exchanges, strict=True):
            seq.max_new_tokens = max(len(one.answer), seq.num_output_tokens + 1)
        started_s, num_steps = time.process_time(), 0
        while engine.has_work():
            engine.step()
            num_steps += 1
        elapsed_s = time.process_time() - started_s
    for seq, one in zip(seqs, exchanges, strict=True):
        assert seq.output_token_ids[: len(one.answer)] == one.answer, "an answer is not the given one"
        engine.remove_sequence(seq)
    return elapsed_s, num_steps


class Sides:
    """The engine with drafts and the one without, on the same weights."""

    def __init__(self, model: LoadedModel) -> None:
        settings = EngineSettings(pool_mb=512)
        self.plain = Engine(model, settings.model_copy(update={"speculate": False}))
        self.drafting = Engine(model, settings.model_copy(update={"speculate": True}))
        for engine in (self.plain, self.drafting):
            engine.measure_speed()
        print(self.drafting.scheduler.cost, flush=True)

    def compare_sides(self, groups: Values[Values[Exchange]], rounds: int, name: str) -> float:
        """Return the median of the rounds' ratios: seconds without drafts by those with them."""

        def decode(engine: Engine) -> float:
            return sum(decode_answers(engine, group)[0] for group in groups)

        sides = {"plain": lambda _: decode(self.plain), "drafting": lambda _: decode(self.drafting)}
        ratios = compute_ratios(measure_in_turns(sides, rounds, name), "plain", "drafting")
        print(f"{name}: {format_spread(ratios)}", flush=True)
        return statistics.median(ratios)

    def time_rows(self) -> dict[int, float]:
        """Return the median seconds of a step of one sequence by its number of rows; the numbers take turns."""
        chance = Random(3)
        steps = {rows: partial(self._time_step, chance, rows) for rows in VERIFIED_ROWS}
        return {rows: statistics.median(found) for rows, found in measure_in_turns(steps, NUM_TRIALS).items()}

    @torch.inference_mode()
    def _time_step(self, chance: Random, rows: int, _: int) -> float:
        engine, prompt = self.plain, [chance.randrange(300, 900) for _ in range(TRIAL_CONTEXT_TOKENS)]
        seq = Sequence("trial", prompt, sampling=GREEDY, seed=0, max_new_tokens=16)
        seq.block_table = engine.pool.allocate_blocks(TRIAL_CONTEXT_TOKENS // 16 + 1)
        seq.num_computed_tokens = len(prompt) - 1
        seq.draft = [chance.randrange(300, 900) for _ in range(rows - 1)]
        started_s = time.process_time()
        engine._run_plan([(seq, 1)])  # noqa: SLF001 - a step with a draft of this length, whatever it costs
        taken_s = time.process_time() - started_s
        engine.pool.free_blocks(seq.block_table)
        return taken_s


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    num_copies, num_other_tokens, rounds, shape = given.choose_size(
        (16, 96, 6, "q06"), (4, 16, 2, "small"), (2, 4, 1, "smoke")
    )
    copies = record_answers(num_copies)
    lengths = [len(one.answer) for one in copies]
    print(f"{len(copies)} copies of {min(lengths)} to {max(lengths)} tokens; shape {shape}, one thread", flush=True)
    sides = Sides(accelerate_model(load_model(EngineSettings(model=str(write_shape(shape)), dtype="bfloat16"))))
    seconds = sides.time_rows()
    figures = {f"verify_{rows}_rows": seconds[rows] / seconds[1] for rows in VERIFIED_ROWS[1:]}
    one_by_one = [[one] for one in copies]
    steps = sum(decode_answers(sides.drafting, group)[1] for group in one_by_one)
    figures["acceptance"] = sides.drafting.num_accepted_tokens / sides.drafting.num_drafted_tokens
    figures["tokens_a_step_copy"] = sum(length - 1 for length in lengths) / steps
    by_four = [copies[first : first + 4] for first in range(0, len(copies), 4)]
    groups: dict[str, Values[Values[Exchange]]] = {"copy_b1": one_by_one, "copy_b4": by_four}
    groups |= {f"other_b{batch}": [make_other_text(batch, num_other_tokens)] for batch in OTHER_BATCHES}
    for name, given_groups in groups.items():
        figures[f"itl_speedup_{name}"] = sides.compare_sides(given_groups, rounds, name)
    figures["itl_speedup_other_worst"] = min(figures[f"itl_speedup_other_b{batch}"] for batch in OTHER_BATCHES)
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
