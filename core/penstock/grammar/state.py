"""The state of a grammar in one sequence: a function of the tokens given so far, and of nothing else."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from penstock.errors import GrammarFailed
from penstock.grammar.engine import ENGINE_VERSION, CompiledGrammar

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray

_ENDED = ("NotStopped", "NoExtension", "NoExtensionBias", "EndOfSentence")
"""The engine's reasons to stop that are not errors."""


class GrammarState:
    """A sequence's position in its grammar. One thread uses it at a time."""

    def __init__(self, grammar: CompiledGrammar, *, token_ids: Sequence[int] = ()) -> None:
        """Begin after `token_ids`, the log of a sequence that is resumed. Raises `GrammarFailed` like `advance`."""
        self.grammar = grammar
        self.token_ids: list[int] = []
        """The tokens that it was advanced by."""
        self._matcher = grammar.make_matcher()
        self.advance(token_ids)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Go on by tokens.

        Raises `GrammarFailed` if the grammar does not allow one of them, and stays where it was.
        """
        tokens = list(token_ids)
        if not tokens:
            return
        if not self._consume(self._matcher, tokens):
            self._rebuild(tokens)
        self.token_ids += tokens

    def fill_mask(self, row: "NDArray[np.int32]") -> None:
        """Write the tokens that may follow into a row of a bitmask: bit i of word w stands for token 32 w + i.

        The end-of-answer tokens are allowed where the answer may end, and nothing else where it must. Raises
        `GrammarFailed` if that takes more work than a mask may take, or if no token at all may follow.
        """
        if not self._compute_mask(row):
            self._rebuild([])
            if not self._compute_mask(row):
                raise self._make_error(self._matcher, "the tokens that may follow take too much work")

    @property
    def is_accepting(self) -> bool:
        """Return whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    @property
    def is_ended(self) -> bool:
        """Return whether the answer must end here: nothing but an end-of-answer token may follow."""
        matcher = self._matcher
        if not matcher.is_stopped() or matcher.is_error() or matcher.stop_reason() not in _ENDED:
            return False
        return matcher.stop_reason() == "EndOfSentence" or self.is_accepting

    def find_forced_tokens(self) -> list[int]:
        """Return tokens that have to follow, as far as they are certain: a draft that costs nothing.

        They are the tokens into which the tokenizer itself splits the only possible text, so a sampler that follows the
        mask alone may split it differently. Empty where the text is open.
        """
        return [] if self.is_ended else list(self._matcher.compute_ff_tokens())

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens, from the first one on, the grammar allows. The state does not change."""
        return int(self._matcher.validate_tokens(list(token_ids)))

    def copy(self) -> "GrammarState":
        """Return a state of its own at the same place."""
        other = copy(self)
        other.__dict__.update(token_ids=list(self.token_ids), _matcher=self._matcher.deep_copy())
        return other

    def _consume(self, matcher: "LLMatcher", tokens: list[int]) -> bool:
        # The engine takes an end-of-answer token where an answer must end only in a call of its own.
        taken = matcher.consume_tokens(tokens[:-1]) and matcher.consume_token(tokens[-1])
        return taken and matcher.stop_reason() in _ENDED

    def _compute_mask(self, row: "NDArray[np.int32]") -> bool:
        assert row.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        # After an error the engine's mask has the end-of-answer tokens alone, as if the answer were complete.
        return not self._matcher.is_stopped() or self.is_ended

    def _rebuild(self, more: list[int]) -> None:
        """Take a new matcher to the same place, then on by `more`.

        A matcher that failed cannot be used any more, and may have failed because other sequences of its grammar used
        up the states that its lexer may have. If the new one fails, the tokens themselves are at fault.
        """
        matcher = self.grammar.renew_matcher()
        if self.token_ids and not self._consume(matcher, self.token_ids):
            raise self._make_error(matcher, "the answer so far is refused")
        self._matcher = matcher.deep_copy()
        if more and not self._consume(matcher, more):
            position = len(self.token_ids) + self._matcher.deep_copy().try_consume_tokens(more)
            raise self._make_error(matcher, f"the token at position {position} is refused")
        self._matcher = matcher

    def _make_error(self, matcher: "LLMatcher", what: str) -> GrammarFailed:
        reason = matcher.get_error().split("\n<")[0] or matcher.stop_reason()
        return GrammarFailed(f"the answer cannot continue in its grammar: {what}: {reason} ({ENGINE_VERSION})")
