r"""Grammars in Lark's form as regular expressions, for the text of a call.

A call is JSON, so its text stands there with escapes: a line break is `\n`. The engine's parser of Lark takes the
longest match of each terminal, so `/.*/` would take the begin of such an escape and could not go on. Its regular
expressions match texts in JSON without that, so a grammar becomes one, if its rules do not need themselves.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import InvalidRequest
from penstock.grammar.pattern import MAX_PATTERN_CHARS

MAX_DEPTH = 64
"""The most rules inside of each other."""
_COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Terminals of Lark's own library, which `%import common.NAME` names."""
_TOKEN = re.compile(
    r"""\s+|(?://|\#)[^\n]*|->\s*[a-zA-Z_]\w*
    |(?P<import>%import\s+common\.(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|%import\s+common\s*\((?P<many>[\w\s,]+)\))
    |(?P<define>[?!]*(?P<defined>_?[A-Za-z]\w*)(?:\.\d+)?\s*:(?!:))
    |(?P<name>_?[A-Za-z]\w*)
    |(?P<range>"(?P<low>\\.[^"]*|[^"\\])"\s*\.\.\s*"(?P<high>\\.[^"]*|[^"\\])")
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<cases>i?)
    |(?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/)(?P<flags>[a-z]*)
    |~\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?
    |(?P<operator>[|()\[\]?*+])""",
    re.VERBOSE,
)
_SYNTAX = set("^$.*+?()[]{}|/-")
_DOT = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\])|\.")
"""Matches an escape or a set, in which a dot stays as it is, or else a dot."""


def write_lark_as_pattern(source: str) -> str:
    """Return a regular expression for all texts that a grammar in Lark's form allows. Raises `InvalidRequest`."""
    reader = _Reader()
    at = 0
    while at < len(source):
        if (found := _TOKEN.match(source, at)) is None:
            line = source[at:].partition("\n")[0][:40]
            raise InvalidRequest(f"it cannot be enforced from {line!r} on: write it with rules and terminals alone")
        reader.read_token(found)
        at = found.end()
    return reader.write_rule("start")


@dataclass
class _Reader:
    """The rules and terminals of a grammar, as regular expressions with names between marks."""

    rules: dict[str, list[str]] = field(default_factory=dict)
    """The parts of each; one that begins with `@` is the name of another one."""
    _written: dict[str, str] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    """The rules that are being written."""
    _current: list[str] | None = None

    def read_token(self, found: re.Match[str]) -> None:
        """Add a token to the rule that is being read."""
        part = found.groupdict()
        if part["import"]:
            self._import([part["one"]] if part["one"] else re.findall(r"\w+", part["many"]), part["alias"])
        elif part["define"]:
            self._current = self.rules.setdefault(part["defined"], [])
        elif (written := _write_token(part)) and self._current is None:
            raise InvalidRequest(f"{found.group()[:40]!r} stands in no rule")
        elif written and self._current is not None:
            self._current.append(written)

    def _import(self, names: list[str], alias: str | None) -> None:
        for name in names:
            if name not in _COMMON:
                raise InvalidRequest(f"'common.{name}' is not known: write it as a terminal")
            self.rules[alias or name] = [_COMMON[name]]

    def write_rule(self, name: str) -> str:
        """Return the regular expression of a rule."""
        if name not in self.rules:
            raise InvalidRequest(f"there is no rule {name!r}")
        if name in self._open:
            raise InvalidRequest(
                f"the rule {name!r} needs itself: a call's text can only be held to a grammar without recursion, "
                "as a regular expression"
            )
        if len(self._open) > MAX_DEPTH:
            raise InvalidRequest(f"it has more than {MAX_DEPTH} rules inside of each other")
        if name not in self._written:
            self._open.append(name)
            parts = [self.write_rule(part[1:]) if part.startswith("@") else part for part in self.rules[name]]
            self._written[name] = f"(?:{''.join(parts)})"
            self._open.pop()
        if len(self._written[name]) > MAX_PATTERN_CHARS:
            what = f"as a regular expression it has more than {MAX_PATTERN_CHARS:,} characters: write a shorter one"
            raise InvalidRequest(what)
        return self._written[name]


def _write_token(part: Mapping[str, str | None]) -> str:
    """Return a token in a rule as a part of a regular expression; empty for what means nothing in one."""
    written = ""
    match part:
        case {"name": str(name)}:
            written = f"@{name}"
        case {"text": str(text), "cases": cases}:
            written = f"(?:{_quote(text[1:-1], any_case=bool(cases))})"
        case {"low": str(low), "high": str(high)}:
            written = f"[{_quote(low)}-{_quote(high)}]"
        case {"regex": str(regex), "flags": str(flags)}:
            written = _write_regex(regex[1:-1], flags)
        case {"least": str(least), "most": most}:
            written = f"{{{least},{most}}}" if most else f"{{{least}}}"
        case {"operator": str(operator)}:
            written = {"(": "(?:", "[": "(?:", "]": ")?"}.get(operator, operator)
    return written


def _write_regex(regex: str, flags: str) -> str:
    if set(flags) - set("su"):
        raise InvalidRequest(f"the flags {flags!r} of /{regex[:40]}/ cannot be enforced: write it without them")
    if "s" in flags:
        regex = _DOT.sub(lambda found: found[1] or r"[\s\S]", regex)
    return f"(?:{regex})"


def _quote(text: str, *, any_case: bool = False) -> str:
    """Return a text, which may have escapes, as a regular expression."""
    written = []
    for one in re.findall(r"\\.|.", text, re.DOTALL):
        if one in _SYNTAX:
            written.append(f"\\{one}")
        elif any_case and one.upper() != one.lower():
            written.append(f"[{one.lower()}{one.upper()}]")
        else:
            written.append(one)
    return "".join(written)
