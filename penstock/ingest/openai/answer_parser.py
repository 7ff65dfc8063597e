"""Tells the reasoning and the calls of an answer from its text, by the model's response template.

transformers parses (`ResponseParser`); its import takes a second, so it waits for the first answer. What is told is a
function of the text alone: however it is cut into pieces, the pieces of content and reasoning add up to the same, and
the calls are the same. A reader that resumes a stream gives a new parser the answer from its beginning.

What is no valid call (its JSON is damaged or cut, it has no name, or no tools were offered) is content, as the model
wrote it between the marks of a call.
"""

import json
from dataclasses import dataclass, field
from typing import Any

CONTENT = "content"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALLS_FIELD = "tool_calls"


@dataclass
class AnswerPart:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names and arguments (JSON) of calls that are complete."""

    def __add__(self, other: "AnswerPart") -> "AnswerPart":
        return AnswerPart(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)

    def __sub__(self, earlier: "AnswerPart") -> "AnswerPart":
        """Return what is behind `earlier`, with which this begins."""
        return AnswerPart(
            self.content[len(earlier.content) :],
            self.reasoning[len(earlier.reasoning) :],
            self.calls[len(earlier.calls) :],
        )

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser:
    """Parses one answer, piece by piece."""

    def __init__(self, template: dict[str, Any], *, has_tools: bool) -> None:
        self._template, self._has_tools = template, has_tools
        self._reader = _RegionReader(template, has_tools=has_tools)
        self._is_careful = False
        self._text = ""
        self._told = AnswerPart()
        """All that was returned."""

    @property
    def num_calls(self) -> int:
        """How many calls were returned."""
        return len(self._told.calls)

    def add_text(self, text: str) -> AnswerPart:
        """Return what a piece of text adds."""
        self._text += text
        return self._note(self._read(text))

    def end(self, text: str) -> AnswerPart:
        """Return what the last piece of text adds, with all that was held back. Nothing may be added afterwards."""
        part = self.add_text(text)
        if not self._is_careful:
            try:
                return part + self._note(self._reader.end())
            except Exception:  # as in `_read`
                part += self._note(self._read_carefully() - self._told)
        return part + self._note(self._reader.end_carefully())

    def _note(self, part: AnswerPart) -> AnswerPart:
        self._told += part
        return part

    def _read(self, text: str) -> AnswerPart:
        if self._is_careful:
            return self._reader.read_carefully(text)
        try:
            return self._reader.read(text)
        except Exception:  # a region that cannot be parsed; the parser does not say where it is
            return self._read_carefully() - self._told

    def _read_carefully(self) -> AnswerPart:
        """Parse the whole text again, one character at a time, so that the text of a damaged region is known."""
        self._is_careful, self._reader = True, _RegionReader(self._template, has_tools=self._has_tools)
        return self._reader.read_carefully(self._text)


class _RegionReader:
    """Reads the regions of one answer's text."""

    def __init__(self, template: dict[str, Any], *, has_tools: bool) -> None:
        self._template, self._has_tools = template, has_tools
        self._body = ""
        """The text of the open region, if it has calls."""
        self._unsettled = ""
        """All that was read since the last region was opened; known where it is read carefully."""
        self._parser = self._make_parser()

    def _make_parser(self) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix="")

    def read(self, text: str) -> AnswerPart:
        """Return what the text adds. Raises any error if a region that ends in it cannot be parsed."""
        return self._take(self._parser.feed(text))

    def read_carefully(self, text: str) -> AnswerPart:
        """Return what the text adds; a region that cannot be parsed is content."""
        part = AnswerPart()
        for character in text:
            self._unsettled += character
            try:
                part += self.read(character)
            except Exception:
                part.content += self._body
                self._body, self._parser = "", self._make_parser()
        return part

    def end(self) -> AnswerPart:
        """Return what was held back. Raises any error where that cannot be parsed."""
        _, events = self._parser.finalize()
        return self._take(events)

    def end_carefully(self) -> AnswerPart:
        """Return what was held back; a region that is cut is content, also the beginning of its closing mark."""
        try:
            return self.end()
        except Exception:
            return AnswerPart(content=self._unsettled)

    def _take(self, events: list[dict[str, Any]]) -> AnswerPart:
        part = AnswerPart()
        for event in events:
            is_call = event["field"] == CALLS_FIELD
            match event["type"]:
                case "region_open":
                    self._body = self._unsettled = ""
                case "region_chunk" if is_call:
                    self._body += event["text"]
                case "region_chunk" if event["field"] in REASONING_FIELDS:
                    part.reasoning += event["text"]
                case "region_chunk":
                    part.content += event["text"]
                case "region_close" if is_call:
                    calls = _list_calls(event["value"]) if self._has_tools else None
                    if calls is None:
                        part.content += self._body
                    else:
                        part.calls += calls
                    self._body = ""
        return part


def _list_calls(value: Any) -> list[tuple[str, str]] | None:
    """Return the names and arguments in a region's value; None where one of them is no call."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        function = one.get("function") if isinstance(one, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        found.append((name, json.dumps(arguments, ensure_ascii=False)))
    return found
