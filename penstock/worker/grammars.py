"""Grammars of one model: checked if nobody has, and compiled.

Compiling takes up to 100 ms, and checking half a second, so both are done where messages are read, on a thread beside
the engine's steps. The loop replays only the tokens of a log, microseconds each.
"""

import threading
from functools import lru_cache

from penstock.engine.model import LoadedModel
from penstock.errors import GrammarFailed, InvalidRequest
from penstock.grammar.checker import GrammarChecker
from penstock.grammar.engine import ENGINE_VERSION, MAX_CACHED_GRAMMARS, CompiledGrammar, GrammarCache, GrammarTokenizer
from penstock.messages import GrammarSpec

GRAMMAR_KEY = b'"grammar"'
"""A message without these bytes has no grammar."""


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may use it."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._cache: GrammarCache | None = None

    def check_grammar(self, spec: GrammarSpec) -> GrammarSpec:
        """Return a grammar with the name of this worker's engine, which has checked it.

        One that another version has checked is checked again. Raises `UnsupportedSchema` or `InvalidRequest`.
        """
        return spec if spec.engine == ENGINE_VERSION else _check_apart(spec)

    def compile_grammar(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return a compiled grammar.

        Raises `UnsupportedSchema` or `InvalidRequest`, and `GrammarFailed` if another version of the engine has checked
        it: what that one has begun may go on differently here.
        """
        if spec.engine != ENGINE_VERSION:
            raise GrammarFailed(f"its grammar was checked by {spec.engine or 'nobody'}, and this is {ENGINE_VERSION}")
        return self._open_cache().get_grammar(spec)

    def _open_cache(self) -> GrammarCache:
        with self._lock:
            if self._cache is None:
                model = self._model
                if not getattr(model.tokenizer, "is_fast", False):
                    raise InvalidRequest(f"{model.name!r} has no fast tokenizer: grammars cannot be used with it")
                self._cache = GrammarCache(
                    GrammarTokenizer.from_json(
                        model.tokenizer.backend_tokenizer.to_str(),
                        vocab_size=model.config.get_text_config().vocab_size,
                        eos_token_ids=sorted(model.eos_token_ids),
                    )
                )
            return self._cache


@lru_cache(MAX_CACHED_GRAMMARS)
def _check_apart(spec: GrammarSpec) -> GrammarSpec:
    with GrammarChecker() as checker:
        return checker.check_grammar(spec)


def may_have_grammar(value: bytes) -> bool:
    """Return whether a message may have a grammar, without reading it."""
    return GRAMMAR_KEY in value
