"""`/v1/completions`, and what its answers share with those of `/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from penstock.client.core import Answer
from penstock.ingest.openai.body import (
    MAX_CHOICES,
    CompletionsBody,
    Inputs,
    NonEmptyText,
    NumTopLogprobs,
    TokenIds,
    allow_only,
)
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta, SubmitArgs, make_request_ids, make_submit_args
from penstock.ingest.openai.sse import DONE_ID, NO_POSITION, PLACEHOLDER, JsonTemplate, SseEvent, encode_json
from penstock.ingest.openai.tokens import CompletionUsage, finish_reason, make_completion_usage, token_text
from penstock.messages import EndEvent, Logprobs, PromptToken, TokenEvent, TokenLogprob, Usage

DEFAULT_MAX_TOKENS = 16
"""The limit of an answer if none is given, as at OpenAI."""


class CompletionBody(CompletionsBody):
    """A request to `/v1/completions`."""

    prompt: NonEmptyText | TokenIds | Annotated[Inputs, Field(min_length=1, max_length=MAX_CHOICES)]
    """Text, token ids, or a list of either; each is answered separately."""
    logprobs: NumTopLogprobs | None = None
    """Return the log probabilities of each token and of this many likeliest ones."""
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Only equal to `n`."""
    echo: bool | None = None
    """Begin the answer with the prompt: the text of all its tokens; with `logprobs` their log probabilities too."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return the log probabilities of the prompt's tokens, and of this many likeliest ones; not with `stream`."""
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The most tokens of each answer; 0, with `echo` alone: one token is generated and not returned."""
    suffix: allow_only("") = None  # type: ignore[valid-type]
    add_special_tokens: allow_only(True, instead="Send token ids as the prompt.") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("'best_of' other than 'n' is not supported by this server")
        if self.num_choices > MAX_CHOICES:
            raise ValueError(f"prompts times 'n' may be {MAX_CHOICES}")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("'max_tokens' can be 0 only with 'echo'")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("'prompt_logprobs' cannot be used with 'stream': use 'echo' with 'logprobs'")
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
    token_logprobs: list[float | None]
    """None for the first token of a prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class PromptLogprob(BaseModel):
    """The log probability of a token at a place of the prompt."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest; None for a token of the prompt that is not among the likeliest ones that were asked for."""
    decoded_token: str


class CompletionChoice(BaseModel):
    """One answer."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    """For each token of the prompt: itself and the likeliest ones, by id; None for the first."""


class ChoicesAnswer(BaseModel):
    """An answer that consists of choices."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: CompletionUsage
    service_tier: str | None = None


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


class CompletionsEndpoint(ApiEndpoint[CompletionBody]):
    """`/v1/completions`."""

    path = "/v1/completions"
    id_prefix = "cmpl-"
    prompt_field = "prompt"
    body_model = CompletionBody
    answer_model = Completion

    def make_requests(self, body: CompletionBody, request_id: str, *, sees: bool = False) -> list[SubmitArgs]:
        """Return one request for each of `n` for each prompt."""
        fields = body.request_fields()
        fields.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
        fields["max_tokens"] = max(1, fields["max_tokens"])
        if body.logprobs is not None:
            fields["logprobs"] = body.logprobs
        if body.prompt_logprobs is not None or body.echo:
            fields["prompt_logprobs"] = max(body.prompt_logprobs or 0, (body.logprobs or 0) if body.echo else 0)
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
    options, lists, logprobs = meta.options, _LogprobLists(meta), None
    pairs = [] if options.get("max_tokens") == 0 else [*zip(answer.logprobs, answer.token_ids, strict=False)]
    prompt = answer.prompt_tokens if options.get("echo") else []
    if options.get("logprobs") is not None and (prompt or pairs):
        logprobs = CompletionLogprobs.model_validate(lists.make_lists(pairs, prompt))
    top = options.get("prompt_logprobs")
    return CompletionChoice(
        text=join_prompt_text(prompt) + ("" if options.get("max_tokens") == 0 else answer.text),
        index=index,
        logprobs=logprobs,
        finish_reason="length" if options.get("max_tokens") == 0 else finish_reason(answer),
        prompt_logprobs=None if top is None else [_encode_prompt_logprobs(one, top) for one in answer.prompt_tokens],
    )


def join_prompt_text(tokens: Sequence[PromptToken]) -> str:
    """Return the text of a prompt: that of all its tokens, special ones by their names."""
    spelled = (bytes(one.bytes) if one.bytes is not None else (one.text or "").encode() for one in tokens)
    return b"".join(spelled).decode(errors="replace")


def _encode_prompt_logprobs(one: PromptToken, top: int) -> dict[int, PromptLogprob] | None:
    """Return the log probabilities at a place of the prompt in vLLM's form."""
    if one.logprob is None:
        return None
    own = PromptLogprob(logprob=one.logprob, decoded_token=token_text(one, one.token))
    best = {
        entry.token: PromptLogprob(logprob=entry.logprob, rank=rank, decoded_token=token_text(entry, entry.token))
        for rank, entry in enumerate(one.top[:top], 1)
    }
    return {one.token: own} | best


class _LogprobLists:
    """Builds the four lists of a choice's log probabilities; remembers where in the text its next token begins."""

    def __init__(self, meta: StreamMeta) -> None:
        self._num_top: int = meta.options.get("logprobs") or 0
        self._offset = 0

    def make_lists(
        self, logprobs: Sequence[tuple[Logprobs, int]], prompt: Sequence[PromptToken] = ()
    ) -> dict[str, Any]:
        """Return the lists of the next tokens, and of the prompt before them."""
        entries: list[tuple[Logprobs | PromptToken, int]] = [*((one, one.token) for one in prompt), *logprobs]
        tops = [
            None if one.logprob is None else {token_text(best, best.token): best.logprob for best in self._cut(one)}
            for one, _ in entries
        ]
        offsets = []
        for one, _ in entries:
            offsets.append(self._offset)
            self._offset += len(one.text or "")
        return {
            "tokens": [token_text(one, token) for one, token in entries],
            "token_logprobs": [one.logprob for one, _ in entries],
            "text_offset": offsets,
            "top_logprobs": tops if self._num_top else None,
        }

    def _cut(self, one: Logprobs | PromptToken) -> Sequence[TokenLogprob]:
        return one.top[: self._num_top]


class CompletionChunks:
    """A stream of choices: a chunk for each token that adds text, the finish reason, the usage, `[DONE]`."""

    kind = "text_completion"
    """The `object` of each chunk."""

    def __init__(self, meta: StreamMeta) -> None:
        self._frame = {
            "id": meta.id, "object": self.kind, "created": meta.created, "model": meta.model,
            "service_tier": meta.service_tier,
        }  # fmt: skip
        self._usage_field: dict[str, Any] = {"usage": None} if meta.wants_usage else {}
        self._templates = [
            JsonTemplate(self._make_chunk(self._make_choice(index, PLACEHOLDER)))
            for index in range(len(meta.request_ids))
        ]
        self._choices_per_prompt = meta.choices_per_prompt
        self._usages: list[Usage] = [Usage()] * len(meta.request_ids)
        self._logprob_lists = [_LogprobLists(meta) for _ in meta.request_ids]
        self._echoes, self._is_empty = bool(meta.options.get("echo")), meta.options.get("max_tokens") == 0
        self._wants_logprobs = meta.options.get("logprobs") is not None

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return nothing: a choice begins with its first token."""
        return []

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return a token's text, with its log probability if that was asked for, after the prompt with `echo`."""
        if self._echoes and event.prompt_tokens:
            return [self._make_event(event.id, self._echo_prompt(index, event, event.prompt_tokens))]
        if event.logprobs is not None:
            logprobs = self._encode_logprobs(index, event.logprobs, event.token)
            return [self._make_event(event.id, self._make_choice(index, event.text, logprobs))]
        return [SseEvent(event.id, self._templates[index].fill_in(event.text))] if event.text else []

    def _echo_prompt(self, index: int, event: TokenEvent, prompt: Sequence[PromptToken]) -> dict[str, Any]:
        pairs = [] if event.logprobs is None or self._is_empty else [(event.logprobs, event.token)]
        logprobs = self._logprob_lists[index].make_lists(pairs, prompt) if self._wants_logprobs else None
        return self._make_choice(index, join_prompt_text(prompt) + ("" if self._is_empty else event.text), logprobs)

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Return the finish reason, with the text that was held back."""
        self._usages[index] = event.usage
        reason = "length" if self._is_empty else finish_reason(event)
        choice = self._make_choice(index, "" if self._is_empty else event.text, finish_reason=reason)
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
