"""Constrained answers of a random model through the engine, each held against an independent validator."""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.detokenizer import Detokenizer
from penstock.engine.engine import Engine
from penstock.engine.model import LoadedModel
from penstock.engine.probe import probe_layout
from penstock.engine.sequence import Sequence
from penstock.engine.weights import MappedWeights
from penstock.errors import GrammarFailed, InvalidRequest, UnsupportedSchema
from penstock.grammar.checker import GrammarChecker
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState
from penstock.grammar.tools import ConstrainedTool, constrain_calls
from penstock.ingest.openai.answer_parser import AnswerParser
from penstock.messages import FinishReason, GrammarSpec, Sampling
from sim.schemas import Schema, find_violation, load_type_schemas, make_refused_schemas, make_schemas
from sim.workload import load_demo_model, load_tool_model
from tools.tiny import build_tiny_model, shrink_config

BATCH = 32
MAX_TOKENS = 250
MAX_COMPLETION_TOKENS = 4000
"""An answer that was cut is no prefix of a valid one if it does not come to an end within this many more tokens."""
TEMPERATURES = (0.7, 1.0, 1.5, 3.0)
_CLOSING = (b"}", b"]", b'"', b",")
"""What brings a document to its end, sooner or later."""


@dataclass(frozen=True)
class ConstrainedAnswer:
    """An answer that has ended."""

    schema: Schema
    """Of a joined grammar what `make_joined_schemas` returns."""
    grammar: CompiledGrammar
    token_ids: list[int]
    text: str
    """What its reader saw."""
    finish_reason: FinishReason


def load_random_model(demo: LoadedModel, seed: int = 0) -> LoadedModel:
    """Return a model of the smallest shape of a model's architecture, with its tokenizer and random weights."""
    config = shrink_config(demo.config, {"vocab_size": demo.vocab_size})
    module = build_tiny_model(type(demo.module), config, seed, torch.device("cpu"))
    layout = probe_layout(module, EngineSettings().block_size, torch.float32, demo.device)
    model = replace(demo, module=module, dtype=torch.float32, layout=layout, weights=MappedWeights([]))
    return accelerate_model(model)


def open_grammar_tokenizer(model: LoadedModel) -> GrammarTokenizer:
    """Return a model's tokenizer as the grammar engine needs it."""
    text = model.tokenizer.backend_tokenizer.to_str()
    return GrammarTokenizer.from_json(text, vocab_size=model.vocab_size, eos_token_ids=sorted(model.eos_token_ids))


def generate_answers(
    model: LoadedModel, asked: list[tuple[Schema, GrammarSpec]], num_answers: int,
    check_answer: Callable[[ConstrainedAnswer], None], temperatures: tuple[float, ...] = TEMPERATURES,
) -> None:  # fmt: skip
    """Generate answers to the grammars in turn, `BATCH` at a time, and call `check_answer` with each that has ended."""
    engine = Engine(model, EngineSettings(device="cpu", threads=2, pool_mb=64, max_batch=BATCH))
    tokenizer = open_grammar_tokenizer(model)
    grammars = [CompiledGrammar(spec, tokenizer) for _, spec in asked[:num_answers]]
    waiting, running = iter(range(num_answers)), dict[str, _RunningAnswer]()
    while True:
        while len(running) < BATCH and (number := next(waiting, None)) is not None:
            schema, spec = asked[number % len(asked)]
            temperature = temperatures[number // len(asked) % len(temperatures)]
            answer = _RunningAnswer(model, schema, grammars[number % len(asked)], number, temperature, spec.kind)
            running[answer.seq.id] = answer
            engine.add_sequence(answer.seq)
        if not running:
            return
        for item in engine.step():
            answer = running[item.seq.id]
            if (ended := answer.add_token(item.token_id)) is not None:
                engine.remove_sequence(item.seq)
                del running[item.seq.id]
                check_answer(ended)


class _RunningAnswer:
    """An answer that is under way."""

    def __init__(self, model: LoadedModel, schema: Schema, grammar: CompiledGrammar, number: int, temperature: float,
                 kind: str) -> None:  # fmt: skip
        self._schema, self._grammar, self._text = schema, grammar, ""
        self._state = GrammarState(grammar)  # its own one, which is asked whether the answer has ended
        sampling = Sampling(
            temperature=temperature, seed=number, max_tokens=MAX_TOKENS, special_text=True if kind == "tools" else None
        )
        self._output = Detokenizer(model.tokenizer, sampling, model.eos_token_ids, MAX_TOKENS)
        prompt = [2 + (number * 7 + place) % (model.vocab_size - 2) for place in range(1 + number % 9)]
        self.seq = Sequence(
            str(number), prompt, sampling=sampling, seed=number, max_new_tokens=MAX_TOKENS,
            grammar=GrammarState(grammar),
        )  # fmt: skip

    def add_token(self, token_id: int) -> ConstrainedAnswer | None:
        """Add a token; return the answer once it has ended."""
        self._state.advance([token_id])
        text, reason = self._output.add_token(token_id, is_grammar_ended=self._state.is_ended)
        self._text += text
        if reason is None:
            return None
        return ConstrainedAnswer(self._schema, self._grammar, self._state.token_ids, self._text, reason)


class AnswerChecker:
    """Counts the answers that break a promise."""

    def __init__(self, find: Callable[[Schema, str], object] = find_violation, *, completes_cut: bool = True) -> None:
        """`find` returns what is wrong with a text. Without `completes_cut` what `max_tokens` cut is not looked at."""
        self._find, self._completes_cut = find, completes_cut
        self.num_answers = self.num_ended = self.num_violations = self.num_not_prefixes = 0

    def check_answer(self, answer: ConstrainedAnswer) -> None:
        """Check what has ended against the validator; what was cut by `max_tokens` must be completable."""
        self.num_answers += 1
        if answer.finish_reason == "stop":
            self.num_ended += 1
            if (found := self._find(answer.schema, answer.text)) is not None:
                self.num_violations += 1
                print(f"violation: {json.dumps(answer.schema)}: {answer.text}: {found}", flush=True)
        elif self._completes_cut and not _is_prefix(answer):
            self.num_not_prefixes += 1
            print(f"no prefix: {json.dumps(answer.schema)}: {answer.text}", flush=True)


def _is_prefix(answer: ConstrainedAnswer) -> bool:
    """Return whether an answer's tokens are allowed, and its text begins a document that the validator calls valid."""
    try:
        state = GrammarState(answer.grammar, token_ids=answer.token_ids)
        text = complete_answer(state, random.Random(0))
    except GrammarFailed:
        return False
    # A character of which the last bytes are missing is not part of a document yet.
    begins = text is not None and text.startswith(answer.text.rstrip("\ufffd"))
    return text is not None and begins and find_violation(answer.schema, text) is None


def list_allowed_tokens(mask: npt.NDArray[np.int32]) -> list[int]:
    """Return the tokens that a mask allows, in their order."""
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return tokens


def complete_answer(state: GrammarState, draw: random.Random) -> str | None:
    """Return the text of a whole answer that begins with a state's tokens; None if none was found.

    One of `_CLOSING` is taken where one is allowed, else any allowed token.
    """
    tokenizer = state.grammar.tokenizer
    closing = [tokenizer.engine.tokenize_bytes(one)[0] for one in _CLOSING]
    row = np.zeros(tokenizer.num_mask_words, np.int32)
    for _ in range(MAX_COMPLETION_TOKENS):
        state.fill_mask(row)
        allowed = {*list_allowed_tokens(row)}
        if allowed & tokenizer.eos_token_ids:
            tokens = [one for one in state.token_ids if one not in tokenizer.eos_token_ids]
            return bytes(tokenizer.engine.decode_bytes(tokens)).decode()
        state.advance([draw.choice([one for one in closing if one in allowed] or sorted(allowed))])
    return None


def make_joined_schemas(count: int, seed: int) -> list[tuple[Schema, GrammarSpec]]:
    """Return that many schemas of answers that call one of two tools or else are JSON, and their grammars by the tool
    model's response template. Such a schema has that of each tool by its name, and that of the answer without a name.
    """
    template = load_tool_model().response_template
    assert template is not None
    objects = [schema for schema in make_schemas(4 * count + 40, seed + 1) if schema.get("type") == "object"]
    found = []
    for number, answer in enumerate(make_schemas(count, seed)):
        by_name = {f"tool{place}": objects[(number + place) % len(objects)] for place in range(2)}
        tools = [ConstrainedTool(name, schema) for name, schema in by_name.items()]
        joined = constrain_calls(template, tools, is_required=False, is_parallel=True, answer=answer)
        found.append(({"": answer} | by_name, joined.make_spec()))
    return found


class JoinedViolations:
    """Finds answers that neither call as their tools' schemas say nor follow their own, and counts calls."""

    num_calls = 0

    def find(self, schema: Schema, text: str) -> list[str] | None:
        """Return what is wrong with an answer, as its reader parses it; None if nothing is."""
        template = load_tool_model().response_template
        assert template is not None
        part = AnswerParser(template, [{"type": "function"}], "or_json").end(text)
        self.num_calls += len(part.calls)
        found = [find_violation(schema[name], arguments) for name, arguments in part.calls]
        if not part.calls or part.content.strip():
            found.append(find_violation(schema[""], part.content))
        return [one for one in found if one is not None] or None


def count_refusals(count: int) -> dict[str, float]:
    """Have the gateway's checker refuse schemas; return how many it refused, and how many of them without a name."""
    num_refused = num_without_name = 0
    with GrammarChecker() as checker:
        for number, one in enumerate(make_refused_schemas(count, seed=7)):
            try:
                checker.check_grammar(make_schema_spec(one.schema, "schema"))
                print(f"not refused: {json.dumps(one.schema)}", flush=True)
            except UnsupportedSchema as error:
                num_refused += 1
                num_without_name += (error.keyword, error.path) != (one.keyword, one.path)
            except InvalidRequest as error:
                num_refused, num_without_name = num_refused + 1, num_without_name + 1
                print(f"schema {number} was refused without a name: {error}", flush=True)
    refused: dict[str, float] = {"refused_schemas": num_refused, "not_refused": count - num_refused}
    return refused | {"refused_without_name": num_without_name}


def list_enforced_types() -> list[Schema]:
    """Return the schemas of the types of pydantic and Zod, without those that are refused."""
    tokenizer = GrammarTokenizer.make_bytes()
    found: list[Schema] = []
    for library in ("pydantic", "zod"):
        for schema in load_type_schemas(library).values():
            with contextlib.suppress(UnsupportedSchema):
                CompiledGrammar(make_schema_spec(schema, "schema"), tokenizer)
                found.append(schema)
    return found


def measure_answers(num_schemas: int, num_answers: int, num_refused: int) -> dict[str, float]:
    """Return the figures of all answers and refusals."""
    joined_violations = JoinedViolations()
    # Nobody who draws tokens at random completes a text that must end in "zzz".
    checker, of_types = AnswerChecker(), AnswerChecker(completes_cut=False)
    joined = AnswerChecker(joined_violations.find, completes_cut=False)
    random_model = load_random_model(load_demo_model())
    asked = [(schema, make_schema_spec(schema, "schema")) for schema in make_schemas(num_schemas, seed=11)]
    generate_answers(random_model, asked, num_answers, checker.check_answer)
    types = [(schema, make_schema_spec(schema, "schema")) for schema in list_enforced_types()]
    generate_answers(random_model, types, num_answers, of_types.check_answer, (1.0,))
    several = make_joined_schemas(num_schemas // 5, seed=12)
    generate_answers(load_random_model(load_tool_model()), several, num_answers // 5, joined.check_answer)
    figures = {
        "schemas": num_schemas,
        "answers": checker.num_answers,
        "ended_share": checker.num_ended / checker.num_answers,
        "joined_answers": joined.num_answers,
        "joined_calls": joined_violations.num_calls,
        "violations": checker.num_violations + joined.num_violations,
        "cut_not_prefix": checker.num_not_prefixes,
        "type_answers": of_types.num_answers,
        "type_ended": of_types.num_ended,
        "type_violations": of_types.num_violations,
    }
    return figures | count_refusals(num_refused)
