"""Turn tokens into text one at a time: whole characters only, stop strings, and the end of the output.

The texts of a request add up to what its tokens decode to at once, and the same tokens always give the same
texts.

Where a grammar holds calls, no stop string and no stop token is looked for from the mark that opens a call to the mark
that closes it: its arguments may say anything, and what ends in them is no call.

Some tokenizers (SentencePiece's) spell what they have no token for in byte tokens, `<0xE4>`, and decode a run of them
as a whole: one wrong byte makes all of it unreadable. The text of a run is therefore known when it is over.
"""

from functools import lru_cache
from typing import Any

from penstock.engine.text.token_text import REPLACEMENT, get_token_texts
from penstock.grammar.tools import ConstrainedCalls
from penstock.messages import FinishReason, Sampling

_MAX_INCOMPLETE_BYTES = 3  # bytes of an incomplete UTF-8 character, each at most one replacement character
_MAX_WINDOW_TOKENS = 16  # tokens that are decoded together at most before the older ones are left behind


class Detokenizer:
    """The text of one request's output."""

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling,
        eos_token_ids: frozenset[int],
        max_new_tokens: int,
        start: str = "",
    ) -> None:
        """`start` goes before the first token's text, and is no part of what stop strings are looked for in."""
        self._tokenizer, self._token_texts = tokenizer, get_token_texts(tokenizer)
        self._stop = sampling.stop
        self.stop: str | None = None
        """The stop string that ended the output."""
        self._min_tokens = sampling.min_tokens or 0
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._eos_ids = frozenset() if sampling.ignore_eos else eos_token_ids
        self._call_marks = _find_call_marks(tokenizer, sampling)
        self._is_in_call = False
        """Whether the last token was in a call in which nothing stops."""
        self._max_new = max_new_tokens
        unseen_ids, self._byte_ids = _find_special_ids(tokenizer)
        self._skips_special = not sampling.special_text
        self._unseen_ids = unseen_ids if self._skips_special else frozenset()
        self._start = start
        self._num_tokens = 0
        self._window: list[int] = []
        self._num_old = 0
        """Leading tokens of the window that serve only as context: their text was returned."""
        self._num_out = 0
        """Characters of the window's text that were returned."""
        self._held = ""
        """Whole characters that may be the beginning of a stop string."""
        self._num_exempt = 0
        """Leading characters of the held text that are exempt, of a call or the first `min_tokens`: a stop string that
        ends in them is none."""

    def add_token(self, token_id: int, *, is_grammar_ended: bool = False) -> tuple[str, FinishReason | None]:
        """Add a token. Returns the text that it adds, and the finish reason if the output ends with it.

        After a token with which its grammar has ended, nothing may follow: the output ends with `stop`.
        The text of the last token includes everything that was held back, up to a stop string if one was found.
        """
        start, self._start = self._start, ""
        text, reason = self._add_token(token_id, is_grammar_ended)
        return start + text, reason

    def _add_token(self, token_id: int, is_grammar_ended: bool) -> tuple[str, FinishReason | None]:
        self._num_tokens += 1
        is_in_call = self._is_in_call or token_id == self._call_marks[0]
        self._is_in_call = is_in_call and token_id != self._call_marks[1]
        ends = token_id in self._eos_ids or (token_id in self._stop_ids and not is_in_call)
        is_last = ends or is_grammar_ended or self._num_tokens >= self._max_new
        if not ends and token_id not in self._unseen_ids:
            self._window.append(token_id)
        self._held += self._take_text(everything=is_last)
        if is_in_call or self._num_tokens <= self._min_tokens:
            self._num_exempt = len(self._held)
        found = _find_stop(self._held, self._stop, self._num_exempt) if self._stop else None
        if found is not None:
            place, self.stop = found
            text, self._held = self._held[:place], ""
            return text, "stop"
        if is_last:
            return self.take_rest(), "stop" if ends or is_grammar_ended else "length"
        keep = 0 if is_in_call or not self._stop else _count_stop_prefix(self._held, self._stop)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        self._num_exempt = max(0, self._num_exempt - len(text))
        return text, None

    def take_rest(self) -> str:
        """Return the text that is held back, for a stream that is cut short. No token may be added afterwards."""
        text = self._held + self._take_text(everything=True)
        self._held = ""
        return text

    def _take_text(self, *, everything: bool) -> str:
        """Return the window's new text; without `everything`, only characters that cannot change any more."""
        if not self._window:
            return ""
        if len(self._window) == 1 and (whole := self._token_texts.find_whole_text(self._window[0])) is not None:
            self._window = []
            return whole
        if not everything and self._window[-1] in self._byte_ids:
            return ""
        text = self._decode(self._window)
        end = len(text)
        if not everything:
            while end > max(self._num_out, len(text) - _MAX_INCOMPLETE_BYTES) and text[end - 1] == REPLACEMENT:
                end -= 1
        new = text[self._num_out : end]
        self._num_out = max(self._num_out, end)
        if self._token_texts.is_joining_bytes and end == len(text) and not text.endswith(REPLACEMENT):
            self._window, self._num_old, self._num_out = [], 0, 0
        elif end == len(text) and len(self._window) >= _MAX_WINDOW_TOKENS:
            # Some tokenizers write a token differently at the beginning of a text: the last ones stay.
            self._window = self._window[self._num_old or len(self._window) // 2 :]
            self._num_old = len(self._window)
            self._num_out = len(self._decode(self._window))
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        return text


@lru_cache(maxsize=8)
def _find_special_ids(tokenizer: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of tokens without text, and of tokens that stand for one byte."""
    unseen = frozenset(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = zip(names, tokenizer.convert_tokens_to_ids(names), strict=True)
    named = ((name, token_id) for name, token_id in ids if token_id is not None)  # others may all be the unknown token
    return unseen, frozenset(token_id for name, token_id in named if tokenizer.convert_ids_to_tokens(token_id) == name)


def _find_call_marks(tokenizer: Any, sampling: Sampling) -> tuple[int | None, int | None]:
    """Return the tokens that open and close a call, where a grammar holds calls and something might stop in them."""
    if sampling.grammar is None or sampling.grammar.kind != "tools" or not (sampling.stop or sampling.stop_token_ids):
        return None, None
    calls = ConstrainedCalls.decode(sampling.grammar.source)
    return tokenizer.convert_tokens_to_ids(calls.open), tokenizer.convert_tokens_to_ids(calls.close)


def _find_stop(text: str, stops: list[str], num_exempt: int) -> tuple[int, str] | None:
    """Return the first stop string in `text` that ends after `num_exempt` characters, and where it begins, or None."""
    places = [(text.find(stop, max(0, num_exempt - len(stop) + 1)), stop) for stop in stops]
    return min((found for found in places if found[0] >= 0), default=None, key=lambda found: found[0])


def _count_stop_prefix(text: str, stops: list[str]) -> int:
    """Return how many characters at the end of `text` are the beginning of a stop string."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
