"""Tells the reasoning and the calls of an answer from its text, by the model's response template.

transformers parses (`ResponseParser`). The parts of an answer depend on its text alone: however
it is cut into pieces, the pieces of content and reasoning add up to the same, and the calls are the same. A reader that
resumes a stream gives a new parser the answer from its beginning.

A call that a grammar holds is told in pieces, as the model writes its arguments: it is valid as far as it goes, and
stays a call where the answer is cut in it. Before its arguments begin nothing of it is told, and it is content if it
is cut there. Any other call is told once it is complete, as only then it is known to be one.

A call that is not valid is content, as the model wrote it between the marks of a call: its JSON is damaged or cut, it
has no name, or no tools were offered.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALLS_FIELD = "tool_calls"
MAX_PIECE_CHARS = 64
"""A piece in which a call cannot be parsed is parsed again character by character, so pieces are short."""
MAX_NAME_CHARS = 256
"""The longest name of a call: a client could not send a longer one again in a history."""
NO_MARK = "\0"
"""Continues no mark of any template, and stands in no text of JSON: what was held back as the beginning of a mark is
told after it, and a mark whose first character it replaces is text."""
_HELD_ARGUMENTS = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
"""The text of a held call before its arguments."""


CallsForm = Literal["free", "held", "or_json"]
"""How calls are written: as the model likes; held to a grammar; or held, and an answer without calls is JSON."""


def import_response_parser() -> type[Any]:
    """Return transformers' parser. The first import takes a second."""
    from transformers.utils.chat_parsing import ResponseParser

    parser: type[Any] = ResponseParser
    return parser


class AnswerPiece(NamedTuple):
    """A stretch of content or reasoning, or of a call."""

    kind: Literal["content", "reasoning", "call"]
    text: str
    """For a call a part of its arguments, which are JSON: as the model wrote them if it is held, else written anew."""
    name: str = ""
    """The name of the called function, if the call begins with this."""
    is_last: bool = False
    """Whether the call ends with this."""


@dataclass
class AnswerPart:
    """The parts that a piece of text adds to an answer, in the order in which the model wrote it."""

    pieces: list[AnswerPiece] = field(default_factory=list)

    def __add__(self, other: "AnswerPart") -> "AnswerPart":
        first, second = self.pieces, other.pieces
        if first and second and first[-1].kind == second[0].kind and not second[0].name:
            joined = first[-1]._replace(text=first[-1].text + second[0].text, is_last=second[0].is_last)
            return AnswerPart([*first[:-1], joined, *second[1:]])
        return AnswerPart(first + second)

    @property
    def content(self) -> str:
        """All content."""
        return self._join_texts("content")

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return self._join_texts("reasoning")

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Names and arguments (JSON) of the calls that begin in it."""
        return [(piece.name, piece.text) for piece in self.pieces if piece.name]

    def _join_texts(self, kind: str) -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)


def _make_text_part(kind: Literal["content", "reasoning"], text: str) -> AnswerPart:
    return AnswerPart([AnswerPiece(kind, text)] if text else [])


class AnswerParser:
    """Parses one answer, piece by piece."""

    def __init__(self, template: dict[str, Any], tools: Sequence[dict[str, Any]], calls: CallsForm = "free") -> None:
        """`tools` are those that were offered: templates without types take them from their schemas.

        Calls that are held are valid JSON, and a mark inside of a text ends none. An answer that is JSON has no calls.
        """
        # A missing field is no reason to refuse what is there.
        fields = {name: {**one, "optional": True} for name, one in template.get("fields", {}).items()}
        if calls != "free":  # their JSON is read here
            fields[CALLS_FIELD] = {name: one for name, one in fields[CALLS_FIELD].items() if name != "transform"}
            fields[CALLS_FIELD]["content"] = "text"
        self._template: dict[str, Any] = {**template, "fields": fields}
        close = fields.get(CALLS_FIELD, {}).get("close")
        self._close = close if isinstance(close, str) and calls == "free" else ""
        """What ends a call, where the text of a call waits here until it has ended: each piece that transformers is
        given costs it a copy of all before."""
        self._waiting: list[str] = []
        """The text of the open call that transformers was not given yet."""
        self._tail = ""
        """The end of all pieces, in which a call's end may have begun."""
        self._tools: list[Any] = list(tools)
        self._mark = template["fields"][CALLS_FIELD]["close"][0] if calls != "free" else ""
        """The first character of what ends a call, if that may stand in a text inside of it."""
        self._may_be_json = calls == "or_json"
        """Whether the answer is JSON if it goes on with anything but a call, white space, or reasoning."""
        self._is_json = False
        """Whether it is: all that follows is content."""
        self.num_calls = 0
        """How many calls were returned, or the beginning of them."""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._parser = import_response_parser()(self._template, prefix="", tools=self._tools)
        self._texts: list[str] = []
        """All that this parser was given, but for the arguments of held calls."""
        self._body: list[str] = []
        """The text of the open region, if it is a call's."""
        self._is_in_call = False
        """Whether the open region is a call's."""
        self._held = HeldCall()
        """The call of the open region, if calls are held."""

    def add_text(self, text: str) -> AnswerPart:
        """Return what a piece of text adds."""
        told = AnswerPart()
        for begin in range(0, len(text), MAX_PIECE_CHARS):
            told += self._add_piece(text[begin : begin + MAX_PIECE_CHARS])
        self.num_calls += len(told.calls)
        return told

    def end(self, text: str) -> AnswerPart:
        """Return what the last piece of text adds, with all that was held back. Nothing may be added afterwards."""
        told = self.add_text(text) + self._feed_waiting()
        try:
            last = self._take_events(self._parser.finalize()[1])
        except Exception:  # a call that is cut
            text = "".join(self._texts)
            self._begin_anew()
            self._take_events(self._parser.feed(text + NO_MARK))
            last = _make_text_part("content", self._read_body().removesuffix(NO_MARK))
        self.num_calls += len(last.calls)
        return told + last

    def _add_piece(self, piece: str) -> AnswerPart:
        if self._may_be_json:
            return self._begin_answer(piece)
        if self._is_json:
            return _make_text_part("content", piece)
        told = AnswerPart()
        if self._held.is_open:
            part = self._held.add_text(piece)
            assert part is not None, "its arguments go on"
            told, piece = AnswerPart([part]), piece[len(part.text) :]
        if not self._mark or self._mark not in piece:
            return told + self._feed_piece(piece) if piece else told
        for character in piece:
            is_text = character == self._mark and self._held.is_in_text
            told += self._feed_piece(NO_MARK if is_text else character)
        return told

    def _begin_answer(self, piece: str) -> AnswerPart:
        """Return what a piece adds before it is known whether the answer calls or is JSON, and what follows in it."""
        told = AnswerPart()
        for place, character in enumerate(piece):
            part = self._feed_piece(character)
            told += part
            self._is_json = bool(part.content.strip())
            if self._is_json or self._is_in_call:
                self._may_be_json = False
                return told + self._add_piece(piece[place + 1 :])
        return told

    def _read_body(self) -> str:
        """Return the call's text as the model wrote it."""
        body = "".join(self._body)
        return body.replace(NO_MARK, self._mark) if self._mark else body

    def _feed_piece(self, piece: str) -> AnswerPart:
        if self._close:
            end = self._tail + piece
            self._tail = end[max(0, len(end) - len(self._close) + 1) :]
            if self._is_in_call and self._close not in end:
                self._waiting.append(piece)
                return AnswerPart()
        return self._feed_waiting() + self._feed_now(piece)

    def _feed_waiting(self) -> AnswerPart:
        waiting, self._waiting = "".join(self._waiting), []
        return self._feed_now(waiting) if waiting else AnswerPart()

    def _feed_now(self, piece: str) -> AnswerPart:
        try:
            events = self._parser.feed(piece)
        except Exception:
            return self._add_characters(piece)
        self._texts.append(piece)
        return self._take_events(events)

    def _add_characters(self, piece: str) -> AnswerPart:
        """Return what a piece adds in which a call ends that cannot be parsed: the call's text is content."""
        told, texts, body = AnswerPart(), self._texts, self._body
        self._begin_anew()
        self._parser.feed("".join(texts))  # its events were taken before
        self._texts, self._body = texts, body
        for character in piece:
            try:
                events = self._parser.feed(character)
            except Exception:
                told += _make_text_part("content", self._read_body())
                self._begin_anew()
                continue
            self._texts.append(character)
            told += self._take_events(events)
        return told

    def _take_events(self, events: list[dict[str, Any]]) -> AnswerPart:
        told = AnswerPart()
        for event in events:
            is_call = event["field"] == CALLS_FIELD
            match event["type"]:
                case "region_open":
                    self._is_in_call, self._body, self._held = is_call, [], HeldCall()
                case "region_chunk" if is_call:
                    self._body.append(event["text"])
                    told += self._follow_call(event["text"])
                case "region_chunk" if event["field"] in REASONING_FIELDS:
                    told += _make_text_part("reasoning", event["text"])
                case "region_chunk":
                    told += _make_text_part("content", event["text"])
                case "region_close" if is_call:
                    if not self._held.is_told:
                        calls = _list_calls(event["value"]) if self._tools else None
                        told += _make_text_part("content", self._read_body()) if calls is None else AnswerPart(calls)
                    self._body, self._is_in_call = [], False
        return told

    def _follow_call(self, text: str) -> AnswerPart:
        """Return what a piece of the open call adds to its arguments, if calls are held."""
        if not self._mark:
            return AnswerPart()
        piece = self._held.add_text(text)
        return AnswerPart([piece._replace(text=piece.text.replace(NO_MARK, self._mark))] if piece else [])


class HeldCall:
    """The JSON of one call that follows a grammar, as it is written."""

    def __init__(self) -> None:
        self._head = ""
        """The text before the arguments, while these have not begun."""
        self._depth = 0
        """How many objects and lists of the arguments are open."""
        self.is_in_text, self._is_escaped = False, False
        """Whether it is inside of a text, and whether the next character of that is escaped."""
        self.is_told = False
        """Whether a part of the arguments was told."""
        self._is_whole = False
        """Whether all of them were."""

    @property
    def is_open(self) -> bool:
        """Whether its arguments have begun and not ended: what comes next is theirs, whatever it looks like."""
        return self.is_told and not self._is_whole

    def add_text(self, text: str) -> AnswerPiece | None:
        """Return the part of the arguments that a piece of the call adds; None where it adds none."""
        name = ""
        if not self.is_told:
            self._head += text
            if (found := _HELD_ARGUMENTS.match(self._head)) is None:
                return None
            name, text, self.is_told = found[1], self._head[found.end() :], True
        for place, character in enumerate(text if not self._is_whole else ""):
            self._follow_json(character)
            if self._depth == 0:
                self._is_whole = True
                return AnswerPiece("call", text[: place + 1], name, is_last=True)
        return AnswerPiece("call", text, name) if text and not self._is_whole else None

    def _follow_json(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == '"':
            self.is_in_text = not self.is_in_text
        elif self.is_in_text:
            self._is_escaped = character == "\\"
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


def _list_calls(value: Any) -> list[AnswerPiece] | None:
    """Return the calls in a region's value; None where one of them is no call."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        function = one.get("function") if isinstance(one, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not isinstance(arguments, dict):
            return None
        try:
            call = AnswerPiece("call", json.dumps(arguments, ensure_ascii=False, allow_nan=False), name, is_last=True)
            (call.name + call.text).encode()
        except ValueError:  # a number or half a character that JSON does not have
            return None
        found.append(call)
    return found
