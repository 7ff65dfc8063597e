"""`/v1/completions`, and what its answers share with those of `/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from penstock.client.core import Answer
from penstock.ingest.openai.body import MAX_CHOICES, CompletionsBody, NumTopLogprobs, Refused, allow_only
from penstock.ingest.openai.endpoint import Endpoint, StreamMeta, SubmitArgs, make_request_ids, make_submit_args
from penstock.ingest.openai.sse import DONE_ID, NO_POSITION, PLACEHOLDER, JsonTemplate, SseEvent, encode_json
from penstock.ingest.openai.tokens import CompletionUsage, finish_reason, make_completion_usage, token_text
from penstock.messages import EndEvent, Logprobs, TokenEvent, TokenId, Usage

DEFAULT_MAX_TOKENS = 16
"""The limit of an answer if none is given, as at OpenAI."""

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
NonEmptyText = Annotated[str, Field(min_length=1)]


class CompletionBody(CompletionsBody):
    """A request to `/v1/completions`."""

    prompt: (
        NonEmptyText
        | TokenIds
        | Annotated[list[NonEmptyText] | list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    """Text, token ids, or a list of either; each is answered separately."""
    logprobs: NumTopLogprobs | None = None
    """Return the log probabilities of each token and of this many likeliest ones."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Only equal to `n`."""
    echo: Refused = None
    suffix: allow_only("") = None  # type: ignore[valid-type]
    add_special_tokens: allow_only(True, instead="Send token ids as the prompt.") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("'best_of' other than 'n' is not supported by this server")
        if self.num_choices > MAX_CHOICES:
            raise ValueError(f"prompts times 'n' may be {MAX_CHOICES}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def num_choices(self) -> int:
        """How many requests of the pipeline are needed."""
        return len(self.prompts) * (self.n or 1)


class CompletionLogprobs(BaseModel):
    """Each list has one entry for each token."""

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


class ChoicesAnswer(BaseModel):
    """An answer that consists of choices."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: CompletionUsage
    service_tier: str | None = None
    system_fingerprint: str | None = None


class Completion(ChoicesAnswer):
    """The answer of `/v1/completions`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


C = TypeVar("C", bound=ChoicesAnswer)


def make_choices_answer(kind: type[C], meta: StreamMeta, choices: list[Any], answers: Sequence[Answer]) -> C:
    """Return the whole answer, as `kind`."""
    usage = make_completion_usage([answer.usage for answer in answers], meta.choices_per_prompt)
    fields = {"id": meta.id, "created": meta.created, "model": meta.model, "service_tier": meta.service_tier}
    return kind.model_validate({**fields, "choices": choices, "usage": usage})


class CompletionsEndpoint(Endpoint[CompletionBody]):
    """`/v1/completions`."""

    path = "/v1/completions"
    id_prefix = "cmpl-"
    prompt_field = "prompt"
    body_model = CompletionBody
    answer_model = Completion

    def make_requests(self, body: CompletionBody, request_id: str) -> list[SubmitArgs]:
        """Return one request for each of `n` for each prompt."""
        fields = body.request_fields()
        fields.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        if body.logprobs is not None:
            fields["logprobs"] = body.logprobs
        ids, n, requests = make_request_ids(request_id, body.num_choices), body.n or 1, list[SubmitArgs]()
        for prompt_index, prompt in enumerate(body.prompts):
            for choice in range(n):
                args = make_submit_args(fields, body.choice_seed(choice), ids[prompt_index * n + choice])
                if isinstance(prompt, str):
                    args["prompt"] = prompt
                else:
                    args["token_ids"] = prompt
                requests.append(args)
        return requests

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> Completion:
        """Return the whole answer."""
        choices = [_make_choice(meta, index, answer) for index, answer in enumerate(answers)]
        return make_choices_answer(Completion, meta, choices, answers)

    def make_chunks(self, meta: StreamMeta) -> "CompletionChunks":
        """Return the maker of the answer's stream."""
        return CompletionChunks(meta)


COMPLETIONS = CompletionsEndpoint()


def _make_choice(meta: StreamMeta, index: int, answer: Answer) -> CompletionChoice:
    logprobs = None
    if answer.logprobs:
        offsets = _LogprobLists(bool(meta.options.get("logprobs")))
        pairs = zip(answer.logprobs, answer.token_ids, strict=True)
        logprobs = CompletionLogprobs.model_validate(offsets.make_lists([*pairs]))
    return CompletionChoice(text=answer.text, index=index, logprobs=logprobs, finish_reason=finish_reason(answer))


class _LogprobLists:
    """Builds the four lists of a choice's log probabilities; remembers where in the text its next token begins."""

    def __init__(self, with_top: bool) -> None:
        self._with_top = with_top
        self._offset = 0

    def make_lists(self, logprobs: Sequence[tuple[Logprobs, int]]) -> dict[str, Any]:
        """Return the lists of the next tokens."""
        tokens = [token_text(one, token) for one, token in logprobs]
        offsets = []
        for one, _ in logprobs:
            offsets.append(self._offset)
            self._offset += len(one.text or "")
        tops = [{token_text(best, best.token): best.logprob for best in one.top} for one, _ in logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one, _ in logprobs],
            "text_offset": offsets,
            "top_logprobs": tops if self._with_top else None,
        }


class CompletionChunks:
    """A stream of choices: a chunk for each token that adds text, the finish reason, the usage, `[DONE]`."""

    kind = "text_completion"
    """The `object` of each chunk."""

    def __init__(self, meta: StreamMeta) -> None:
        self._frame = {
            "id": meta.id, "object": self.kind, "created": meta.created, "model": meta.model,
            "service_tier": meta.service_tier, "system_fingerprint": None,
        }  # fmt: skip
        self._usage_field: dict[str, Any] = {"usage": None} if meta.wants_usage else {}
        self._templates = [
            JsonTemplate(self._make_chunk(self._make_choice(index, PLACEHOLDER)))
            for index in range(len(meta.request_ids))
        ]
        self._choices_per_prompt = meta.choices_per_prompt
        self._usages: list[Usage] = [Usage()] * len(meta.request_ids)
        self._logprob_lists = [_LogprobLists(bool(meta.options.get("logprobs"))) for _ in meta.request_ids]

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return nothing: a choice begins with its first token."""
        return []

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return a token's text, with its log probability if that was asked for."""
        if event.logprobs is not None:
            logprobs = self._encode_logprobs(index, event.logprobs, event.token)
            return [self._make_event(event.id, self._make_choice(index, event.text, logprobs))]
        return [SseEvent(event.id, self._templates[index].fill_in(event.text))] if event.text else []

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Return the finish reason, with the text that was held back."""
        self._usages[index] = event.usage
        choice = self._make_choice(index, event.text, finish_reason=finish_reason(event))
        return [self._make_event("e1", choice)]

    def end_stream(self) -> list[SseEvent]:
        """Return the usage if it was asked for, and `[DONE]`."""
        events = []
        if self._usage_field:
            usage = make_completion_usage(self._usages, self._choices_per_prompt).model_dump()
            events.append(SseEvent(NO_POSITION, encode_json({**self._frame, "choices": [], "usage": usage})))
        return [*events, SseEvent(DONE_ID, "[DONE]")]

    def _make_choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def _encode_logprobs(self, index: int, logprobs: Logprobs, token: int) -> dict[str, Any]:
        return self._logprob_lists[index].make_lists([(logprobs, token)])

    def _make_event(self, position: str, choice: dict[str, Any]) -> SseEvent:
        return SseEvent(position, encode_json(self._make_chunk(choice)))

    def _make_chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._frame, "choices": [choice], **self._usage_field}
