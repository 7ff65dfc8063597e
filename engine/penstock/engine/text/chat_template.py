"""A chat as its model's template writes it, and its tokens, for workers, and for gateways that count tokens.

No text of a user becomes a control token: what a caller, a tool or a document says is text, whatever it looks like.
Control tokens are all added tokens of the tokenizer, special or not, and those marks of the response template that are
one token. Only the template's own text has them. A prompt that is no chat stays as it is: it is the caller's template.

    turns, variables ─▶ marks in texts of users ─▶ template ─▶ the template's own control tokens renamed ─▶ marks out
        ─▶ a tokenizer that knows these names, and no control token ─▶ ids under their own numbers

A chat whose control tokens are all the template's own is given to the model's tokenizer as it is. No model library.
"""

import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

from penstock.engine.text.marked_text import MarkedText, strip_marks
from penstock.engine.text.template_process import Template, render_within_limits, shared_process
from penstock.errors import InternalError, InvalidRequest, ModelLoadError, ModelUnavailable
from penstock.messages import ChatMessage, Content, join_contents

RESERVED_VARIABLES = {"messages", "add_generation_prompt", "chat_template", "tokenize", "return_dict", "padding"}
"""Names that a request cannot give to its chat template."""
_SPACES = " \t\r\n▁"
_UNKNOWN = "\U0001fffe \U000e0fff"
"""Characters that are none."""
_BRACKETED = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")


class ChatTokenizer:
    """Renders and tokenizes the chats of one model."""

    def __init__(
        self,
        tokenizer: Any,
        model: str,
        response_template: Mapping[str, Any] | None = None,
        *,
        is_in_child: bool = False,
    ) -> None:
        """`model` is the name that callers know it by. Chats are rendered in a child process, unless this is one."""
        self._tokenizer, self._model, self._is_in_child = tokenizer, model, is_in_child
        self._control = _find_control_tokens(tokenizer, response_template)
        self._pattern = re.compile(_join_words(self._control) or "(?!)")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._text_tokenizer = None if backend is None else TextTokenizer(backend, self._control)
        # What stands for unknown characters comes out of texts.
        unknown = [] if self._text_tokenizer is None else self._text_tokenizer.encode(_UNKNOWN)[0]
        self._control_ids = frozenset(self._control.values()) - {tokenizer.unk_token_id, *unknown}

    def render_chat(
        self,
        turns: Sequence[ChatMessage],
        variables: Mapping[str, Any],
        *,
        generation_prompt: bool = True,
        may_wait: bool = True,
    ) -> MarkedText:
        """Return the text of a chat, which ends with the beginning of the model's turn if `generation_prompt`.

        `variables` are given to the template beside the turns. Where it refuses or leaves out a system turn that is not
        the first turn, it gets `move_system_turns`; where it refuses that, `join_user_turns`, and those without any
        system turn at last. Raises `InvalidRequest` if there is no template, or if it lacks one of the variables,
        refuses the conversation, or takes too much time or memory for it. Without `may_wait` what takes time raises
        `TakesTime`.
        """
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise InvalidRequest(f"{self._model!r} has no chat template; send a prompt instead of messages")
        words = _list_words(str(tokenizer.chat_template))
        if unknown := [name for name in variables if name in RESERVED_VARIABLES or name not in words]:
            raise InvalidRequest(f"chat_template_kwargs: the chat template of {self._model!r} has no {unknown[0]!r}")
        how = {"generation_prompt": generation_prompt, "is_in_child": self._is_in_child, "may_wait": may_wait}

        def render(some: Sequence[ChatMessage]) -> dict[str, str]:
            described = [turn.describe() for turn in some]
            return _render(tokenizer, self._pattern.pattern, described, variables, **how)

        found = render(turns)
        later = [turn.text.strip() for turn in turns[1:] if turn.role == "system"]
        if later and ("refused" in found or not _has_texts(found, later)):
            turns = move_system_turns(turns)
            found = render(turns)
        for simplify in (join_user_turns, give_system_to_user):
            if "refused" in found and (simplified := simplify(turns)) != turns:
                turns, told = simplified, render(simplified)
                found = found if "refused" in told else told
        if "over" in found:
            raise InvalidRequest(
                f"the chat template of {self._model!r} takes too much for these messages: {found['over']}"
            )
        if "refused" in found:
            raise InvalidRequest(f"the chat template refuses these messages: {found['refused']}")
        return MarkedText(found["text"], found["mark"])

    def tokenize_chat(self, chat: MarkedText, *, special: bool = False) -> list[int]:
        """Return the token ids of a rendered chat, with the tokens that begin each text if `special`.

        Raises `InvalidRequest` if a text in it would become a control token all the same.
        """
        text, own = strip_marks(chat), self._pattern.findall(str.__str__(chat))
        allowed = Counter(self._control[token] for token in own)
        if own == self._pattern.findall(text):
            # What the tokenizer normalizes may look like a control token only then.
            token_ids = self.tokenize_text(text, special=special)
            begun = Counter(self.tokenize_text("", special=True) if special else ())
            if not self._count_control(token_ids) - allowed - begun:
                return token_ids
        texts = self._text_tokenizer
        if texts is None:
            raise InvalidRequest(f"the messages have control tokens of {self._model!r}, which cannot be read as text")
        named = self._pattern.sub(lambda found: texts.names[found.group()], str.__str__(chat))
        token_ids, num_own = texts.encode(named.replace(chat.text_mark, ""))
        if num_own != len(own) or self._count_control(token_ids) - allowed:
            raise InvalidRequest(f"the messages have a text that {self._model!r} would read as a control token")
        if special:
            plain, full = self.tokenize_text("a"), self.tokenize_text("a", special=True)
            begin = next((n for n in range(len(full)) if full[n : n + len(plain)] == plain), 0)
            token_ids = [*full[:begin], *token_ids, *full[begin + len(plain) :]]
        return token_ids

    def tokenize_text(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text, with all control tokens that stand in it."""
        token_ids: list[int] = self._tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]
        return token_ids

    def _count_control(self, token_ids: Iterable[int]) -> Counter[int]:
        return Counter(number for number in token_ids if number in self._control_ids)


def move_system_turns(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a chat whose only system turn stands first: it has the texts of those that stand there.

    The text of another one stands, marked, behind the turn of a user or tool before it: so the beginning of a chat that
    goes on stays the same. Behind an assistant's turn it stands in front of the next user's.
    """
    moved: list[ChatMessage] = []
    waiting = ""
    for turn in turns:
        if turn.role != "system":
            if waiting and turn.role != "user":
                moved.append(ChatMessage(role="user", content=waiting))
            content = join_contents(waiting, turn.content) if waiting and turn.role == "user" else turn.content
            moved.append(turn.model_copy(update={"content": content}))
            waiting = ""
        elif [one.role for one in moved] == ["system"]:
            moved[0] = _add_text(moved[0], turn.content)
        elif not moved:
            moved.append(turn)
        else:
            marked = f"<system>\n{turn.text}\n</system>"
            if moved[-1].role in ("user", "tool"):
                moved[-1] = _add_text(moved[-1], marked)
            else:
                waiting = f"{waiting}\n\n{marked}" if waiting else marked
    return [*moved, ChatMessage(role="user", content=waiting)] if waiting else moved


def join_user_turns(turns: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return a chat in which turns of the user that follow each other are one: some templates want turns by turns."""
    joined: list[ChatMessage] = []
    for turn in turns:
        if joined and turn.role == joined[-1].role == "user":
            joined[-1] = _add_text(joined[-1], turn.content)
        else:
            joined.append(turn)
    return joined if len(joined) < len(turns) else turns


def give_system_to_user(turns: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Return a chat whose first turn, if it is a system turn, stands in front of the user's turn behind it.

    So the templates of Gemma 3 write it. Those of Gemma 2 and of the first Mistrals refuse it.
    """
    if [turn.role for turn in turns[:2]] != ["system", "user"]:
        return turns
    return [_add_text(turns[1].model_copy(update={"content": turns[0].content}), turns[1].content), *turns[2:]]


def _add_text(turn: ChatMessage, text: Content) -> ChatMessage:
    return turn.model_copy(update={"content": join_contents(turn.content, text)})


def _has_texts(found: Mapping[str, str], texts: Iterable[str]) -> bool:
    """Return whether a rendered chat has all these texts, or was not rendered for want of time or memory."""
    if "text" not in found:
        return True
    rendered = strip_marks(MarkedText(found["text"], found["mark"]))
    return all(text in rendered for text in texts)


class TextTokenizer:
    """A model's tokenizer in which control tokens have other names, which nobody knows. Their own names are text."""

    def __init__(self, tokenizer: Any, control: Mapping[str, int]) -> None:
        """`control` has the ids of control tokens by what they are written as."""
        secret = secrets.token_hex(8)
        self.names = {token: f"{secret}{number}." for token, number in control.items()}
        """How control tokens are written for this tokenizer."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        added = {token.content: (number, token) for number, token in tokenizer.get_added_tokens_decoder().items()}
        kept = {token: (token, number) for token, (number, _) in added.items() if token not in control}
        named = {token: (self.names[token], number) for token, number in control.items()}
        # Numbers of added tokens begin with the vocabulary's length, where a model may have tokens.
        spare = [f"{secret}-{n}." for n in range(max(vocabulary.values(), default=-1) + 1 - len(vocabulary))]
        described = [_describe_token(name, added.get(token)) for token, (name, _) in {**kept, **named}.items()]
        self._tokenizer = _make_tokenizer(tokenizer, tokenizer.model, [*spare, *described])
        held = [token for token in control if token in vocabulary]
        if held and (_may_find_whole_words(tokenizer.model) or any(map(self._finds, held))):
            model = _hide_tokens(tokenizer, {token: secret + token for token in held})
            self._tokenizer = _make_tokenizer(tokenizer, model, [*spare, *described])
        self._numbers = {self._tokenizer.token_to_id(name): number for name, number in {**kept, **named}.values()}
        self._own = {self._tokenizer.token_to_id(name) for name, _ in named.values()}

    def _finds(self, token: str) -> bool:
        """Return whether the model makes a token of its text."""
        texts = [before + token for before in ("", "a", " ")]
        number = self._tokenizer.token_to_id(token)
        return any(number in self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts)

    def encode(self, text: str) -> tuple[list[int], int]:
        """Return the token ids of a text, and how many of them stand for names."""
        found = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [self._numbers.get(number, number) for number in found], sum(number in self._own for number in found)


def _make_tokenizer(like: Any, model: Any, added: Sequence[Any]) -> Any:
    from tokenizers import Tokenizer

    made = Tokenizer(model)
    if like.normalizer is not None:
        made.normalizer = like.normalizer
    if like.pre_tokenizer is not None:
        made.pre_tokenizer = like.pre_tokenizer
    made.add_tokens(list(added))
    return made


def _describe_token(name: str, like: tuple[int, Any] | None) -> Any:
    from tokenizers import AddedToken

    if like is None:
        return AddedToken(name, normalized=False)
    token = like[1]
    flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(name, **flags)


def _may_find_whole_words(model: Any) -> bool:
    """Return whether a model looks for words in its vocabulary, and not only for what its merges make."""
    return type(model).__name__ != "BPE" or bool(model.ignore_merges)


def _hide_tokens(tokenizer: Any, names: Mapping[str, str]) -> Any:
    """Return the tokenizer's model with other names for some of its tokens, and without the merges that make them."""
    from tokenizers import Tokenizer

    described = json.loads(tokenizer.to_str())
    model = described["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): number for piece, number in model["vocab"].items()}
    if "merges" in model:
        merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
        model["merges"] = [merge for merge in merges if not names.keys() & {*merge, "".join(merge)}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps({**described, "added_tokens": [], "post_processor": None})).model


def _find_control_tokens(tokenizer: Any, response_template: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the ids of control tokens by what they are written as.

    They are all added tokens but those of spaces alone or of one character, and the marks of the response template in
    the vocabulary.
    """
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    control = {token: number for token, number in added.items() if token.strip(_SPACES) and token[1:]}
    # The marks stand in texts and in patterns.
    marks = {*_BRACKETED.findall(json.dumps(response_template or {}, ensure_ascii=False).replace("\\", ""))}
    vocabulary = tokenizer.get_vocab() if marks - added.keys() else {}
    return control | {mark: vocabulary[mark] for mark in sorted(marks - added.keys()) if mark in vocabulary}


def _join_words(words: Iterable[str]) -> str:
    """Return a pattern that finds the longest of the words at a place. It looks at each character once."""
    sorted_words = sorted(set(words))
    branches = []
    for _, group in groupby((word for word in sorted_words if word), key=lambda word: word[0]):
        same = list(group)
        begin = os.path.commonprefix(same)  # noqa: RUF071
        branches.append(re.escape(begin) + _join_words(word[len(begin) :] for word in same))
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and "" not in sorted_words else f"(?:{'|'.join(branches)})"
    return pattern + "?" * ("" in sorted_words)


@lru_cache(maxsize=8)
def _list_words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def _render(
    tokenizer: Any,
    pattern: str,
    described: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    generation_prompt: bool = True,
    is_in_child: bool = False,
    may_wait: bool = True,
) -> dict[str, str]:
    """Return what came of a rendering, as `TemplateProcess.render` does. `pattern` finds control tokens."""
    try:
        template = Template(tokenizer.get_chat_template(None, variables.get("tools")), pattern)
    except ValueError as error:
        return {"refused": str(error)}
    chat = {
        # As transformers gives them to a template.
        "messages": [{key: value for key, value in one.items() if value is not None} for one in described],
        "variables": variables,
        "own": {**tokenizer.special_tokens_map, "add_generation_prompt": generation_prompt},
    }
    if is_in_child:
        return render_within_limits(template, json.dumps(chat).encode())
    return shared_process.render(template, chat, may_wait=may_wait)


def check_template(tokenizer: Any, where: str) -> None:
    """Raise `ModelLoadError` for a chat template that exceeds its limits with one short message, `ModelUnavailable`
    where the process that renders does not answer.
    """
    if not tokenizer.chat_template:
        return
    try:
        told = _render(tokenizer, "(?!)", [{"role": "user", "content": "Hello"}], {}).get("over")
    except InternalError as error:
        raise ModelUnavailable(f"the chat template in {where} cannot be tried: {error}") from error
    if told:
        raise ModelLoadError(f"the chat template in {where} takes too much for one short message: {told}")
