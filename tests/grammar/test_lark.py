"""Grammars in Lark's form, held as regular expressions within the JSON of a call."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InvalidRequest
from penstock.grammar.engine import CompiledGrammar, GrammarTokenizer
from penstock.grammar.lark import write_lark_as_pattern
from penstock.grammar.spec import make_schema_spec
from penstock.grammar.state import GrammarState

BYTES = GrammarTokenizer.make_bytes()
PATCH = Path(__file__).with_name("patch.lark").read_text()
PARTS = r"""
start: ("a".."c") ~ 2..3 "\n" [NUMBER] "@" "Ab"i any // a comment
%import common (NUMBER, WS)
# another
ANY.2: /[.]./s
?any: ANY | ANY WS -> more
"""


def compile_lark(source: str) -> CompiledGrammar:
    text = {"type": "string", "pattern": f"^{write_lark_as_pattern(source)}$"}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return CompiledGrammar(make_schema_spec(schema, "schema"), BYTES)


def allows(grammar: CompiledGrammar, text: str) -> bool:
    state, written = GrammarState(grammar), json.dumps({"input": text}, ensure_ascii=False).encode()
    return state.count_allowed(list(written)) == len(written)


@pytest.mark.proof
def test_a_grammar_of_lines_is_held_in_a_text_with_escapes() -> None:
    grammar = compile_lark(PATCH)
    good = (
        '*** Begin Patch\n*** Update File: a/b.py\n@@ def f():\n-    return "x\\n"\n+    return 1\n \n'
        '*** Add File: c\n+hi\t"ä"\n*** End Patch'
    )
    assert allows(grammar, good)
    assert allows(grammar, good + "\n")
    for wrong in (good[:-3], good.replace("+hi", "hi"), good.replace("-    ", "*    "), f"{good}\n\n", ""):
        assert not allows(grammar, wrong)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("ab\n@ab.x", True), ("abc\n3.5@AB.\n", True), ("ab\n12@aB.x \t", True),
        ("a\n@ab.x", False), ("abd\n@ab.x", False), ("ab\n@abxx", False), ("ab@ab.x", False),
    ],
)  # fmt: skip
def test_what_rules_and_terminals_mean(text: str, is_allowed: bool) -> None:
    assert allows(compile_lark(PARTS), text) == is_allowed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('start: "(" start? ")"', "the rule 'start' needs itself"), ("start: x", "there is no rule 'x'"),
        ("start: a\na: b\nb: a", "the rule 'a' needs itself"), ('"a"', "'\"a\"' stands in no rule"),
        ("start: /a/x", "the flags 'x'"), ('start: "a"\n%ignore " "', "'%ignore"), ("", "there is no rule 'start'"),
        ("start: A\n%import common.SECRET", "'common.SECRET' is not known"), ('start: %json {"a": 1}', "'%json"),
        ("start: a\n" + "\n".join(f"{name}: {name}{name}" for name in "ab"), "there is no rule 'aa'"),
        ("start: " + " ".join(["a"] * 2000) + '\na: "b"', "more than 2,048 characters"),
        ("".join(f"{name}: {after} {after}\n" for name, after in zip(
            ["start", *(f"a{n}" for n in range(40))], [f"a{n}" for n in range(41)], strict=True)) + 'a40: "x"',
         "more than 2,048 characters"),
        ("".join(f"{name}: a{n}\n" for n, name in enumerate(["start", *(f"a{n}" for n in range(200))])),
         "more than 64 rules inside of each other"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_with_the_reason(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        write_lark_as_pattern(source)
    assert reason in str(refused.value)


def test_names_of_the_library_are_those_of_lark() -> None:
    given: dict[str, tuple[Any, Any]] = {
        "INT": ("12", "x"), "SIGNED_NUMBER": ("-1.5e3", "--1"), "CNAME": ("a_1", "1a"), "WS": (" \n", ""),
        "ESCAPED_STRING": ('"a\\"b"', '"a'), "FLOAT": ("1e5", "1"), "NEWLINE": ("\r\n\n", " "),
    }  # fmt: skip
    for name, (good, wrong) in given.items():
        grammar = compile_lark(f"start: X\n%import common.{name} -> X")
        assert (allows(grammar, good), allows(grammar, wrong)) == (True, False)
