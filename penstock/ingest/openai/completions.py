"""`/v1/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from penstock.client.core import Answer
from penstock.ingest.openai.body import MAX_CHOICES, CompletionsBody, Refused, only, parse
from penstock.ingest.openai.chat import tier, wants_usage
from penstock.ingest.openai.endpoint import Ask, Card, ask_of, request_ids
from penstock.ingest.openai.sse import DONE, HOLE, NO_PLACE, Form, Piece, as_json
from penstock.ingest.openai.tokens import CompletionUsage, token_text, usage_of
from penstock.messages import EndEvent, Logprobs, TokenEvent, TokenId, Usage

MAX_TOKENS = 16
"""Of an answer where none are given: as OpenAI has it."""

Tokens = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class CompletionBody(CompletionsBody):
    """What is asked of `/v1/completions`."""

    prompt: Text | Tokens | Annotated[list[Text] | list[Tokens], Field(min_length=1, max_length=MAX_CHOICES)]
    """Text, token ids, or a list of either: each is answered by itself."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Tell the log probabilities of each token and of so many likeliest ones."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Only as many as `n`."""
    echo: Refused = None
    suffix: only("") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("'best_of' other than 'n' is not supported by this server")
        if self.num_choices > MAX_CHOICES:
            raise ValueError(f"prompts times 'n' may be {MAX_CHOICES}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_choices(self) -> int:
        """How many requests of the pipeline it takes."""
        return len(self.prompts) * (self.n or 1)


class CompletionLogprobs(BaseModel):
    """One entry for each token in each list."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class CompletionChoice(BaseModel):
    """One answer."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    service_tier: str | None = None
    system_fingerprint: str | None = None


class Completions:
    """`/v1/completions`."""

    path = "/v1/completions"
    prefix = "cmpl-"
    prompt = "prompt"
    body = CompletionBody
    answer = Completion

    def parse(self, raw: bytes | dict[str, Any]) -> CompletionBody:
        """The body, or `ApiError` 400."""
        return parse(CompletionBody, raw)

    def asks(self, body: CompletionBody, request_id: str) -> list[Ask]:
        """One request for each of `n` for each prompt."""
        fields = body.fields()
        fields.setdefault("max_tokens", MAX_TOKENS)
        if body.logprobs is not None:
            fields["logprobs"] = body.logprobs
        ids, n, asks = request_ids(request_id, body.num_choices), body.n or 1, list[Ask]()
        for place, prompt in enumerate(body.prompts):
            for choice in range(n):
                ask = ask_of(fields, body.seed_of(choice), ids[place * n + choice])
                if isinstance(prompt, str):
                    ask["prompt"] = prompt
                else:
                    ask["token_ids"] = prompt
                asks.append(ask)
        return asks

    def whole(self, card: Card, answers: Sequence[Answer]) -> Completion:
        """The answer as a whole."""
        choices = [_choice(card, index, answer) for index, answer in enumerate(answers)]
        usage = usage_of([answer.usage for answer in answers], card.options.get("n") or 1)
        return Completion(
            id=card.id, created=card.created, model=card.model, choices=choices, usage=usage, service_tier=tier(card)
        )

    def chunks(self, card: Card) -> "CompletionChunks":
        """The answer in pieces."""
        return CompletionChunks(card)


COMPLETIONS = Completions()


def _choice(card: Card, index: int, answer: Answer) -> CompletionChoice:
    told = None
    if answer.logprobs:
        offsets = _Offsets(bool(card.options.get("logprobs")))
        pairs = zip(answer.logprobs, answer.token_ids, strict=True)
        told = CompletionLogprobs.model_validate(offsets.lists([*pairs]))
    return CompletionChoice(
        text=answer.text,
        index=index,
        logprobs=told,
        finish_reason="length" if answer.finish_reason == "length" else "stop",
    )


class _Offsets:
    """The four lists of a choice's log probabilities, and where in the text its next token begins."""

    def __init__(self, with_top: bool) -> None:
        self._with_top = with_top
        self._offset = 0

    def lists(self, told: Sequence[tuple[Logprobs, int]]) -> dict[str, Any]:
        """Of the next tokens."""
        tokens = [token_text(one, token) for one, token in told]
        offsets = []
        for one, _ in told:
            offsets.append(self._offset)
            self._offset += len(one.text or "")
        tops = [{token_text(best, best.token): best.logprob for best in one.top} for one, _ in told]
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one, _ in told],
            "text_offset": offsets,
            "top_logprobs": tops if self._with_top else None,
        }


class CompletionChunks:
    """Its pieces: a chunk for each token that says something, the finish reason, the usage, `[DONE]`."""

    def __init__(self, card: Card) -> None:
        self._frame = {
            "id": card.id, "object": "text_completion", "created": card.created, "model": card.model,
            "service_tier": tier(card), "system_fingerprint": None,
        }  # fmt: skip
        self._more: dict[str, Any] = {"usage": None} if wants_usage(card) else {}
        self._texts = [Form(self._chunk(index, HOLE)) for index in range(len(card.request_ids))]
        self._n = card.options.get("n") or 1
        self._usages: list[Usage] = [Usage()] * len(card.request_ids)
        self._offsets = [_Offsets(bool(card.options.get("logprobs"))) for _ in card.request_ids]

    def open(self, index: int) -> list[Piece]:
        """Nothing."""
        return []

    def token(self, index: int, event: TokenEvent) -> list[Piece]:
        """A token's text, and its log probability where that was asked for."""
        if event.logprobs is not None:
            told = self._offsets[index].lists([(event.logprobs, event.token)])
            return [Piece(event.id, as_json(self._chunk(index, event.text, told)))]
        return [Piece(event.id, self._texts[index].filled(event.text))] if event.text else []

    def end(self, index: int, event: EndEvent) -> list[Piece]:
        """The finish reason, with what text was held back."""
        self._usages[index] = event.usage
        finish = "length" if event.finish_reason == "length" else "stop"
        return [Piece("e1", as_json(self._chunk(index, event.text, finish=finish)))]

    def close(self) -> list[Piece]:
        """The usage where it was asked for, and `[DONE]`."""
        pieces = []
        if self._more:
            usage = usage_of(self._usages, self._n).model_dump()
            pieces.append(Piece(NO_PLACE, as_json({**self._frame, "choices": [], "usage": usage})))
        return [*pieces, Piece(DONE, "[DONE]")]

    def _chunk(
        self, index: int, text: str, told: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"text": text, "index": index, "logprobs": told, "finish_reason": finish}
        return {**self._frame, "choices": [choice], **self._more}
