"""The grammars of one model: checked in a child process, and compiled.

Compiling takes up to 100 ms, and the first check a second or two, so both are done where messages are read, on a thread
beside the engine's steps. The loop replays only the tokens of a log, microseconds each.
"""

import threading
from dataclasses import asdict
from functools import cached_property

from penstock.engine.contract import ModelCard
from penstock.errors import GrammarFailed, InvalidRequest
from penstock.grammar.checker import GrammarChecker, Vocabulary
from penstock.grammar.engine import ENGINE_VERSION, CompiledGrammar, GrammarCache, GrammarTokenizer
from penstock.messages import GrammarSpec


class GrammarCompiler:
    """Checks and compiles grammars for one model. Any thread may use it."""

    def __init__(self, model: ModelCard) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._cache: GrammarCache | None = None
        self._checker: GrammarChecker | None = None

    def close(self) -> None:
        """End the child process that checks grammars, if there is one."""
        with self._lock:
            if self._checker is not None:
                self._checker.close()

    def check_grammar(self, spec: GrammarSpec) -> GrammarSpec:
        """Return a grammar with the engine's version that has checked it here, whatever it says itself.

        Raises `UnsupportedSchema` or `InvalidRequest`.
        """
        with self._lock:
            if self._checker is None:
                self._checker = GrammarChecker(self._vocabulary)
                self._checker.start()
        self._open_cache()  # a second for 150,000 words, as the child takes for its own
        return self._checker.check_grammar(spec)

    def compile_grammar(self, spec: GrammarSpec) -> CompiledGrammar:
        """Return the compiled form of a grammar that was checked.

        Raises `UnsupportedSchema` or `InvalidRequest`, and `GrammarFailed` if another version of the engine has checked
        it: what that one has begun may go on differently here.
        """
        if spec.engine != ENGINE_VERSION:
            raise GrammarFailed(f"its grammar was checked by {spec.engine or 'nobody'}, and this is {ENGINE_VERSION}")
        return self._open_cache().get_grammar(spec)

    def _open_cache(self) -> GrammarCache:
        with self._lock:
            if self._cache is None:
                self._cache = GrammarCache(GrammarTokenizer.from_json(**asdict(self._vocabulary)))
            return self._cache

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        model = self._model
        if not getattr(model.tokenizer, "is_fast", False):
            raise InvalidRequest("the model has no fast tokenizer: grammars cannot be used with it")
        return Vocabulary(
            tokenizer_json=model.tokenizer.backend_tokenizer.to_str(),
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(sorted(model.eos_token_ids)),
        )
