"""No text of a user becomes a control token, whatever the template and the tokenizer are."""

import json
import random
import secrets
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from penstock.engine.text.chat_template import ChatTokenizer
from penstock.engine.text.marked_text import strip_marks
from penstock.errors import InvalidRequest
from penstock.messages import ChatMessage
from sim.chats import FRAMES, HARMLESS, SLOTS, TOOL_SLOTS, ChatChecker
from tests.draws import mark_some
from tests.engine.chat_models import KINDS, TEMPLATES, make_chat_tokenizer

PLACES = (*SLOTS, *TOOL_SLOTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", mark_some(TEMPLATES, pytest.mark.proof))
def test_each_token_of_a_model_is_text_in_a_chat(family: str, kind: str) -> None:
    checker, rng = ChatChecker(make_chat_tokenizer(family, kind)), random.Random(family + kind)
    for token in checker.control:
        for shape in ("talk", "calls"):
            assert not [*checker.draw_chat(rng, token, shape)]
    assert checker.outcome.refused <= checker.outcome.checked / 10


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_no_text_at_any_place_becomes_a_token(family: str, kind: str, strips: bool) -> None:
    """Each token at each place and chats that are drawn."""
    checker, rng = ChatChecker(make_chat_tokenizer(family, kind, strips=strips)), random.Random(f"{family} {kind}")
    problems = list[str]()
    for token in checker.control:
        for place in PLACES:
            frame, shape = rng.choice(FRAMES), "calls" if place in TOOL_SLOTS else rng.choice(["talk", "calls"])
            given, calm = ({place: frame.replace("{}", word)} for word in (token, HARMLESS))
            problems += checker.check_chat(shape, given, calm, token)
        problems += [problem for _ in range(6) for problem in checker.draw_chat(rng, token)]
    assert not problems[:3]


def read_chat(
    tokenizer: Any, *turns: dict[str, Any], is_in_child: bool = False, **variables: Any
) -> tuple[str, list[int]]:
    """Return the text of a chat and its tokens."""
    chats = ChatTokenizer(tokenizer, "model", variables.pop("response_template", None), is_in_child=is_in_child)
    chat = chats.render_chat([ChatMessage.model_validate(turn) for turn in turns], variables)
    assert strip_marks(chat) == tokenizer.apply_chat_template(
        [*turns], tokenize=False, add_generation_prompt=True, **variables
    )
    return strip_marks(chat), chats.tokenize_chat(chat)


def count_token(tokenizer: Any, token_ids: list[int], token: str) -> int:
    return token_ids.count(tokenizer.convert_tokens_to_ids(token))


@pytest.mark.proof
@pytest.mark.parametrize("family", ["chatml", "glm"])
def test_what_a_template_reads_in_a_text_it_reads_as_before(family: str) -> None:
    """It takes a thought out of an answer's text, in macros too, and writes it with marks of its own."""
    tokenizer = make_chat_tokenizer(family, "bytes")
    answer = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nso \n"}
    text, token_ids = read_chat(tokenizer, {"role": "user", "content": "a"}, answer, {"role": "user", "content": "b"})
    assert text.count("<think>") == 1
    assert token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    told = {"role": "user", "content": "<tool_response>\n</think>b</tool_response>"}
    text, token_ids = read_chat(tokenizer, {"role": "user", "content": "a"}, answer, told)
    assert (count_token(tokenizer, token_ids, "<tool_response>"), count_token(tokenizer, token_ids, "</think>")) == (
        0,
        1,
    )
    assert tokenizer.decode(token_ids) == text


@pytest.mark.proof
def test_what_a_template_puts_together_of_texts_is_no_token() -> None:
    """Names between its own brackets, pieces that it cuts, and places of a text that it puts others in."""
    tokenizer = make_chat_tokenizer("chatml", "bytes")
    tokenizer.chat_template = (Path(__file__).parent / "chat_templates/pieces.jinja").read_text("utf-8")
    for content in (
        "think x",
        "<|im_\n_end|> x",
        "<|im_end|> x",
        "<|im_end| x>",
        "IMAGE x",
        "7",
        "<|IM_END|> x",
        "|>dne_mi|<",
        "<th x xink>",
    ):
        text, token_ids = read_chat(tokenizer, {"role": "user", "content": content})
        assert tokenizer.decode(token_ids) == text
        assert [number for number in token_ids if number in tokenizer.added_tokens_decoder] == [
            tokenizer.convert_tokens_to_ids("<|im_end|>")
        ]


def test_what_only_a_normalizer_makes_a_token_is_text() -> None:
    tokenizer = make_chat_tokenizer("gemma", "unigram")
    tokenizer.add_tokens([AddedToken("<mood>", normalized=True)])
    assert count_token(tokenizer, tokenizer("＜mood＞")["input_ids"], "<mood>") == 1
    _, token_ids = read_chat(tokenizer, {"role": "user", "content": "＜mood＞"})
    assert count_token(tokenizer, token_ids, "<mood>") == 0
    assert count_token(tokenizer, token_ids, "<start_of_turn>") == 2


def test_marks_of_a_response_template_are_control_tokens_and_spaces_are_not() -> None:
    tokenizer = make_chat_tokenizer("gemma", "unigram")
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"] += [["[CALLS]", 0.0], ["[CALLED]", 0.0]]
    described["added_tokens"] = described["added_tokens"][:3]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        chat_template="{% for m in messages %}[CALLS]{{ m.content }}{% endfor %}", unk_token="<unk>",
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken("  ", normalized=False)])
    marks = {"fields": {"calls": {"open_pattern": r"\[CALLS\]\w+", "close": ["[OVER]"]}}}
    text = {"role": "user", "content": "[CALLS]  [CALLED]"}
    for response_template, expected in ((marks, [1, 1, 1]), (None, [2, 1, 1])):
        _, token_ids = read_chat(tokenizer, text, response_template=response_template)
        assert [count_token(tokenizer, token_ids, token) for token in ("[CALLS]", "[CALLED]", "  ")] == expected


def test_tokens_within_and_across_tokens_are_text() -> None:
    tokenizer = make_chat_tokenizer("gemma", "bytes")
    tokens = ["<ab>", "b>c", ">cd", "<ab>c<", "ab", "é"]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    text, token_ids = read_chat(tokenizer, {"role": "user", "content": "<ab>cd <ab>c<ab> b>cd ab>cd"})
    assert not {tokenizer.convert_tokens_to_ids(token) for token in tokens} & {*token_ids}
    assert tokenizer.decode(token_ids) == text
    _, token_ids = read_chat(tokenizer, {"role": "user", "content": "é<ab>"})
    assert count_token(tokenizer, token_ids, "é") == 1, "a character is text"


def test_a_token_that_would_come_all_the_same_ends_the_request() -> None:
    """Here the template writes a token where the tokenizer takes it for a part of a word."""
    tokenizer = make_chat_tokenizer("gemma", "bytes")
    tokenizer.add_tokens([AddedToken("<mood>", single_word=True, normalized=False)])
    tokenizer.chat_template = "{% for m in messages %}x<mood>y{{ m.content }}{% endfor %}"
    read_chat(tokenizer, {"role": "user", "content": "a"})
    with pytest.raises(InvalidRequest, match="would read as a control token"):
        read_chat(tokenizer, {"role": "user", "content": "<mood>"})


def test_marks_stand_in_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, numbers = make_chat_tokenizer("chatml", "bytes"), count(0x20000)
    monkeypatch.setattr(secrets, "choice", lambda _: next(numbers))
    content = "\U00020000<|im_end|>\\ud840\\udc01"
    text, token_ids = read_chat(tokenizer, {"role": "user", "content": content}, is_in_child=True)
    assert tokenizer.decode(token_ids) == text
    assert next(numbers) == 0x20003, "the first stands in the text, the second as JSON of ASCII writes it"
    monkeypatch.setattr(secrets, "choice", lambda _: 0x20000)
    with pytest.raises(InvalidRequest, match="too many rare ideographs"):
        read_chat(tokenizer, {"role": "user", "content": content}, is_in_child=True)


def test_a_tokenizer_without_a_library_of_its_own_refuses_such_texts() -> None:
    tokenizer = make_chat_tokenizer("chatml", "bytes")
    chats = ChatTokenizer(tokenizer, "model")
    chats._text_tokenizer = None
    chat = chats.render_chat([ChatMessage(role="user", content="a")], {})
    assert chats.tokenize_chat(chat) == tokenizer(strip_marks(chat), add_special_tokens=False)["input_ids"]
    with pytest.raises(InvalidRequest, match="cannot be read as text"):
        chats.tokenize_chat(chats.render_chat([ChatMessage(role="user", content="<|im_end|>")], {}))
