"""Calls and reasoning are told from text, in its order: however it is cut, and whatever a model writes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ingest.openai.answer_parser import (
    AnswerParser,
    AnswerPart,
    AnswerPiece,
    CallsForm,
    import_response_parser,
)
from tests.ingest.answers import TEMPLATE

NOT_JSON = '{"name": "f", "arguments": {"a": NaN}}'
LONG = f'{{"name": "{"f" * 257}", "arguments": {{}}}}'
HALF = '{"name": "f", "arguments": {"a": "\\ud83d"}}'
FIRST = '<tool_call>{"name": "f", "arguments": {"a": "x\\"y"}}</tool_call>'
SECOND = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}
PIECES = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "<tool_call>"}}', "<think",
    "text", " \n", '{"name": 1}', '[{"name": "g", "arguments": {}}]', '"\\u00e4"', "ä👍", "<|im_end|>", "</tool",
]  # fmt: skip


def content(text: str) -> AnswerPiece:
    return AnswerPiece("content", text)


def call(name: str, arguments: str = "{}") -> AnswerPiece:
    return AnswerPiece("call", arguments, name, is_last=True)


def parse(text: str, cuts: list[int], *, has_tools: bool = True, calls: CallsForm = "free") -> AnswerPart:
    parser, told, last = AnswerParser(TEMPLATE, [TOOL] if has_tools else [], calls), AnswerPart(), 0
    for cut in sorted({min(cut, len(text)) for cut in cuts}):
        told += parser.add_text(text[last:cut])
        last = cut
    told += parser.end(text[last:])
    assert parser.num_calls == len(told.calls)
    return told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain <b>", [content("plain <b>")]),
        ("<think>I see</think>Yes.<|im_end|>", [AnswerPiece("reasoning", "I see"), content("Yes.")]),
        (f"Now {FIRST}{SECOND}", [content("Now "), call("f", '{"a": "x\\"y"}'), call("g")]),
        (f"{SECOND}and{SECOND}", [call("g"), content("and"), call("g")]),
        ('<tool_call>{"name": "f", "argu</tool_call> tail', [content('{"name": "f", "argu tail')]),
        ('<tool_call>{"name": "f", "arguments": {"a"</too', [content('{"name": "f", "arguments": {"a"</too')]),
        (f"<tool_call>{LONG}</tool_call>", [content(LONG)]),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', [content('{"name": "", "arguments": {}}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', [content(NOT_JSON)]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', [content(HALF)]),
        ('<tool_call>{</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>', [content("{"), call("g")]),
    ],
)
def test_an_answer_has_its_parts_and_what_is_no_call_is_content(text: str, expected: list[AnswerPiece]) -> None:
    for step in range(1, 8):
        assert parse(text, list(range(0, len(text), step))).pieces == expected


def test_where_no_tools_were_offered_a_call_is_content() -> None:
    text = '{"name": "f", "arguments": {}}'
    assert parse(f"<tool_call>{text}</tool_call>", [], has_tools=False).pieces == [content(text)]


ARGUMENTS = '{"a": "</tool_call>\\\\u003c\\"}<", "b":[1, {}],\n"c": {"d": []}}'
HELD = f'<think>so</think>\n\n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>\n{SECOND}'


def test_a_held_call_is_told_as_it_is_written_and_stays_one_where_it_is_cut() -> None:
    begin = HELD.index(ARGUMENTS)
    end = begin + len(ARGUMENTS)
    parser, told = AnswerParser(TEMPLATE, [TOOL], "held"), ""
    for place, character in enumerate(HELD[:end], 1):
        pieces = parser.add_text(character).pieces
        if place > begin:
            (piece,) = pieces
            assert (piece.name, piece.is_last) == ("f" if place == begin + 1 else "", place == end)
            told += piece.text
            assert told == HELD[begin:place], "nothing of it is held back"
        cut = parse(HELD[:place], [], calls="held")
        if place > begin:
            assert cut.pieces[-1] == AnswerPiece("call", told, "f", place == end)
        else:
            assert not cut.calls
    assert parse(HELD, [], calls="held").calls == [("f", ARGUMENTS), ("g", "{}")]


@settings(max_examples=60)
@given(st.integers(0, len(HELD)), st.lists(st.integers(0, 200), max_size=12), st.sampled_from(["held", "or_json"]))
def test_the_same_is_told_of_held_calls_wherever_the_text_is_cut(end: int, cuts: list[int], calls: CallsForm) -> None:
    assert parse(HELD[:end], cuts, calls=calls) == parse(HELD[:end], [], calls=calls)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.lists(st.integers(0, 200), max_size=12))
def test_the_same_is_told_wherever_the_text_is_cut(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    assert parse(text, cuts) == parse(text, [])


@pytest.mark.parametrize("calls", ["free", "held"])
def test_the_work_of_a_call_grows_as_its_text_does(calls: CallsForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece costs transformers a copy of all before."""
    given, work = dict[int, int](), [0]
    feed = import_response_parser().feed

    def count(self: Any, text: str) -> Any:
        given[id(self)] = given.get(id(self), 0) + len(text)
        work[0] += given[id(self)]
        return feed(self, text)

    monkeypatch.setattr(import_response_parser(), "feed", count)
    found = list[int]()
    for size in (1000, 2000, 4000):
        work[0], text = 0, "<b> </tool </tool_call" * size
        arguments = json.dumps({"a": text})
        parser, told = AnswerParser(TEMPLATE, [TOOL], calls), AnswerPart()
        answer = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call> So.'
        for begin in range(0, len(answer), 4):
            part = parser.add_text(answer[begin : begin + 4])
            told.pieces += part.pieces
        told.pieces += parser.end("").pieces
        assert "".join(piece.text for piece in told.pieces) == f"{arguments} So."
        found.append(work[0])
    assert found[2] <= 2.2 * found[1] <= 2.2 * 2.2 * found[0]
