"""The answer of an endpoint as text for the log, and that text read again by the worker that goes on with it.

Content is written as it comes. Reasoning stands between marks, by the response template of all endpoints
(`penstock.grammar.tools`), and is written as it comes, too. Calls stand between marks as JSON, and are written all
together at the answer's end: until then a worker or an endpoint may be lost, and the next one calls anew. So no reader
was told of a call that nobody completes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from penstock.errors import ModelError
from penstock.grammar.tools import CALL_CLOSE, CALL_OPEN, MARK, THINK_CLOSE, THINK_OPEN
from penstock.messages import MAX_TOKEN_BYTES, MIN_LOGPROB, Logprobs, Request, TokenLogprob, replace_surrogates
from penstock.names import piece_token

MAX_HELD_CHARS, MAX_CALLS = 2**20, 128
"""The most characters of an answer that are held back until it ends, and the most calls that a history may have."""
MAX_NAME_CHARS = 256
"""The longest name of a call that a history may have."""
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Names that servers have for reasoning. Some send it under both."""
_THOUGHT = re.compile(f"{re.escape(THINK_OPEN)}(.*?)(?:{re.escape(THINK_CLOSE)}|\\Z)", re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A further piece of an answer's text."""

    text: str
    logprobs: Logprobs | None = None


class ToldAnswer(NamedTuple):
    """An answer as far as its log has it."""

    content: str = ""
    reasoning: str = ""
    is_thinking: bool = False
    """Whether the text ends in reasoning."""
    is_calling: bool = False
    """Whether it has calls, which are written when the endpoint's answer has ended."""

    @classmethod
    def parse_log(cls, text: str) -> Self:
        """Return the parts of a log's text."""
        content, *calls = _THOUGHT.sub("", text).split(CALL_OPEN)
        is_thinking = text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)
        return cls(content, "".join(_THOUGHT.findall(text)), is_thinking, bool(calls))


@dataclass(eq=False)
class _Call:
    """A call, as its deltas come."""

    index: object
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    """The text of the arguments in pieces: as one text it would be copied for each delta."""
    num_chars: int = 0
    """How many characters the arguments have."""

    def add_delta(self, delta: Mapping[str, Any]) -> None:
        """Add what a delta has. A name that is sent again is ignored."""
        function = _get_mapping(delta, "function")
        self.id = self.id or _get_text(delta, "id")
        name, arguments = _get_text(function, "name"), function.get("arguments")
        if not self.arguments and name != self.name:
            self.name += name
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if text := clean_text(arguments):
            self.arguments.append(text)
            self.num_chars += len(text)

    def is_continued_by(self, delta: Mapping[str, Any]) -> bool:
        """Return whether a delta with this call's index, or without any, belongs to this call.

        A further name begins another call if the ids differ, or if there are neither ids nor an index to tell. An id
        alone says nothing: some servers make a new one for each delta.
        """
        if not self.name or not _get_text(_get_mapping(delta, "function"), "name"):
            return True
        call_id = _get_text(delta, "id")
        return call_id == self.id if call_id and self.id else self.index is not None

    def write_call(self, *, has_tools: bool) -> str:
        """Return the call between its marks. One that is not valid is content, as it is with our own engine."""
        name, arguments = json.dumps(self.name, ensure_ascii=False), "".join(self.arguments).strip() or "{}"
        is_named = 0 < len(self.name) <= MAX_NAME_CHARS and name == f'"{self.name}"'
        if has_tools and is_named and _is_object(arguments):
            return f'{CALL_OPEN}{{"name": {name}, "arguments": {arguments}}}{CALL_CLOSE}'
        return f'{{"name": {name}, "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'


class AnswerWriter:
    """Writes one answer of an endpoint as pieces of text for the log, behind the text that the log has."""

    def __init__(self, request: Request, told: ToldAnswer) -> None:
        """`told` is the answer so far. If it has content, the endpoint goes on with that."""
        self._is_marked = bool(request.sampling.special_text)
        self._has_tools = bool((request.chat_template_kwargs or {}).get("tools"))
        self._num_top = request.sampling.logprobs
        self._is_thinking = told.is_thinking
        # A server's parser of reasoning may take the rest of a content for reasoning, as it does not see the beginning.
        self._thinks = not told.content.strip()
        self._break = "\n\n" if told.reasoning else ""
        """What stands between reasoning that was broken off and the reasoning anew."""
        self._calls: list[_Call] = []
        self._before_calls = ""
        self._held: list[Piece] = []
        """The pieces that came behind the beginning of the first call."""
        self._num_held_chars = 0
        self.is_silent = False
        """Whether there was something that is not told yet, or left out: calls, or reasoning for a reader of text."""

    def add_choice(self, choice: Mapping[str, Any]) -> Sequence[Piece]:
        """Return the pieces that a chunk's choice adds. Raises `ModelError` if more is held back than may be."""
        found, was_calling = choice.get("delta"), bool(self._calls)
        delta = found if isinstance(found, Mapping) else {"content": choice.get("text")}
        reasoning = next(filter(None, (_get_text(delta, name) for name in REASONING_FIELDS)), "")
        text = self._write_reasoning(reasoning) + self._write_content(_get_text(delta, "content"))
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            self._add_call(call)
        logprobs = [] if self._num_top is None else read_logprobs(choice, self._num_top)
        pieces = _make_pieces(text, logprobs)
        if not self._calls or (text and not was_calling):
            return pieces
        self._held += pieces
        self._num_held_chars += len(text)
        num_chars = self._num_held_chars + sum(call.num_chars for call in self._calls)
        if num_chars > MAX_HELD_CHARS or len(self._calls) > MAX_CALLS:
            raise ModelError(f"the endpoint's calls are more than {MAX_CALLS}, or {MAX_HELD_CHARS:,} characters")
        return ()

    def end_answer(self) -> Sequence[Piece]:
        """Return what was held back. The first piece has all calls, so the log has all of them or none."""
        if not self._calls:
            return ()
        calls = "".join(call.write_call(has_tools=self._is_marked and self._has_tools) for call in self._calls)
        text = "".join(piece.text for piece in self._held)
        return _make_pieces(self._before_calls + calls + text, [one.logprobs for one in self._held if one.logprobs])

    def _write_reasoning(self, text: str) -> str:
        if not self._thinks:
            return self._write_content(text)
        if not text or not self._is_marked:
            self.is_silent |= bool(text)
            return ""
        opened = "" if self._is_thinking else THINK_OPEN
        text, self._break, self._is_thinking = f"{opened}{self._break}{text}", "", True
        return text

    def _write_content(self, text: str) -> str:
        return self._close_reasoning() + text if text else ""

    def _close_reasoning(self) -> str:
        was_thinking, self._is_thinking = self._is_thinking, False
        return THINK_CLOSE if was_thinking else ""

    def _add_call(self, delta: object) -> None:
        if not isinstance(delta, Mapping):
            return
        index = delta.get("index")
        known = [call for call in self._calls if call.index == index or index is None][-1:]
        if not self._calls:
            self._before_calls, self.is_silent = self._close_reasoning(), True
        if not known or not known[0].is_continued_by(delta):
            known = [_Call(index)]
            self._calls += known
        known[0].add_delta(delta)


def _make_pieces(text: str, logprobs: Sequence[Logprobs]) -> list[Piece]:
    """Return a piece for each log probability, the first with the text; or one without any."""
    if not logprobs:
        return [Piece(text)] if text else []
    return [Piece("" if number else text, one) for number, one in enumerate(logprobs)]


def read_logprobs(choice: Mapping[str, Any], num_top: int) -> list[Logprobs]:
    """Return the log probabilities of a choice's tokens, with at most `num_top` likeliest ones each."""
    found = _get_mapping(choice, "logprobs").get("content")
    return [
        Logprobs(**fields, top=_read_top(token, num_top))
        for token in (found if isinstance(found, list) else ())
        if (fields := _read_token(token)) is not None
    ]


def _read_top(token: Mapping[str, Any], num_top: int) -> list[TokenLogprob]:
    top = token.get("top_logprobs")
    found = [_read_token(one) for one in (top if isinstance(top, list) else ())[:num_top]]
    # Endpoints tell no token ids: a number made of the text stands in place of one, as it does in events.
    return [TokenLogprob(token=piece_token(fields["text"] or ""), **fields) for fields in found if fields is not None]


def _read_token(token: object) -> dict[str, Any] | None:
    """Return the fields of a token with its log probability; None for what is none."""
    logprob = token.get("logprob") if isinstance(token, Mapping) else None
    if not isinstance(token, Mapping) or not isinstance(logprob, int | float):
        return None
    text, spelling = _get_text(token, "token"), None
    if isinstance(token.get("bytes"), list):
        with suppress(ValueError, TypeError):  # no bytes
            content = bytes(token["bytes"])
            if content.decode(errors="replace").encode() != content:
                spelling = list(content)
    is_short = max(len(text.encode()), len(spelling or ())) <= MAX_TOKEN_BYTES
    told = {"text": text, "bytes": spelling} if is_short else {"text": None, "bytes": None}
    # In this order, so that NaN becomes the least, and an integer that no float holds is cut first.
    return {"logprob": float(min(0, max(MIN_LOGPROB, logprob))), **told}


def clean_text(text: object) -> str:
    """Return a server's text with half surrogate pairs and our own marks replaced; empty where it is no text."""
    return replace_surrogates(text).replace(MARK, "\ufffd") if isinstance(text, str) else ""


def _get_text(fields: Mapping[str, Any], name: str) -> str:
    return clean_text(fields.get(name))


def _get_mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_object(text: str) -> bool:
    """Return whether a text is a JSON object, without what JSON does not have."""
    try:
        json.dumps(json.loads(text), allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return text.startswith("{")
