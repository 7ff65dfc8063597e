"""`/v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from penstock.client.core import Answer
from penstock.ingest.openai.body import CompletionsBody, Name, Refused, Strict, only, parse, text_schema, unsupported
from penstock.ingest.openai.endpoint import Ask, Card, ask_of, request_ids
from penstock.ingest.openai.sse import DONE, HOLE, NO_PLACE, Form, Piece, as_json
from penstock.ingest.openai.tokens import CompletionUsage, TokenLogprobs, logprobs_entry, usage_of
from penstock.messages import EndEvent, TokenEvent, Usage

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Message(Strict):
    """One turn of a chat."""

    model_config = ConfigDict(json_schema_extra={"required": ["role", "content"]})

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        WithJsonSchema({"type": "string", "enum": list(ROLES)}),
    ]
    content: Annotated[str | list[dict[str, Any]] | None, text_schema("text")] = None
    """Text, or a list of parts of type `text`."""
    name: Name | None = None
    """Accepted; does nothing."""
    tool_call_id: Name | None = None
    refusal: only() = None  # type: ignore[valid-type]
    annotations: Refused = None
    tool_calls: Refused = None
    function_call: Refused = None
    audio: Refused = None


class ChatBody(CompletionsBody):
    """What is asked of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The most tokens of each answer; without a limit it may fill the model's context."""
    logprobs: bool | None = None
    """Tell the log probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """And those of so many likeliest tokens."""
    response_format: only({"type": "text"}) = None  # type: ignore[valid-type]
    tools: Refused = None
    tool_choice: only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None
    """Accepted; there are no tools."""
    functions: Refused = None
    function_call: only("none", "auto") = None  # type: ignore[valid-type]
    modalities: only(["text"]) = None  # type: ignore[valid-type]
    audio: Refused = None
    prediction: Refused = None
    web_search_options: only() = None  # type: ignore[valid-type]
    """Not supported; `{}` too would switch the search on."""
    reasoning_effort: only("none") = None  # type: ignore[valid-type]
    verbosity: only("medium") = None  # type: ignore[valid-type]
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
        """How many requests of the pipeline it takes."""
        return self.n or 1


class ChatMessageOut(BaseModel):
    """The answer's turn."""

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


class Chat:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    prefix = "chatcmpl-"
    prompt = "messages"
    body = ChatBody
    answer = ChatCompletion

    def parse(self, raw: bytes | dict[str, Any]) -> ChatBody:
        """The body, or `ApiError` 400."""
        return parse(ChatBody, raw)

    def asks(self, body: ChatBody, request_id: str) -> list[Ask]:
        """One request for each of `n`."""
        fields = body.fields()
        fields["messages"] = [_turn(message, f"messages.{place}") for place, message in enumerate(body.messages)]
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = body.max_completion_tokens
        if body.logprobs:
            fields["logprobs"] = body.top_logprobs or 0
        body.end_with_context(fields)
        ids = request_ids(request_id, body.num_choices)
        return [ask_of(fields, body.seed_of(choice), name) for choice, name in enumerate(ids)]

    def whole(self, card: Card, answers: Sequence[Answer]) -> ChatCompletion:
        """The answer as a whole."""
        choices = [_choice(index, answer) for index, answer in enumerate(answers)]
        usage = usage_of([answer.usage for answer in answers], len(answers))
        return ChatCompletion(
            id=card.id, created=card.created, model=card.model, choices=choices, usage=usage, service_tier=tier(card)
        )

    def chunks(self, card: Card) -> "ChatChunks":
        """The answer in pieces."""
        return ChatChunks(card)


CHAT = Chat()


def tier(card: Card) -> str:
    """Which tier answers."""
    return "flex" if card.options.get("service_tier") == "flex" else "default"


def wants_usage(card: Card) -> bool:
    """Whether the stream has the usage before its end."""
    return bool((card.options.get("stream_options") or {}).get("include_usage"))


def text_of(content: str | list[dict[str, Any]] | None, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A message's text. Raises `ApiError` 400 for what is none."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content or ()):
        if part.get("type") not in kinds:
            raise unsupported(f"{where}.{place}", f"content of type {part.get('type')!r} is not supported, only text.")
        if not isinstance(part.get("text"), str):
            raise unsupported(f"{where}.{place}.text", "a part of a message has its text in 'text'.")
        texts.append(part["text"])
    return "".join(texts)


def _turn(message: Message, where: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise unsupported(f"{where}.role", f"messages of role '{message.role}' are not supported by this server.")
    if message.content is None:
        raise unsupported(f"{where}.content", "a message without content is not supported by this server.")
    return {"role": ROLES[message.role], "content": text_of(message.content, f"{where}.content")}


def _choice(index: int, answer: Answer) -> ChatChoice:
    pairs = zip(answer.logprobs, answer.token_ids, strict=True) if answer.logprobs else ()
    told = [TokenLogprobs.model_validate(logprobs_entry(one, token)) for one, token in pairs]
    return ChatChoice(
        index=index,
        message=ChatMessageOut(content=answer.text),
        logprobs=ChatLogprobs(content=told) if told else None,
        finish_reason="length" if answer.finish_reason == "length" else "stop",
    )


class ChatChunks:
    """Its pieces: the role, a chunk for each token that says something, the finish reason, the usage, `[DONE]`."""

    def __init__(self, card: Card) -> None:
        self._frame = {
            "id": card.id, "object": "chat.completion.chunk", "created": card.created, "model": card.model,
            "service_tier": tier(card), "system_fingerprint": None,
        }  # fmt: skip
        self._more: dict[str, Any] = {"usage": None} if wants_usage(card) else {}
        self._texts = [Form(self._chunk(index, {"content": HOLE})) for index in range(len(card.request_ids))]
        self._usages: list[Usage | None] = [None] * len(card.request_ids)

    def open(self, index: int) -> list[Piece]:
        """The role."""
        return [Piece("s1", as_json(self._chunk(index, {"role": "assistant", "content": "", "refusal": None})))]

    def token(self, index: int, event: TokenEvent) -> list[Piece]:
        """A token's text, and its log probability where that was asked for."""
        if event.logprobs is not None:
            told = {"content": [logprobs_entry(event.logprobs, event.token)], "refusal": None}
            return [Piece(event.id, as_json(self._chunk(index, {"content": event.text}, told)))]
        return [Piece(event.id, self._texts[index].filled(event.text))] if event.text else []

    def end(self, index: int, event: EndEvent) -> list[Piece]:
        """The finish reason, with what text was held back."""
        self._usages[index] = event.usage
        delta = {"content": event.text} if event.text else {}
        finish = "length" if event.finish_reason == "length" else "stop"
        return [Piece("e1", as_json(self._chunk(index, delta, finish=finish)))]

    def close(self) -> list[Piece]:
        """The usage where it was asked for, and `[DONE]`."""
        pieces = []
        if self._more:
            usages = [usage for usage in self._usages if usage is not None]
            usage = usage_of(usages, len(usages)).model_dump()
            pieces.append(Piece(NO_PLACE, as_json({**self._frame, "choices": [], "usage": usage})))
        return [*pieces, Piece(DONE, "[DONE]")]

    def _chunk(
        self, index: int, delta: dict[str, Any], told: dict[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}
        return {**self._frame, "choices": [choice], **self._more}
