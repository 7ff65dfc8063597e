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
from collections.abc import Sequence

import numpy as np

from benchmarks.common import describe_machine, parse_arguments, report_figures
from benchmarks.grammar_answers import measure_answers
from benchmarks.grammar_steps import measure_steps
from benchmarks.peers.shapes import SHAPES
from penstock.engine.files import DEMO_MODEL
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from sim.schemas import make_schemas

MAX_TOKENS = 200
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Those of the tool model's answers."""
_RIGHT = {"word": "word", "capital": "word", "number": "number", "sign": "sign", "other": "other"}
"""From which pieces the second half of a word is taken, by the kind of the first."""


def make_large_tokenizer(num_words: int, seed: int = 0) -> str:
    """Return the text of a `tokenizer.json` with that many words; word 0 ends an answer, marks follow it."""
    draw = random.Random(seed)
    letters = _byte_letters()
    words = ["<eos>", *MARKS, *letters.values()]
    known = set(words)
    merges: list[list[str]] = []
    groups = {
        "word": [letters[byte] for byte in b"abcdefghijklmnopqrstuvwxyz"],
        "capital": [letters[byte] for byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"],
        "number": [letters[byte] for byte in b"0123456789"],
        "sign": [letters[byte] for byte in b"\"':,.{}[]()/\\_-=<>#;!? \n\t"],
        "other": [letters[byte] for byte in range(128, 256)],
    }
    weights = {"word": 70, "capital": 8, "number": 2, "sign": 5, "other": 15}
    longest = {"word": 12, "capital": 12, "number": 3, "sign": 6, "other": 9}
    blank = letters[0x20]
    while len(words) < num_words:
        kind = draw.choices(list(weights), list(weights.values()))[0]
        # Mostly early, so short, pieces: most others would be too long together.
        left, right = (group[int(len(group) * draw.random() ** 4)] for group in (groups[kind], groups[_RIGHT[kind]]))
        if kind in {"word", "capital"} and draw.random() < 0.25:
            left = blank
        made = left + right
        if len(made) > longest[kind] or made in known or (blank in right):
            continue
        known.add(made)
        words.append(made)
        merges.append([left, right])
        groups[kind].append(made)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {word: number for number, word in enumerate(words)},
        "merges": merges,
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": number, "content": mark, **flags} for number, mark in enumerate(("<eos>", *MARKS))],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": model,
        }
    )


def _byte_letters() -> dict[int, str]:
    """Return the letter that stands for each byte in byte-level vocabularies."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + place) for place, byte in enumerate(unseen)}


def measure_tokenizer(name: str, tokenizer: GrammarTokenizer, num_schemas: int) -> dict[str, float]:
    """Return the times of one tokenizer, in the units that the figures' names say."""
    compiles: list[float] = []
    masks: list[float] = []
    advances: list[float] = []
    replays: list[float] = []
    row = np.zeros(tokenizer.num_mask_words, np.int32)
    for number, schema in enumerate(make_schemas(num_schemas, seed=5)):
        started = time.thread_time()
        grammar = CompiledGrammar(make_schema_spec(schema, "schema"), tokenizer)
        compiles.append(time.thread_time() - started)
        state = GrammarState(grammar)
        draw = np.random.default_rng(number)
        while len(state.token_ids) < MAX_TOKENS and not state.is_ended:
            started = time.thread_time()
            state.fill_mask(row)
            masks.append(time.thread_time() - started)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            token = int(allowed[draw.integers(len(allowed))])
            if token in tokenizer.eos_token_ids:
                break
            started = time.thread_time()
            state.advance([token])
            advances.append(time.thread_time() - started)
        if len(state.token_ids) > 20:
            fresh = GrammarState(CompiledGrammar(grammar.spec, tokenizer))
            started = time.thread_time()
            fresh.advance(state.token_ids)
            replays.append((time.thread_time() - started) / len(state.token_ids))
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


def main() -> None:
    given = parse_arguments(__doc__ or "")
    num_schemas = given.choose_size(500, 50, 5)
    print(describe_machine())
    figures = measure_answers(*given.choose_size((1000, 10_000, 200), (60, 300, 40), (5, 10, 5)))
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    figures |= measure_tokenizer(
        "demo", GrammarTokenizer.from_json(text, vocab_size=1024, eos_token_ids=[1]), num_schemas
    )
    shape = SHAPES[given.choose_size("q06", "q06", "smoke")]
    made = make_large_tokenizer(shape.vocabulary)
    started = time.thread_time()
    large = GrammarTokenizer.from_json(made, vocab_size=shape.vocabulary, eos_token_ids=[0])
    figures["large_tokenizer_s"] = time.thread_time() - started
    figures |= measure_tokenizer("large", large, num_schemas)
    figures |= measure_steps(large, shape, given.choose_size(100, 20, 2))
    report_figures(figures, given)


if __name__ == "__main__":
    main()
