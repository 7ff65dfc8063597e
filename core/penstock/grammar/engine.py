"""The grammar engine, llguidance: tokenizers, compiled grammars, and the limits within which it works.

Compiling takes milliseconds, and computing a mask microseconds. Three places bound the higher cost of a hostile
grammar: `schema.py` bounds the schemas that are compiled, `_LIMITS` bounds the engine's work for a grammar and for one
mask, and `checker.py` compiles an unchecked grammar in a process that may die.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from penstock.errors import InvalidRequest, ModelLoadError, UnsupportedSchema
from penstock.grammar.schema import Node, PreparedSchema, escape_pointer, iterate_children, prepare_schema
from penstock.grammar.spec import ENGINE
from penstock.grammar.tools import TOOLS_PATH, ConstrainedCalls, write_lark
from penstock.messages import GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ENGINE_VERSION = f"{ENGINE} {version(ENGINE)}"
MAX_GRAMMAR_ERROR_CHARS = 300
MAX_CACHED_GRAMMARS = 256
_SHAPE = ("type", "properties", "required", "items", "additionalProperties")
MAX_LOCATE_CHARS, TRY_CHARS = 1_000_000, 1000
"""How many characters of schemas the search for the keyword that the engine refuses may compile, and by how many each
try counts more. That is about 0.6 s, but the same in each process. After that the whole schema is refused."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=200_000,  # about 15 ms
    step_max_items=50_000,
    max_items_in_row=2000,
    max_lexer_states=50_000,  # about 2 kB each, shared by all sequences of a grammar
    max_grammar_size=200_000,
    verbose_errors=False,  # else errors have the tokens of the answer
)
_SCHEMA_OPTIONS: "JsonCompileOptions" = {
    # One blank, or one line break and its indentation: else blanks would have no end.
    "whitespace_pattern": r"(?:\x20|\n[\x20\t]{0,32})",
    # Without \u: with it the engine lets `additionalProperties` spell a listed name "\u0061".
    "json_allowed_escapes": 'nrbtf\\"',
}
_ANY_OBJECT = {"type": "object"}
_ADVICE = {
    "oneOf": "use 'anyOf', or give each alternative a required property with a 'const' of its own",
    "patternProperties": "write patterns of which a name matches only one",
    "maxProperties": "leave it out, or write the allowed combinations as 'anyOf'",
}
"""Advice by keyword that the engine refuses: the form to write instead."""
_REFUSED_IN_LARK = ("%json", "%llguidance", "temperature=")
"""Refused parts of Lark grammars: unchecked schemas, options of the engine, and a parameter that it ignores."""


@dataclass(frozen=True)
class GrammarTokenizer:
    """A tokenizer as the grammar engine needs it."""

    engine: LLTokenizer
    vocab_size: int
    """The width of the model's logits."""
    eos_token_ids: frozenset[int]
    has_marks: bool = True
    """Whether its words are a model's, with tokens that stand for marks."""

    @classmethod
    def from_json(cls, tokenizer_json: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> Self:
        """Return the tokenizer of a `tokenizer.json`'s text; it takes a second for 150,000 words."""
        try:
            engine = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise ModelLoadError(f"grammars cannot be used with this tokenizer: {error}") from None
        return cls(engine, vocab_size, frozenset(eos_token_ids))

    @classmethod
    def make_bytes(cls) -> Self:
        """Return a tokenizer of the 256 bytes, for checking a grammar where no model is known."""
        engine = LLTokenizer("byte")
        return cls(engine, engine.vocab_size, frozenset([engine.eos_token]), has_marks=False)

    @property
    def num_mask_words(self) -> int:
        """Return how many int32 a row of a mask has."""
        return (self.vocab_size + 31) // 32


class CompiledGrammar:
    """A grammar for one tokenizer. Each sequence takes a copy of its matcher. Any thread may use it."""

    def __init__(self, spec: GrammarSpec, tokenizer: GrammarTokenizer) -> None:
        """Compile a grammar, in 1-100 ms. Raises `UnsupportedSchema` or `InvalidRequest`."""
        self.spec = spec
        self.tokenizer = tokenizer
        self._matcher = self._compile()

    def make_matcher(self) -> LLMatcher:
        """Return a matcher at the start. Matchers of one grammar share what the lexer has worked out."""
        return self._matcher.deep_copy()

    def renew_matcher(self) -> LLMatcher:
        """Compile again, and return a matcher at its start. The matcher shares nothing with earlier matchers.

        A lexer caches its states up to a limit. Beyond the limit its matchers fail, and new matchers are needed.
        """
        self._matcher = self._compile()
        return self.make_matcher()

    def _compile(self) -> LLMatcher:
        if self.spec.kind == "json_schema":
            return self._compile_schema(_read_schema(self.spec.source))[1]
        try:
            grammar = self._write_tools() if self.spec.kind == "tools" else _write_grammar(self.spec)
        except ValueError as error:
            raise InvalidRequest(f"the grammar cannot be read: {_cut(str(error))}") from None
        matcher = LLMatcher(self.tokenizer.engine, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {_cut(matcher.get_error())}")
        return matcher

    def _compile_schema(self, schema: Any) -> tuple[dict[str, Any], LLMatcher]:
        prepared = prepare_schema(schema)
        matcher = _compile_schema(prepared.schema, self.tokenizer.engine)
        if refusal := _get_refusal(matcher):
            raise _locate_refusal(prepared, refusal, self.tokenizer.engine)
        return prepared.schema, matcher

    def _write_tools(self) -> str:
        calls, schemas = ConstrainedCalls.decode(self.spec.source), []
        for number, tool in enumerate(calls.tools):
            try:
                schema = _ANY_OBJECT if tool.parameters is None else self._compile_schema(tool.parameters)[0]
            except UnsupportedSchema as error:
                path = f"{TOOLS_PATH}{number}/function/parameters{error.path.removeprefix('#')}"
                raise UnsupportedSchema.at_keyword(error.keyword, path, error.reason) from None
            schemas.append(schema)
        if calls.answer is not None:
            schemas.append(self._compile_schema(calls.answer)[0])
        schemas = [{**schema, "x-guidance": _SCHEMA_OPTIONS} for schema in schemas]
        return str(grammar_from("grammar", write_lark(calls, schemas, has_marks=self.tokenizer.has_marks)))


class GrammarCache:
    """The compiled grammars of one tokenizer, the latest used ones. Any thread may use it."""

    def __init__(self, tokenizer: GrammarTokenizer, *, size: int = MAX_CACHED_GRAMMARS) -> None:
        self._tokenizer = tokenizer
        self._size = size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def get_grammar(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a compiled grammar. Raises `UnsupportedSchema` or `InvalidRequest`, which are not cached."""
        key = spec.digest
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        # Outside of the lock, so that no thread waits for another one's grammar. Two may compile the same one.
        compiled = CompiledGrammar(spec, self._tokenizer)
        with self._lock:
            found = self._compiled.setdefault(key, compiled)
            self._compiled.move_to_end(key)
            while len(self._compiled) > self._size:
                self._compiled.popitem(last=False)
        return found


def _read_schema(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        raise InvalidRequest("the schema is not valid JSON") from None


def _compile_schema(schema: dict[str, Any], tokenizer: LLTokenizer) -> LLMatcher:
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_SCHEMA_OPTIONS)
    except ValueError as error:  # its JSON parser allows 128 levels
        raise UnsupportedSchema.at_keyword("schema", "#", str(error)) from None
    return LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)


def _write_grammar(spec: GrammarSpec) -> str:
    """Return the engine's form of a grammar that is no schema."""
    match spec.kind:
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema(json.dumps(_ANY_OBJECT), overrides=_SCHEMA_OPTIONS))
        case "regex":
            return str(LLMatcher.grammar_from_regex(spec.source))
        case "choice":
            choices = json.loads(spec.source)
            if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
                raise ValueError("choices must be a list of texts")
            return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))
        case _:
            if found := next((one for one in _REFUSED_IN_LARK if one in spec.source), None):
                raise ValueError(f"{found!r} is not supported in grammars")
            return str(grammar_from("grammar", spec.source))


def _get_refusal(matcher: LLMatcher) -> str:
    """Return why the engine does not take a schema as it is; empty if it does."""
    return _cut(matcher.get_error() or "; ".join(matcher.get_grammar_warnings()))


def _locate_refusal(prepared: PreparedSchema, reason: str, tokenizer: LLTokenizer) -> UnsupportedSchema:
    """Return the error that names the keyword which the engine refuses, and where it is.

    The innermost schema is looked for that does not compile by itself, then the keyword without which it does.
    """
    defs = prepared.schema["$defs"]
    num_left = MAX_LOCATE_CHARS

    def can_compile(node: Node) -> bool:
        nonlocal num_left
        if isinstance(node, bool) or num_left < 0:
            return True
        tried = {"allOf": [node], "$defs": defs}
        num_left -= len(json.dumps(tried)) + TRY_CHARS
        return not _get_refusal(_compile_schema(tried, tokenizer))

    def find_refused_keyword(node: dict[str, Any]) -> UnsupportedSchema:
        for inner in iterate_children(node):
            if isinstance(inner, dict) and id(inner) in prepared.paths and not can_compile(inner):
                return find_refused_keyword(inner)
        path = prepared.paths[id(node)]
        for keyword in sorted(node, key=_SHAPE.__contains__):  # a limit before what it limits
            if num_left >= 0 and can_compile({name: value for name, value in node.items() if name != keyword}):
                why = "its alternatives are not known to exclude each other" if keyword == "oneOf" else reason
                why = f"{why}: {_ADVICE.get(keyword, 'write it otherwise, or leave it out')}"
                return UnsupportedSchema.at_keyword(keyword, f"{path}/{escape_pointer(keyword)}", why)
        return UnsupportedSchema.at_keyword("schema", path, reason)

    for node in reversed(defs.values()):  # the innermost first
        if isinstance(node, dict) and not can_compile(node):
            return find_refused_keyword(node)
    return UnsupportedSchema.at_keyword("schema", "#", reason)


def _cut(message: str) -> str:
    for end in ("\n<", "\n  while processing"):
        message = message.partition(end)[0]
    return message[:MAX_GRAMMAR_ERROR_CHARS]
