r"""Translating the regular expressions of JSON schemas, which are ECMAScript's, to those of the grammar engine.

The two dialects agree in most; where they do not, the translation allows what all of ECMAScript, Python and the engine
understand the same way, or the expression is refused. `\s` is the six blanks of ASCII and `\S` anything that no dialect
takes for a blank; `\d` and `\w` are ASCII, and `\D` and `\W` exclude the letters and digits of every script.
The engine has no look-around: what an expression demands to stand ahead of its beginning becomes an expression of its
own, and three expressions that libraries write into schemas are known by their text.
"""

from collections.abc import Mapping

MAX_PATTERN_CHARS = 2048
MAX_PATTERN_SIZE = 20_000
"""Characters that it stands for when its counts are written out. The engine takes time for each of them."""
_BLANKS = r"\t\n\x0b\x0c\r "
_ALL_BLANKS = _BLANKS + r"\x1c-\x1f\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _BLANKS}
_NEGATED = {"D": r"\p{Nd}", "W": r"\p{L}\p{M}\p{N}\p{Pc}", "S": _ALL_BLANKS}
"""The characters that each negated class excludes."""
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_SYNTAX = set("^$\\.*+?()[]{}|/-")
_AHEAD = "(?="
_ANY_WITH_BREAKS = r"[^\x{0}]"
_WHOLE_CLASSES = (r"\s\S]", r"\S\s]", r"\d\D]", r"\D\d]", r"\w\W]", r"\W\w]")
"""Classes of all characters, behind their bracket."""
_SECONDS = r"\d+(?:[.,]\d+)?S"
_DAYS = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
_HOURS = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_KNOWN: Mapping[str, str] = {
    # Durations of Zod.
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DAYS}(?:{_HOURS})?|{_HOURS})$"
    ),
    # Addresses of e-mail of Zod 4.0 to 4.5.
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    # Decimal numbers of pydantic before 2.14.
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}
"""Expressions with look-around, and what means the same without it."""


class PatternRefused(ValueError):
    """A regular expression that means different things in different dialects, or that cannot be enforced."""


def translate_patterns(pattern: str) -> list[str]:
    """Return expressions in the engine's form which a text matches that matches an ECMAScript regular expression.

    There are several where it begins with look-ahead, else one. Raises `PatternRefused`.
    """
    return [translate_pattern(one) for one in _split_ahead(_KNOWN.get(pattern, pattern))]


def translate_pattern(pattern: str) -> str:
    """Return the engine's form of an ECMAScript regular expression. Raises `PatternRefused`."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternRefused(f"it has more than {MAX_PATTERN_CHARS:,} characters: write a shorter one")
    return _Translator(_KNOWN.get(pattern, pattern)).translate_pattern()


def _split_ahead(pattern: str) -> list[str]:
    """Return what `^(?=A)B` demands, `^(?:A)` and `^B`; the pattern alone where it is of another form."""
    found: list[str] = []
    rest = pattern
    while rest.startswith("^" + _AHEAD):
        parts = _find_top_level(rest)
        end = next((place for place, char in parts if char == ")"), None)
        if end is None or any(char == "|" for _, char in parts) or rest[end + 1 : end + 2] in set("*+?{"):
            return [pattern]  # refused by the translation
        found.append(f"^(?:{rest[1 + len(_AHEAD) : end]})")
        rest = "^" + rest[end + 1 :]
    return [*found, rest]


def _find_top_level(pattern: str) -> list[tuple[int, str]]:
    """Return the places of each `|` that is in no group, and of each `)` that ends a group which is in no other."""
    found: list[tuple[int, str]] = []
    depth, in_class, is_escaped = 0, False, False
    for place, char in enumerate(pattern):
        if is_escaped or char == "\\":
            is_escaped = not is_escaped
        elif in_class or char == "[":
            in_class = char != "]"
        elif char in "()|":
            depth += {"(": 1, ")": -1, "|": 0}[char]
            if depth == 0:
                found.append((place, char))
    return found


def check_text(text: str) -> None:
    """Raise `PatternRefused` if a text has characters that answers cannot have.

    They have no escapes by number, because with them the name of a property could be written in two ways.
    """
    for char in text:
        if not _is_writable(ord(char)):
            raise PatternRefused(f"answers cannot have the character U+{ord(char):04X}: leave it out")


def _is_writable(code: int) -> bool:
    return (code >= 0x20 and code != 0x7F and not 0xD800 <= code <= 0xDFFF) or code in {8, 9, 10, 12, 13}


class _Translator:
    """One pass over an expression."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._sizes: list[list[int]] = [[]]
        """The number of characters that each part stands for, by open group from the outermost."""

    def translate_pattern(self) -> str:
        out: list[str] = []
        while self._at < len(self._pattern):
            char = self._take()
            self._count_size(char)
            out.append(self._translate_one(char))
        if sum(map(sum, self._sizes)) > MAX_PATTERN_SIZE:
            raise PatternRefused(
                f"with its counts written out it has more than {MAX_PATTERN_SIZE:,} characters: use smaller ones"
            )
        return "".join(out)

    def _translate_one(self, char: str) -> str:
        parts = {
            "\\": self._translate_escape,
            "[": self._translate_class,
            "(": self._translate_group,
            "{": self._translate_count,
        }
        if char in parts:
            return parts[char]()
        if char in "*+?":
            if self._peek() == "+":
                raise PatternRefused(
                    "possessive quantifiers mean different things in different dialects: use '*', '+' or '?'"
                )
            return char
        return _ANY if char == "." else self._quote(char)

    def _count_size(self, char: str) -> None:
        if char == "(":
            self._sizes.append([])
        elif char == ")" and len(self._sizes) > 1:
            inner = sum(self._sizes.pop())
            self._sizes[-1].append(inner)
        elif char not in "{*+?":
            self._sizes[-1].append(1)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternRefused("it is incomplete: write the rest")
        self._at += 1
        return char

    def _quote(self, char: str) -> str:
        """Return a character that stands for itself. `^`, `$`, `|` and `)` keep their meaning."""
        if char in "^$|)":
            return char
        check_text(char)
        return f"\\x{{{ord(char):x}}}" if not char.isalnum() or char in _SYNTAX else char

    def _translate_group(self) -> str:
        if self._pattern.startswith("?:", self._at):
            self._at += 2
            return "(?:"
        if self._pattern.startswith(("?=", "?!", "?<=", "?<!"), self._at):
            raise PatternRefused(
                "look-around is supported at the beginning alone, as '^(?=...)': write what is allowed without it"
            )
        if self._pattern.startswith(("?<", "?P<"), self._at):
            end = self._pattern.find(">", self._at)
            name = self._pattern[self._at : end].lstrip("?P").lstrip("<")
            if end < 0 or not name.isidentifier():
                raise PatternRefused("a group has no valid name: use '(?:...)'")
            self._at = end + 1
            return "(?:"
        if self._peek() == "?":
            raise PatternRefused(
                "flags inside of an expression are not supported: write both cases of a letter as '[aA]'"
            )
        return "(?:"

    def _translate_count(self) -> str:
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at : end].partition(",") if end >= 0 else ("", "", "")
        digits = (low, high) if high else (low,)
        if not all(one.isascii() and one.isdigit() and len(one) <= 5 for one in digits):
            raise PatternRefused("a brace does not begin a count: write '\\{'")
        if high and int(high) < int(low):
            raise PatternRefused("a count ends before it begins: write the smaller number first")
        self._at = end + 1
        if self._sizes[-1]:
            self._sizes[-1][-1] *= max(int(high or low), 1)
        return f"{{{low}{comma}{high}}}"

    def _translate_escape(self) -> str:
        """Return what an escape outside of a class stands for."""
        char = self._peek()
        if char and char in _CLASSES:
            self._at += 1
            return f"[{_CLASSES[char]}]"
        if char and char in _NEGATED:
            self._at += 1
            return f"[^{_NEGATED[char]}]"
        if char and char in "pP":
            return self._translate_property()
        code = self._read_code()
        check_text(chr(code))
        return f"\\x{{{code:x}}}"

    def _translate_property(self, *, is_excluded: bool = False) -> str:
        end = self._pattern.find("}", self._at)
        text = self._pattern[self._at : end + 1]
        if end < 0 or text[1:2] != "{" or not text[2:-1].replace("_", "").replace("=", "").isalnum():
            raise PatternRefused("a character class is incomplete: write it as '\\p{...}'")
        self._at = end + 1
        if is_excluded:
            return f"\\{text}"
        # Versions of Unicode differ in characters that they do not know yet, and in pictographs that are no emoji.
        within = r"\p{Emoji}" if text == "p{Extended_Pictographic}" else r"\P{Cn}"
        return f"[\\{text}&&{within}]"

    def _read_code(self) -> int:
        """Return the character of an escape that stands for one, and pass it."""
        char = self._take()
        match char:
            case "x" | "u":
                return self._read_hex(2 if char == "x" else 4)
            case "0" if not self._peek().isdigit():
                return 0
            case _ if char in _CONTROL:
                return ord(_CONTROL[char])
            case _ if char.isascii() and char.isalnum():
                raise PatternRefused(f"the escape \\{char} is not supported: write the characters that it stands for")
        return ord(char)

    def _read_hex(self, num_digits: int) -> int:
        braced = self._peek() == "{"
        end = self._pattern.find("}", self._at) if braced else self._at + num_digits
        digits = self._pattern[self._at + braced : end] if end >= 0 else ""
        try:
            code = int(digits, 16)
        except ValueError:
            raise PatternRefused("an escaped character has no valid number: write the character itself") from None
        if code > 0x10FFFF or (not braced and len(digits) != num_digits):
            raise PatternRefused("an escaped character has no valid number: write the character itself")
        self._at = end + braced
        return code

    def _translate_class(self) -> str:
        """Return a class of characters, `[...]`, whose bracket has been passed."""
        if self._pattern.startswith(_WHOLE_CLASSES, self._at):
            self._at += len(_WHOLE_CLASSES[0])
            return _ANY_WITH_BREAKS
        negated = self._peek() == "^"
        self._at += negated
        parts: list[str] = []
        ranges: list[tuple[int, int]] = []
        if self._peek() == "]":
            raise PatternRefused(
                "an empty class of characters means different things in different dialects: use '[\\s\\S]'"
            )
        while (char := self._take()) != "]":
            if char == "\\" and self._peek() in "dwsDWSpP":
                parts.append(self._translate_inner_class(negated))
                continue
            low = high = self._read_class_code(char)
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in {"]", ""}:
                self._at += 1
                high = self._read_class_code(self._take())
                if high < low:
                    raise PatternRefused("a range of characters ends before it begins: write the smaller one first")
            ranges.append((low, high))
        parts += (f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in _clip_ranges(ranges, negated=negated))
        if not parts:
            raise PatternRefused("answers cannot have control characters: leave them out")
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _translate_inner_class(self, negated: bool) -> str:
        char = self._peek()
        if char in "pP":
            return self._translate_property(is_excluded=negated)
        self._at += 1
        if char in _NEGATED:
            raise PatternRefused(
                f"\\{char} inside of a class of characters is not supported: write '(?:\\{char}|[...])'"
            )
        if not negated:
            return _CLASSES[char]
        return _NEGATED[char.upper()]

    def _read_class_code(self, char: str) -> int:
        if char != "\\":
            return ord(char)
        if self._peek() == "b":
            self._at += 1
            return 8
        return self._read_code()


def _clip_ranges(ranges: list[tuple[int, int]], *, negated: bool) -> list[tuple[int, int]]:
    """Return the ranges of a class without what answers cannot have; those of a negated one as they are."""
    if negated:
        return [(low, high) for low, high in ranges if not 0xD800 <= low <= high <= 0xDFFF]
    found: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last in ((8, 10), (12, 13), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF)):
            if max(low, first) <= min(high, last):
                found.append((max(low, first), min(high, last)))
    return found
