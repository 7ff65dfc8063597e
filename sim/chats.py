"""Chats whose texts look like control tokens, and what must hold of their tokens.

a chat with a token somewhere ──▶ rendered as transformers renders it, without marks
                              ├─▶ decoded, the same text
                              └─▶ the control tokens of the same chat with a harmless word in place of the token
"""

import json
import random
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.engine.text.chat_template import ChatTokenizer
from penstock.engine.text.marked_text import strip_marks
from penstock.errors import InvalidRequest
from penstock.messages import ChatMessage

HARMLESS = "zebra"
SPACES = " \t\r\n▁"
FRAMES = ("{}b", "a{}b", "a {} b", "a{}", "{}", "{}{}", "\n\n{}\n\nb", "{}\n", " {} ", "a{}\n{}b")
"""Where in a text the token stands."""
SLOTS = ("system", "user", "reasoning", "answer", "called", "argument", "nested", "result", "last")
TOOL_SLOTS = ("tool", "about", "parameter", "about_parameter", "choice")

Texts = dict[str, str]
Shape = Callable[[Texts], tuple[list[dict[str, Any]], dict[str, Any]]]


def _tools(texts: Texts) -> dict[str, Any]:
    parameter = {"type": "string", "description": texts["about_parameter"], "enum": [texts["choice"], "b"]}
    parameters = {"type": "object", "properties": {texts["parameter"]: parameter}, "required": [texts["parameter"]]}
    function = {"name": texts["tool"], "description": texts["about"], "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}]}


def _call(texts: Texts) -> list[dict[str, Any]]:
    arguments = {"city": texts["argument"], "more": {texts["nested"]: [texts["nested"]]}}
    function = {"name": texts["called"], "arguments": _dump(arguments)}
    return [{"id": "call12345", "type": "function", "function": function}]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _leave_spaces(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).replace("▁", " ").split())


def _turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SHAPES: dict[str, Shape] = {
    "question": lambda t: ([_turn("user", t["user"])], {}),
    "talk": lambda t: (
        [
            _turn("system", t["system"]),
            _turn("user", t["user"]),
            _turn("assistant", t["answer"], reasoning_content=t["reasoning"]),
            _turn("user", t["last"]),
        ],
        {},
    ),
    "tools": lambda t: ([_turn("user", t["user"])], _tools(t)),
    "calls": lambda t: (
        [
            _turn("user", t["user"]),
            _turn("assistant", "", tool_calls=_call(t)),
            _turn("tool", t["result"], tool_call_id="call12345"),
            _turn("assistant", t["answer"]),
            _turn("user", t["last"]),
        ],
        _tools(t),
    ),
}


@dataclass
class Outcome:
    """What became of chats, counted."""

    checked: int = 0
    read: int = 0
    """Chats of which the template itself reads the token, so that it writes another text for the harmless word."""
    refused: int = 0
    """Chats that the template refuses."""


class ChatChecker:
    """Checks the chats of one tokenizer with its template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chats = tokenizer, ChatTokenizer(tokenizer, "model")
        self.control = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip(SPACES) and token.content[1:]
        }
        # What stands for unknown characters comes out of texts, too.
        unknown = self._encode("\U0001fffe \U000e0fff")
        self._unknown = {tokenizer.unk_token_id, *unknown} & {*self.control.values()}
        self._ids = frozenset(self.control.values()) - self._unknown
        self.outcome = Outcome()

    def draw_chat(self, rng: random.Random, token: str, shape: str = "") -> Iterator[str]:
        """Yield what is wrong with a chat in which a token stands at places that are drawn."""
        slots, frame = rng.sample((*SLOTS, *TOOL_SLOTS), rng.choice((1, 1, 1, 2, 4))), rng.choice(FRAMES)
        shape = shape or rng.choice(list(SHAPES))
        if rng.random() < 0.2 and len(token) > 1:  # in two texts
            cut = rng.randrange(1, len(token))
            given = {slot: "a" + token[:cut] if n % 2 == 0 else token[cut:] + "b" for n, slot in enumerate(slots)}
            yield from self.check_chat(shape, given, dict.fromkeys(slots, "ab"))
        else:
            given = {slot: frame.replace("{}", token) for slot in slots}
            yield from self.check_chat(shape, given, {slot: frame.replace("{}", HARMLESS) for slot in slots}, token)

    def check_chat(self, shape: str, given: Texts, harmless: Texts, token: str = "") -> Iterator[str]:
        """Yield what is wrong with a chat that has some texts, beside the same chat with harmless ones."""
        plain = {slot: f"{slot} word" if slot in SLOTS else f"{slot}_word" for slot in (*SLOTS, *TOOL_SLOTS)}
        turns, variables = SHAPES[shape](plain | given)
        same, same_variables = SHAPES[shape](plain | harmless)
        try:
            expected = self._apply(turns, variables)
            calm = self._apply(same, same_variables)
        except InvalidRequest:
            self.outcome.refused += 1
            return
        self.outcome.checked += 1
        where = f"{shape}, {given}"
        if (text := strip_marks(self._render(turns, variables))) != expected:
            yield f"{where}: rendered {text!r} for {expected!r}"
            return
        calm_ids = self._encode(calm)
        if (found := self._tokenize(same, same_variables)) != calm_ids:
            yield f"{where}: harmless texts have tokens {found} for {calm_ids}"
        try:
            token_ids = self._tokenize(turns, variables)
        except InvalidRequest as error:
            yield f"{where}: {error}"
            return
        if token and expected.replace(token, HARMLESS) != calm.replace(token, HARMLESS):
            self.outcome.read += 1
        elif more := self._count_control(token_ids) - self._count_control(calm_ids):
            yield f"{where}: forged {self.tokenizer.convert_ids_to_tokens(list(more))}"
        elif token and (less := self._count_control(calm_ids) - self._count_control(token_ids)):
            yield f"{where}: lost {self.tokenizer.convert_ids_to_tokens(list(less))}"
        if not self._unknown & {*token_ids}:
            yield from self._compare_texts(where, token_ids, expected, calm_ids, calm)

    def _compare_texts(
        self, where: str, token_ids: list[int], text: str, calm_ids: list[int], calm: str
    ) -> Iterator[str]:
        """Yield if a text is not decoded as it was: to the letter, where a harmless one is."""
        decoded, calm_decoded = (
            str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in (token_ids, calm_ids)
        )
        is_exact = calm_decoded == calm and unicodedata.normalize("NFKC", text) == text
        if (decoded != text) if is_exact else (_leave_spaces(decoded) != _leave_spaces(text)):
            yield f"{where}: decoded {decoded!r} for {text!r}"

    def _count_control(self, token_ids: list[int]) -> Counter[int]:
        return Counter(number for number in token_ids if number in self._ids)

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
        return token_ids

    def _apply(self, turns: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        described = [ChatMessage.model_validate(turn).describe() for turn in turns]
        try:
            return str(
                self.tokenizer.apply_chat_template(described, tokenize=False, add_generation_prompt=True, **variables)
            )
        except Exception as error:
            raise InvalidRequest(str(error)) from error

    def _render(self, turns: list[dict[str, Any]], variables: dict[str, Any]) -> Any:
        messages = [ChatMessage.model_validate(turn) for turn in turns]
        words = str(self.tokenizer.chat_template)
        return self.chats.render_chat(messages, {name: value for name, value in variables.items() if name in words})

    def _tokenize(self, turns: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
        return self.chats.tokenize_chat(self._render(turns, variables))
