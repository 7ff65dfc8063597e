"""Structured output: whether answers keep to their schemas, and what that costs.

python -m benchmarks.grammar [--quick | --smoke] [--json FILE]

    answers  a random model of a tiny shape answers schemas of many kinds (`sim/schemas.py`) through the engine, 32 at a
             time, at several temperatures. What has ended is held against the `jsonschema` package (`violations`). What
             was cut by `max_tokens` must have tokens that a new matcher allows, and begin a document that is completed
             and then held against the same validator (`cut_not_prefix`). Schemas with keywords that cannot be enforced
             go through the gateway's check, which has to name the keyword and its place. A fifth as many answers have
             a joined grammar: calls of two tools, or else JSON by a schema. The schemas of the types on pages of
             pydantic and of Zod are answered as often, at temperature 1 (`type_violations`).
    costs    processor times of one thread: compiling a grammar, each mask at the place in its answer where it is
             needed, and the replay of an answer in one call; with the demo model's 1,024 words and with a byte-level
             vocabulary of 152,000 words that the script makes: pieces of words, with and without a blank, numbers,
             punctuation and pieces of other scripts
    steps    the engine of the 0.6B shape at batch 32 with that vocabulary: the time of computing and applying masks as
             a share of the step, with grammars of schemas and with joined ones, and steps without grammars against the
             same steps with the code for grammars taken out, in turns
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from benchmarks.common import Arguments, run_benchmark
from benchmarks.grammar_answers import list_allowed_tokens, measure_answers
from benchmarks.grammar_steps import measure_steps
from benchmarks.peers.shapes import SHAPES
from penstock.engine.files import DEMO_MODEL
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from sim.schemas import make_schemas

T = TypeVar("T")
MAX_TOKENS = 200
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Those of the tool model's answers."""
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
    letters = _byte_letters()
    words = dict.fromkeys(["<eos>", *MARKS, *letters.values()])
    merges: list[list[str]] = []
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
        merges.append([left, right])
        groups[kind].append(made)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {word: number for number, word in enumerate(words)}, "merges": merges,
    }  # fmt: skip
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": mark, **flags} for number, mark in enumerate(("<eos>", *MARKS))]
    return json.dumps(
        {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
         "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
    )  # fmt: skip


def _byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte in byte-level vocabularies."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(unseen)}


def _time(found: list[float], call: Callable[[], T], count: int = 1) -> T:
    """Add the processor time of a call, or of one of the `count` things that it does; return what it returns."""
    started_s = time.thread_time()
    result = call()
    found.append((time.thread_time() - started_s) / count)
    return result


def measure_tokenizer(name: str, tokenizer: GrammarTokenizer, num_schemas: int) -> dict[str, float]:
    """Return the times of one tokenizer, in the units that the figures' names say."""
    compiles, masks, advances, replays = (list[float]() for _ in range(4))
    row = np.zeros(tokenizer.num_mask_words, np.int32)
    for number, schema in enumerate(make_schemas(num_schemas, seed=5)):
        grammar = _time(compiles, lambda: CompiledGrammar(make_schema_spec(schema, "schema"), tokenizer))  # noqa: B023
        state, draw = GrammarState(grammar), np.random.default_rng(number)
        while len(state.token_ids) < MAX_TOKENS and not state.is_ended:
            _time(masks, lambda: state.fill_mask(row))  # noqa: B023
            allowed = list_allowed_tokens(row)
            token = allowed[draw.integers(len(allowed))]
            if token in tokenizer.eos_token_ids:
                break
            _time(advances, lambda: state.advance([token]))  # noqa: B023
        if (num_tokens := len(state.token_ids)) > 20:
            fresh = GrammarState(CompiledGrammar(grammar.spec, tokenizer))
            _time(replays, lambda: fresh.advance(state.token_ids), num_tokens)  # noqa: B023
    return {
        f"{name}_compile_ms_p50": statistics.median(compiles) * 1e3,
        f"{name}_compile_ms_p99": _find_quantile(compiles, 0.99) * 1e3,
        f"{name}_mask_us_mean": statistics.fmean(masks) * 1e6,
        f"{name}_mask_us_p50": statistics.median(masks) * 1e6,
        f"{name}_mask_us_p99": _find_quantile(masks, 0.99) * 1e6,
        f"{name}_mask_ms_worst": max(masks) * 1e3,
        f"{name}_advance_us_p50": statistics.median(advances) * 1e6,
        f"{name}_replay_us_per_token": statistics.median(replays) * 1e6,
    }


def _find_quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def run(given: Arguments) -> dict[str, float]:
    """Measure; return the figures."""
    num_schemas, shape = given.choose_size(500, 50, 5), SHAPES[given.choose_size("q06", "q06", "smoke")]
    figures = measure_answers(*given.choose_size((1000, 10_000, 200), (60, 300, 40), (5, 10, 5)))
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    demo = GrammarTokenizer.from_json(text, vocab_size=1024, eos_token_ids=[1])
    figures |= measure_tokenizer("demo", demo, num_schemas)
    made, seconds = make_large_tokenizer(shape.vocabulary), list[float]()
    large = _time(seconds, lambda: GrammarTokenizer.from_json(made, vocab_size=shape.vocabulary, eos_token_ids=[0]))
    figures |= {"large_tokenizer_s": seconds[0]} | measure_tokenizer("large", large, num_schemas)
    return figures | measure_steps(large, shape, given.choose_size(100, 20, 2))


if __name__ == "__main__":
    run_benchmark(__doc__, run)
