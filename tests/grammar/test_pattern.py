"""Regular expressions of schemas: what all dialects understand the same way is kept, the rest is refused."""

import re

import pytest

from penstock.grammar.pattern import PatternRefused, translate_pattern
from tests.grammar.sampling import accepts_text, compile_schema

TEXTS = (
    "", "a", "b", "ab", "abc", "aab", "A", "1", "12", "_", " ", "a b", "é", "ä1", "-", ".", "a.b", "[", "]", "^", "/",
    "&", "aa",
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        "^a", "b$", "^a|b$", "(^a|b)", "^(a|b){1,2}$", "^[a-c]+$", "^[^a-c]*$", "^\\d+$", "^\\w+$", "^[\\w.-]+$",
        "^\\s$", "^a?b*c+?$", "^(?:a)(?<n>b)?$", "^\\.$", "^[.]$", "^[\\]\\[]$", "^\\x61\\u0062$", "^a{2}$",
        "^a{1,}$", "^[&/^-]$", "^[a[]$", "^\\/$", "^[^\\d\\s]$", "^\\-$", "a.b", "^$", "",
    ],
)  # fmt: skip
def test_an_expression_means_what_it_means_elsewhere(pattern: str) -> None:
    grammar = compile_schema({"type": "string", "pattern": pattern})
    python = pattern.replace("(?<n>", "(?P<n>").replace("[a[]", "[a\\[]")
    for text in TEXTS:
        assert accepts_text(grammar, f'"{text}"') == bool(re.search(python, text, re.ASCII)), text


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)", "(?!a)", "(?<=a)b", "(?i)a", "a++", "a*+", "(a)\\1", "\\bword", "\\Aa", "\\cA", "[]a]", "[^]", "a{,2}",
        "a{x", "a{2", "[z-a]", "a{3,1}", "[\\S]", "\\x0", "\\u12", "[a", "\\", "(?P=n)", "\x00", "\\x00",
        "[\\x00-\\x07]", "^(a{1000}){1000}$", "a" * 3000,
    ],
)  # fmt: skip
def test_what_dialects_understand_differently_is_refused(pattern: str) -> None:
    with pytest.raises(PatternRefused):
        translate_pattern(pattern)


def test_negated_classes_exclude_the_letters_and_blanks_of_every_dialect() -> None:
    for pattern, texts in (("^\\S$", "\ufeff\u00a0\u2028"), ("^\\W$", "éß日"), ("^\\D$", "٣"), ("^[^\\w]$", "é")):
        grammar = compile_schema({"type": "string", "pattern": pattern})
        assert not any(accepts_text(grammar, f'"{text}"') for text in texts)
        assert accepts_text(grammar, '"-"')
