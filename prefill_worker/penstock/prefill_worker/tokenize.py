"""From a request's prompt to token ids, and all reasons for which a model refuses a prompt."""

from collections.abc import Callable, Sequence

from penstock.engine.contract import ModelCard
from penstock.engine.limits import context_exceeded
from penstock.engine.text.chat_template import ChatTokenizer
from penstock.engine.text.marked_text import strip_marks
from penstock.errors import REFUSED_PICTURES, REFUSED_PROMPTS, InvalidRequest, PromptTooLong, UnknownModel
from penstock.messages import Request

MAX_START_TOKENS = 64
"""This many tokens at the prompt's end hold the beginning of the answer's turn, with all known templates."""


class PromptTokenizer:
    """Turns the prompts of requests into token ids for one model."""

    def __init__(
        self, model: ModelCard, served_name: str = "", knows_adapter: Callable[[str], bool] = lambda _: False
    ) -> None:
        """`served_name` is the name by which callers ask for the model, if it is another than its own. `knows_adapter`
        returns whether an adapter of the model has a name.
        """
        self._model, self._name, self._knows_adapter = model, served_name or model.name, knows_adapter
        self._longest_token = max(map(len, model.tokenizer.get_vocab()), default=1)
        self._chats = ChatTokenizer(model.tokenizer, self._name, model.response_template)

    def tokenize_prompt(
        self,
        request: Request,
        *,
        may_wait: bool = True,
        is_raw: bool = False,
        add_rows: Callable[[list[int]], list[int]] | None = None,
    ) -> list[int]:
        """Return the prompt's token ids. Raises `UnknownModel`, `InvalidRequest` or `PromptTooLong`.

        `add_rows` returns the tokens of a chat with the rows of its pictures, where the model sees any.
        Without `may_wait` a chat whose rendering takes time raises `TakesTime`. Control tokens in texts of a chat are
        read as such if it `is_raw`, as older versions did.
        """
        self.check_model(request)
        if (texts := self._model.text_reader) is not None and not texts.has_head:
            raise InvalidRequest(REFUSED_PROMPTS)
        if request.pictures and add_rows is None:
            raise InvalidRequest(REFUSED_PICTURES)
        if request.token_ids is not None:
            token_ids = self._check_token_ids(request)
        elif request.prompt is not None:
            self._refuse_long_text(request.prompt, request.sampling.min_new_tokens)
            token_ids = self._chats.tokenize_text(request.prompt, special=True)
        else:
            # The template writes its special tokens itself.
            chat = self._chats.render_chat(
                request.messages or (), request.chat_template_kwargs or {}, may_wait=may_wait
            )
            self._refuse_long_text(chat, request.sampling.min_new_tokens)
            token_ids = self._chats.tokenize_text(strip_marks(chat)) if is_raw else self._chats.tokenize_chat(chat)
            if request.pictures and add_rows is not None:
                token_ids = add_rows(token_ids)
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens")
        context, max_tokens = self._model.context_length, request.sampling.min_new_tokens
        if len(token_ids) + max_tokens > context:
            raise PromptTooLong(context_exceeded(context, len(token_ids), max_tokens))
        return token_ids

    def check_model(self, request: Request) -> None:
        """Raise `UnknownModel` for a request to another model."""
        asked = request.model
        if asked is not None and asked not in (self._name, self._model.name) and not self._knows_adapter(asked):
            raise UnknownModel(f"this pipeline serves {self._name!r}, not {request.model!r}")

    def _check_token_ids(self, request: Request) -> list[int]:
        token_ids = list(request.token_ids or ())
        vocab_size = self._model.vocab_size
        if max(token_ids) >= vocab_size:
            raise InvalidRequest(f"token id {max(token_ids)}: the vocabulary has {vocab_size}")
        return token_ids

    def find_answer_start(self, token_ids: Sequence[int]) -> str:
        """Return what the chat template wrote of the answer, by the model's response template: `<think>` of some."""
        template = self._model.response_template
        if template is None:
            return ""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        spec = load_response_template(template)
        for num_tokens in (MAX_START_TOKENS, len(token_ids)):
            text = self._model.tokenizer.decode(
                token_ids[-num_tokens:], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if spec.start_anchor_re.search(text):
                return str(spec.truncate_past_last_anchor(text))
        return ""

    def _refuse_long_text(self, text: str, max_tokens: int) -> None:
        # No token is longer than the longest one: a text that cannot fit is refused without tokenizing megabytes of it.
        context, at_least = self._model.context_length, len(text) // self._longest_token
        if at_least >= context:
            raise PromptTooLong(context_exceeded(context, at_least, max_tokens, "at least "))
