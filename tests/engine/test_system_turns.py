"""Where a chat template has no place for a system turn within a chat, its text stands in the turn before it."""

from typing import Any

import pytest

from penstock.engine.text.chat_template import ChatTokenizer, move_system_turns
from penstock.engine.text.marked_text import strip_marks
from penstock.errors import InvalidRequest
from penstock.messages import ChatMessage
from tests.engine.chat_models import TEMPLATES, make_chat_tokenizer

CHAT = ["system: Be kind.", "user: Hello", "system: Be brief.", "assistant: Hi", "user: Go on"]
MARKED = "Hello\n\n<system>\nBe brief.\n</system>"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('it stands first') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


NO_TURNS_ALIKE = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
WRITTEN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LIKE = {
    # One system turn at most, at the begin.
    "qwen": STRICT,
    # The first system turn stands in the header, and all others are turns as well.
    "llama": WRITTEN,
    # One system turn, then the user and the assistant by turns.
    "mistral": NO_TURNS_ALIKE + STRICT,
    # No system turn at all, and the others by turns.
    "gemma": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + NO_TURNS_ALIKE + WRITTEN
    ),
}  # fmt: skip
AGENT = [
    "system: You are an agent.", "system: Rules.", "user: Where you are.", "user: Hello", "assistant: Hi", "user: b",
]  # fmt: skip
"""As Codex begins a chat."""
SYSTEM, USER = "You are an agent.\n\nRules.", "Where you are.\n\nHello"
END = "[assistant]Hi[user]b"


def read_turns(*lines: str) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=text) for role, _, text in (line.partition(": ") for line in lines)]  # type: ignore[arg-type]


def render(tokenizer: Any, *lines: str, generation_prompt: bool = True) -> str:
    chats = ChatTokenizer(tokenizer, "model", is_in_child=True)
    return strip_marks(chats.render_chat(read_turns(*lines), {}, generation_prompt=generation_prompt))


@pytest.mark.parametrize("family", TEMPLATES)
def test_no_template_drops_a_system_turn(family: str) -> None:
    assert render(make_chat_tokenizer(family, "bytes"), *CHAT).count("Be brief.") == 1


def test_a_template_with_a_place_for_it_writes_it_there() -> None:
    text = render(make_chat_tokenizer("chatml", "bytes"), *CHAT)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert "<system>" not in text


@pytest.mark.parametrize("template", ["", STRICT])
def test_else_it_stands_marked_in_the_turn_before_it(template: str) -> None:
    tokenizer = make_chat_tokenizer("granite", "bytes")
    tokenizer.chat_template = template or tokenizer.chat_template
    text = render(tokenizer, *CHAT)
    assert MARKED in text
    assert text.startswith(render(tokenizer, *CHAT[:3], generation_prompt=False)), "the begin of a chat stays the same"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama", f"[system]You are an agent.[system]Rules.[user]Where you are.[user]Hello{END}"),
        ("qwen", f"[system]{SYSTEM}[user]Where you are.[user]Hello{END}"),
        ("mistral", f"[system]{SYSTEM}[user]{USER}{END}"),
        ("gemma", f"[user]{SYSTEM}\n\n{USER}{END}"),
    ],
)
def test_what_a_template_refuses_of_an_agents_turns_is_one_turn(family: str, text: str) -> None:
    tokenizer = make_chat_tokenizer("granite", "bytes")
    tokenizer.chat_template = LIKE[family]
    assert render(tokenizer, *AGENT) == text
    assert text.startswith(render(tokenizer, *AGENT[:4])), "the begin of a chat stays the same"


def test_a_refusal_is_told_as_the_template_says_it_first() -> None:
    tokenizer = make_chat_tokenizer("granite", "bytes")
    tokenizer.chat_template = LIKE["gemma"]
    with pytest.raises(InvalidRequest, match="System role not supported"):
        render(tokenizer, "system: a", "assistant: b", "user: c")


def test_what_a_template_refuses_besides_is_refused() -> None:
    tokenizer = make_chat_tokenizer("granite", "bytes")
    tokenizer.chat_template = "{{ raise_exception('no chats') }}"
    with pytest.raises(InvalidRequest, match="no chats"):
        render(tokenizer, *CHAT)


@pytest.mark.parametrize(
    ("chat", "moved"),
    [
        (CHAT, ["system: Be kind.", f"user: {MARKED}", "assistant: Hi", "user: Go on"]),
        (["system: a", "system: b", "user: c"], ["system: a\n\nb", "user: c"]),
        (["user: a", "assistant: b", "system: c", "system: d", "user: e"],
         ["user: a", "assistant: b", "user: <system>\nc\n</system>\n\n<system>\nd\n</system>\n\ne"]),
        (["user: a", "assistant: b", "tool: c", "system: d"],
         ["user: a", "assistant: b", "tool: c\n\n<system>\nd\n</system>"]),
        (["user: a", "assistant: b", "system: c"], ["user: a", "assistant: b", "user: <system>\nc\n</system>"]),
        (["user: a", "assistant: b", "system: c", "assistant: d"],
         ["user: a", "assistant: b", "user: <system>\nc\n</system>", "assistant: d"]),
    ],
)  # fmt: skip
def test_where_system_turns_go(chat: list[str], moved: list[str]) -> None:
    assert move_system_turns(read_turns(*chat)) == read_turns(*moved)
    assert move_system_turns(read_turns(*moved)) == read_turns(*moved)
