"""`/v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from penstock.client.core import Answer
from penstock.ingest.openai.body import (
    CompletionsBody,
    Refused,
    ShortText,
    StrictModel,
    allow_only,
    make_text_schema,
    parse_body,
    unsupported_value,
)
from penstock.ingest.openai.endpoint import StreamMeta, SubmitArgs, make_request_ids, make_submit_args
from penstock.ingest.openai.sse import DONE_ID, NO_POSITION, PLACEHOLDER, JsonTemplate, SseEvent, encode_json
from penstock.ingest.openai.tokens import CompletionUsage, TokenLogprobs, encode_logprobs, make_completion_usage
from penstock.messages import EndEvent, TokenEvent, Usage

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Message(StrictModel):
    """One turn of a chat."""

    model_config = ConfigDict(json_schema_extra={"required": ["role", "content"]})

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        WithJsonSchema({"type": "string", "enum": list(ROLES)}),
    ]
    content: Annotated[str | list[dict[str, Any]] | None, make_text_schema("text")] = None
    """Text, or a list of parts of type `text`."""
    choice_id: ShortText | None = None
    """Accepted; does nothing."""
    tool_call_id: ShortText | None = None
    refusal: allow_only() = None  # type: ignore[valid-type]
    annotations: Refused = None
    tool_calls: Refused = None
    function_call: Refused = None
    audio: Refused = None


class ChatBody(CompletionsBody):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The most tokens of each answer; without a limit it may fill the model's context."""
    logprobs: bool | None = None
    """Return the log probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return as well the log probabilities of this many likeliest tokens."""
    response_format: allow_only({"type": "text"}) = None  # type: ignore[valid-type]
    tools: Refused = None
    tool_choice: allow_only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None
    """Accepted; there are no tools."""
    functions: Refused = None
    function_call: allow_only("none", "auto") = None  # type: ignore[valid-type]
    modalities: allow_only(["text"]) = None  # type: ignore[valid-type]
    audio: Refused = None
    prediction: Refused = None
    web_search_options: allow_only() = None  # type: ignore[valid-type]
    """Not supported. `{}` is refused too, as it would switch the search on."""
    reasoning_effort: allow_only("none") = None  # type: ignore[valid-type]
    verbosity: allow_only("medium") = None  # type: ignore[valid-type]
    store: Refused = None

    @model_validator(mode="after")
    def _check(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs' to be true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("'max_tokens' and 'max_completion_tokens' cannot both be given")
        return self

    @property
    def num_choices(self) -> int:
        """How many requests of the pipeline are needed."""
        return self.n or 1


class ChatMessageOut(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[TokenLogprobs]
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    service_tier: str | None = None
    system_fingerprint: str | None = None


class ChatEndpoint:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    body_model = ChatBody
    answer_model = ChatCompletion

    def parse_body(self, raw: bytes | dict[str, Any]) -> ChatBody:
        """Parse a body. Raises `ApiError` 400."""
        return parse_body(ChatBody, raw)

    def make_requests(self, body: ChatBody, request_id: str) -> list[SubmitArgs]:
        """Return one request for each of `n`."""
        fields = body.request_fields()
        fields["messages"] = [_make_turn(message, f"messages.{index}") for index, message in enumerate(body.messages)]
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = body.max_completion_tokens
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
        body.set_default_limit(fields)
        ids = make_request_ids(request_id, body.num_choices)
        return [make_submit_args(fields, body.choice_seed(choice), choice_id) for choice, choice_id in enumerate(ids)]

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> ChatCompletion:
        """Return the whole answer."""
        choices = [_make_choice(index, answer) for index, answer in enumerate(answers)]
        usage = make_completion_usage([answer.usage for answer in answers], len(answers))
        return ChatCompletion(
            id=meta.id,
            created=meta.created,
            model=meta.model,
            choices=choices,
            usage=usage,
            service_tier=service_tier(meta),
        )

    def make_chunks(self, meta: StreamMeta) -> "ChatChunks":
        """Return the maker of the answer's stream."""
        return ChatChunks(meta)


CHAT = ChatEndpoint()


def service_tier(meta: StreamMeta) -> str:
    """Return the service tier that answers."""
    return "flex" if meta.options.get("service_tier") == "flex" else "default"


def wants_usage(meta: StreamMeta) -> bool:
    """Return whether the stream has the usage before its end."""
    return bool((meta.options.get("stream_options") or {}).get("include_usage"))


def join_text_parts(content: str | list[dict[str, Any]] | None, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a message's text. Raises `ApiError` 400 for other content."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content or ()):
        if part.get("type") not in kinds:
            raise unsupported_value(
                f"{param}.{index}", f"content of type {part.get('type')!r} is not supported, only text."
            )
        if not isinstance(part.get("text"), str):
            raise unsupported_value(f"{param}.{index}.text", "a part of a message has its text in 'text'.")
        texts.append(part["text"])
    return "".join(texts)


def _make_turn(message: Message, param: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise unsupported_value(f"{param}.role", f"messages of role '{message.role}' are not supported by this server.")
    if message.content is None:
        raise unsupported_value(f"{param}.content", "a message without content is not supported by this server.")
    return {"role": ROLES[message.role], "content": join_text_parts(message.content, f"{param}.content")}


def _make_choice(index: int, answer: Answer) -> ChatChoice:
    pairs = zip(answer.logprobs, answer.token_ids, strict=True) if answer.logprobs else ()
    logprobs = [TokenLogprobs.model_validate(encode_logprobs(one, token)) for one, token in pairs]
    return ChatChoice(
        index=index,
        message=ChatMessageOut(content=answer.text),
        logprobs=ChatLogprobs(content=logprobs) if logprobs else None,
        finish_reason="length" if answer.finish_reason == "length" else "stop",
    )


class ChatChunks:
    """A stream: the role, a chunk for each token that adds text, the finish reason, the usage, `[DONE]`."""

    def __init__(self, meta: StreamMeta) -> None:
        self._frame = {
            "id": meta.id, "object": "chat.completion.chunk", "created": meta.created, "model": meta.model,
            "service_tier": service_tier(meta), "system_fingerprint": None,
        }  # fmt: skip
        self._usage_field: dict[str, Any] = {"usage": None} if wants_usage(meta) else {}
        self._templates = [
            JsonTemplate(self._make_chunk(index, {"content": PLACEHOLDER})) for index in range(len(meta.request_ids))
        ]
        self._usages: list[Usage | None] = [None] * len(meta.request_ids)

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return the role."""
        return [
            SseEvent("s1", encode_json(self._make_chunk(index, {"role": "assistant", "content": "", "refusal": None})))
        ]

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return a token's text, with its log probability if that was asked for."""
        if event.logprobs is not None:
            logprobs = {"content": [encode_logprobs(event.logprobs, event.token)], "refusal": None}
            return [SseEvent(event.id, encode_json(self._make_chunk(index, {"content": event.text}, logprobs)))]
        return [SseEvent(event.id, self._templates[index].fill_in(event.text))] if event.text else []

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Return the finish reason, with the text that was held back."""
        self._usages[index] = event.usage
        delta = {"content": event.text} if event.text else {}
        finish_reason = "length" if event.finish_reason == "length" else "stop"
        return [SseEvent("e1", encode_json(self._make_chunk(index, delta, finish_reason=finish_reason)))]

    def end_stream(self) -> list[SseEvent]:
        """Return the usage if it was asked for, and `[DONE]`."""
        events = []
        if self._usage_field:
            usages = [usage for usage in self._usages if usage is not None]
            usage = make_completion_usage(usages, len(usages)).model_dump()
            events.append(SseEvent(NO_POSITION, encode_json({**self._frame, "choices": [], "usage": usage})))
        return [*events, SseEvent(DONE_ID, "[DONE]")]

    def _make_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._frame, "choices": [choice], **self._usage_field}
