"""Texts of users within a rendered chat: a template reads them as they are, and writes them with marks.

A mark is a character that stands in no input. It stands at both ends of each text and of each piece that a template
cuts from one, and within all that would be a control token. So no control token that has a user's character in it is
found in the rendered text, and each that the template writes is. Without its marks the text is what a template writes
where there are none.
"""

import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any

_GIVEN = "{{ [messages, tools, documents] | tojson }}"
"""A template that tells what transformers gives to templates, which differs from what it is given by its version."""
_RARE = range(0x20000, 0x2A6E0)
"""Ideographs, of which a text has few: letters without cases, which Python prints as they are."""
_MARK: ContextVar[str] = ContextVar("mark", default="")
"""The mark of the rendering that is under way."""


class MarkedText(str):
    """A text with marks. As characters for others it has the marks; its methods answer as if it had none."""

    plain_text: str
    """The text without its marks."""
    text_mark: str
    _places: list[int]
    """Where in `plain_text` the marks stand, in their order."""

    def __new__(cls, marked: str, mark: str = "") -> "MarkedText":
        """`marked` is the text with its marks, by default those of the rendering that is under way."""
        text, mark = super().__new__(cls, marked), mark or _MARK.get()
        parts = str.split(marked, mark) if mark else [str.__str__(marked)]
        text.text_mark, text.plain_text = mark, "".join(parts)
        text._places = list(accumulate(map(len, parts[:-1])))
        return text

    def _cut(self, start: int, end: int) -> "MarkedText":
        """Return a piece, with a mark at both ends."""
        inner = self._places[bisect_right(self._places, start) : bisect_left(self._places, end)]
        pieces = [self.plain_text[a:b] for a, b in pairwise([start, *inner, end])] if start < end else []
        return MarkedText(self.text_mark.join(["", *pieces, ""]) if pieces else "", self.text_mark)

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self._cut(place, place + 1) for place in range(len(self.plain_text)))

    def __getitem__(self, which: Any) -> str:
        if isinstance(which, slice):
            start, end, step = which.indices(len(self.plain_text))
            return self._cut(start, end) if step == 1 else mark_all(self.plain_text[which], self.text_mark)
        place = range(len(self.plain_text))[which]
        return self._cut(place, place + 1)

    def __add__(self, other: str) -> str:
        return MarkedText(str.__add__(self, other), self.text_mark)

    def __radd__(self, other: str) -> str:
        return MarkedText(str.__add__(other, self), self.text_mark)

    def join(self, texts: Iterable[str]) -> str:
        """Return the texts with this one between them."""
        return MarkedText(str.join(self, texts), self.text_mark)

    def replace(self, old: str, new: str, count: Any = -1) -> str:
        """Return the text with `new` in place of `old`. The replacement of a user's text is marked as one, too."""
        if not old:
            return mark_all(self.plain_text.replace(old, new, count), self.text_mark)
        return MarkedText(str.join(mark_all(new, self.text_mark), self.split(old, count)), self.text_mark)


def mark_all(text: str, mark: str) -> MarkedText:
    """Return the text with marks between all of its characters, so that no control token is in it."""
    return MarkedText(mark.join(["", *strip_marks(text), ""]), mark)


def strip_marks(text: str) -> str:
    """Return a text without its marks."""
    return text.plain_text if isinstance(text, MarkedText) else text


def _answer_plainly(name: str) -> Callable[..., Any]:
    ask = getattr(str, name)

    def answer(self: MarkedText, *args: Any) -> Any:
        return ask(
            self.plain_text, *(tuple(map(_to_plain, arg)) if type(arg) is tuple else _to_plain(arg) for arg in args)
        )

    return answer


def _to_plain(value: Any) -> Any:
    return strip_marks(value) if isinstance(value, str) else value


def _cut_apart(name: str) -> Callable[..., Any]:
    split = getattr(str, name)

    def cut(self: MarkedText, *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_to_plain, args))
        kwargs = {key: _to_plain(value) for key, value in kwargs.items()}
        pieces = split(self.plain_text, *args, **kwargs)
        separator = kwargs.get("sep", args[0] if args else None) if name.endswith("split") else None
        gap, end, cuts = len(separator or ""), 0, []
        starts = [0, *accumulate(map(len, self.plain_text.splitlines(True)))] if name == "splitlines" else None
        for number, piece in enumerate(pieces):
            start = self.plain_text.index(piece, end + gap * bool(number)) if starts is None else starts[number]
            end = start + len(piece)
            cuts.append(self._cut(start, end))
        return type(pieces)(cuts)

    return cut


def _cut_ends(name: str) -> Callable[..., str]:
    strip = getattr(str, name)

    def cut(self: MarkedText, *args: Any) -> str:
        args = tuple(map(_to_plain, args))
        text, left = strip(self.plain_text, *args), self.plain_text
        if name in ("rstrip", "removesuffix"):
            return self._cut(0, len(text))
        left = left.lstrip(*args) if name == "strip" else text
        return self._cut(len(self.plain_text) - len(left), len(self.plain_text) - len(left) + len(text))

    return cut


def _change_letters(name: str) -> Callable[..., str]:
    change = getattr(str, name)
    return lambda self, *args: mark_all(change(self.plain_text, *map(_to_plain, args)), self.text_mark)


for _name in [
    *("__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__len__", "startswith"),
    *("endswith", "find", "rfind", "index", "rindex", "count", "encode", "isalnum", "isalpha", "isascii", "isdecimal"),
    *("isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper"),
]:
    setattr(MarkedText, _name, _answer_plainly(_name))
for _name in ("split", "rsplit", "partition", "rpartition", "splitlines"):
    setattr(MarkedText, _name, _cut_apart(_name))
for _name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix"):
    setattr(MarkedText, _name, _cut_ends(_name))
for _name in [
    *("lower", "upper", "title", "capitalize", "swapcase", "casefold", "center", "ljust", "rjust", "zfill"),
    *("expandtabs", "translate"),
]:
    setattr(MarkedText, _name, _change_letters(_name))


def mark_values(value: Any, pattern: "re.Pattern[str]", mark: str) -> Any:
    """Return JSON data with marks in all of its texts, the names of fields included. `pattern` finds control tokens."""
    if isinstance(value, str):
        places = [0]
        for start, end in (match.span() for match in pattern.finditer(value)):
            # One that has another within it is marked throughout. One that begins in it and ends behind it has a mark.
            has_other = pattern.search(value, start + 1, end) is not None
            places += range(start + 1, end + 1) if has_other else (start + 1, end)
        pieces = [value[a:b] for a, b in pairwise([*places, len(value)])]
        return MarkedText(mark.join(["", *pieces, ""]), mark)
    if isinstance(value, dict):
        return {mark_values(key, pattern, mark): mark_values(item, pattern, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [mark_values(item, pattern, mark) for item in value]
    return value


def render_marked(source: str, pattern: "re.Pattern[str]", chat: Mapping[str, Any]) -> MarkedText:
    """Return what a template writes of a chat, with marks in all texts of `messages` and `variables` but the roles.

    `own` are the variables that no caller gives. Raises whatever the template does.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    variables, own = chat["variables"], chat["own"]
    given = render_jinja_template([chat["messages"]], chat_template=_GIVEN, **{**own, **variables})[0][0]
    mark = _draw_mark(source, given, json.dumps([variables, own], ensure_ascii=False))
    messages, tools, documents = json.loads(given)
    asked = {**variables, "tools": tools, "documents": documents}
    marked = {name: mark_values(value, pattern, mark) for name, value in asked.items()}
    marked["messages"] = [
        {name: item if name == "role" else mark_values(item, pattern, mark) for name, item in turn.items()}
        for turn in messages
    ]
    token = _MARK.set(mark)
    try:
        text = str.__str__(compile_template(source).render({**own, **marked}))
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(str.replace(str(error), mark, "")) from None
    finally:
        _MARK.reset(token)
    return MarkedText(text.replace(_escape(mark), mark), mark)


def _draw_mark(*texts: str) -> str:
    """Return a character that stands in none of the texts, by itself or as JSON writes it."""
    for _ in range(64):
        mark = chr(secrets.choice(_RARE))
        half = _escape(mark)[-5:]  # behind as many backslashes as there are
        if not any(mark in text or half in text.lower() for text in texts):
            return mark
    raise ValueError("they have too many rare ideographs")


def _escape(mark: str) -> str:
    """Return a mark as JSON of ASCII writes it."""
    return json.dumps(mark)[1:-1]


@lru_cache(maxsize=8)
def compile_template(source: str) -> Any:
    """Return the template, compiled as transformers does. Texts that it puts together keep their marks."""
    from jinja2.compiler import CodeGenerator
    from transformers.utils.chat_template_utils import _compile_jinja_template

    class KeepMarks(CodeGenerator):
        def visit_Concat(self, node: Any, frame: Any) -> None:  # noqa: N802
            self.write("environment.concat(map(str, (")
            for part in node.nodes:
                self.visit(part, frame)
                self.write(", ")
            self.write(")))")

    environment = _compile_jinja_template(source).environment.overlay()
    environment.code_generator_class = KeepMarks
    environment.concat = lambda texts: _read_marks("".join(texts))
    environment.filters = {name: _keep_marks(name, call) for name, call in environment.filters.items()}
    return environment.from_string(source)


def _read_marks(value: Any) -> Any:
    """Return a text that was put together of others as one with marks, if it has any."""
    mark = _MARK.get()
    return MarkedText(value, mark) if mark and type(value) is str and mark in value else value


def _keep_marks(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that answers as the given one does for texts without marks."""
    cuts = name in ("indent", "replace", "string", "tojson", "trim")  # by methods of texts, or without a change
    place = int(hasattr(function, "jinja_pass_arg"))  # behind what jinja itself gives the filter

    @wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        before, value, after = args[:place], _read_marks(args[place]), args[place + 1 :]
        result = _read_marks(function(*before, value, *after, **kwargs))
        if isinstance(value, MarkedText):
            plain = function(*before, value.plain_text, *after, **kwargs)
            if plain is None or isinstance(plain, int | float):
                return plain
            if isinstance(plain, str) and not (cuts and plain == strip_marks(result)):
                return mark_all(plain, value.text_mark)
        return result

    return apply
