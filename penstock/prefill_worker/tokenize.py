"""From a request's prompt to token ids, and all reasons for which a model refuses a prompt."""

from penstock.engine.limits import context_exceeded
from penstock.engine.model import LoadedModel
from penstock.errors import InvalidRequest, PromptTooLong, UnknownModel
from penstock.messages import Request


class PromptTokenizer:
    """Turns the prompts of requests into token ids for one model."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._longest_token = max(map(len, model.tokenizer.get_vocab()), default=1)

    def tokenize_prompt(self, request: Request) -> list[int]:
        """Return the prompt's token ids. Raises `UnknownModel`, `InvalidRequest` or `PromptTooLong`."""
        if request.model not in (None, self._model.name):
            raise UnknownModel(f"this pipeline serves {self._model.name!r}, not {request.model!r}")
        if request.token_ids is not None:
            token_ids = self._check_token_ids(request)
        elif request.prompt is not None:
            token_ids = self._encode_text(request.prompt, request.sampling.min_new_tokens)
        else:
            # The template writes its special tokens itself.
            token_ids = self._encode_text(
                self._apply_chat_template(request), request.sampling.min_new_tokens, special=False
            )
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens")
        context, max_tokens = self._model.context_length, request.sampling.min_new_tokens
        if len(token_ids) + max_tokens > context:
            raise PromptTooLong(context_exceeded(context, len(token_ids), max_tokens))
        return token_ids

    def _check_token_ids(self, request: Request) -> list[int]:
        token_ids = list(request.token_ids or ())
        vocab_size = self._model.config.get_text_config().vocab_size
        if max(token_ids) >= vocab_size:
            raise InvalidRequest(f"token id {max(token_ids)}: the vocabulary has {vocab_size}")
        return token_ids

    def _apply_chat_template(self, request: Request) -> str:
        turns = [turn.model_dump() for turn in request.messages or ()]
        if not self._model.tokenizer.chat_template:
            raise InvalidRequest(f"{self._model.name!r} has no chat template; send a prompt instead of messages")
        try:
            text = self._model.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything about what it is given
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from None
        return str(text)

    def _encode_text(self, text: str, max_tokens: int, *, special: bool = True) -> list[int]:
        # No token is longer than the longest one: a text that cannot fit is refused without tokenizing megabytes of it.
        context, at_least = self._model.context_length, len(text) // self._longest_token
        if at_least >= context:
            raise PromptTooLong(context_exceeded(context, at_least, max_tokens, "at least "))
        encoded: list[int] = self._model.tokenizer(text, verbose=False, add_special_tokens=special)["input_ids"]
        return encoded
