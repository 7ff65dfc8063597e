"""Answers of a model that chooses at random among the tokens that a grammar allows."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from penstock.engine.weights.files import DEMO_MODEL
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.messages import GrammarSpec


@dataclass(frozen=True)
class RandomAnswer:
    """An answer, and the mask at each of its positions."""

    token_ids: list[int]
    masks: list[bytes]
    is_ended: bool
    text: str
    """Without end-of-answer tokens; incomplete characters at the end are left out."""


@cache
def load_tokenizer() -> GrammarTokenizer:
    """Return the demo model's tokenizer."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    return GrammarTokenizer.from_json(text, vocab_size=config["vocab_size"], eos_token_ids=[config["eos_token_id"]])


def compile_schema(schema: Any) -> CompiledGrammar:
    """Compile a schema for the demo model."""
    return CompiledGrammar(make_schema_spec(schema, "schema"), load_tokenizer())


def compile_spec(spec: GrammarSpec) -> CompiledGrammar:
    """Compile a grammar for the demo model."""
    return CompiledGrammar(spec, load_tokenizer())


def read_mask(state: GrammarState) -> np.ndarray:
    """Return the row that a state fills."""
    row = np.zeros(state.grammar.tokenizer.num_mask_words, np.int32)
    state.fill_mask(row)
    return row


def list_allowed(state: GrammarState) -> list[int]:
    """Return the tokens that may follow."""
    return [int(one) for one in np.flatnonzero(np.unpackbits(read_mask(state).view(np.uint8), bitorder="little"))]


def encode_text(text: str) -> list[int]:
    """Return a text's tokens."""
    return list(load_tokenizer().engine.tokenize_str(text))


def accepts_text(grammar: CompiledGrammar, text: str) -> bool:
    """Return whether a text is a whole answer, token by token of one byte or more."""
    matcher = grammar.make_matcher()
    tokens = encode_text(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def draw_answer(grammar: CompiledGrammar, seed: int, max_tokens: int) -> RandomAnswer:
    """Answer with random logits, in the order of tokens that `penstock.grammar` describes."""
    draw = np.random.default_rng(seed)
    state = GrammarState(grammar)
    masks: list[bytes] = []
    is_ended = False
    while not is_ended and len(state.token_ids) < max_tokens:
        row = read_mask(state)
        masks.append(row.tobytes())
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: grammar.tokenizer.vocab_size]
        scores = np.where(allowed == 1, draw.standard_normal(grammar.tokenizer.vocab_size), -np.inf)
        token = int(scores.argmax())
        state.advance([token])
        is_ended = token in grammar.tokenizer.eos_token_ids or state.is_ended
    text_ids = [one for one in state.token_ids if one not in grammar.tokenizer.eos_token_ids]
    text = grammar.tokenizer.engine.decode_bytes(text_ids).decode(errors="ignore")
    return RandomAnswer(state.token_ids, masks, is_ended, text)
