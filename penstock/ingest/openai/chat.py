"""`/v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from penstock.client.core import Answer
from penstock.ingest.openai.body import (
    CompletionsBody,
    NumTopLogprobs,
    Refused,
    ShortText,
    StrictModel,
    TokenLimit,
    allow_only,
    make_text_schema,
    unsupported_value,
)
from penstock.ingest.openai.completions import ChoicesAnswer, CompletionChunks, make_choices_answer
from penstock.ingest.openai.endpoint import Endpoint, StreamMeta, SubmitArgs, make_chat_requests
from penstock.ingest.openai.sse import SseEvent
from penstock.ingest.openai.tokens import TokenLogprobs, encode_answer_logprobs, encode_logprobs, finish_reason
from penstock.messages import Logprobs

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
    max_completion_tokens: TokenLimit | None = None
    """The most tokens of each answer; without a limit it may fill the model's context."""
    logprobs: bool | None = None
    """Return the log probability of each token."""
    top_logprobs: NumTopLogprobs | None = None
    """Return as well the log probabilities of this many likeliest tokens."""
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
    # What vLLM has besides, and its clients send with its default.
    echo: Refused = None
    prompt_logprobs: allow_only(instead="Use '/v1/completions'.") = None  # type: ignore[valid-type]
    add_generation_prompt: allow_only(True) = None  # type: ignore[valid-type]
    continue_final_message: Refused = None
    add_special_tokens: Refused = None
    documents: Refused = None
    chat_template: allow_only(instead="The model's own is used.") = None  # type: ignore[valid-type]
    mm_processor_kwargs: Refused = None

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


class ChatCompletion(ChoicesAnswer):
    """The answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatEndpoint(Endpoint[ChatBody]):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    body_model = ChatBody
    answer_model = ChatCompletion

    def make_requests(self, body: ChatBody, request_id: str) -> list[SubmitArgs]:
        """Return one request for each of `n`."""
        turns = [_make_turn(message, f"messages.{index}") for index, message in enumerate(body.messages)]
        num_logprobs = body.top_logprobs or 0 if body.logprobs else None
        return make_chat_requests(body, request_id, turns, body.max_completion_tokens, num_logprobs)

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> ChatCompletion:
        """Return the whole answer."""
        choices = [_make_choice(index, answer) for index, answer in enumerate(answers)]
        return make_choices_answer(ChatCompletion, meta, choices, answers)

    def make_chunks(self, meta: StreamMeta) -> "ChatChunks":
        """Return the maker of the answer's stream."""
        return ChatChunks(meta)


CHAT = ChatEndpoint()


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
    logprobs = [TokenLogprobs.model_validate(one) for one in encode_answer_logprobs(answer)]
    return ChatChoice(
        index=index,
        message=ChatMessageOut(content=answer.text),
        logprobs=ChatLogprobs(content=logprobs) if logprobs else None,
        finish_reason=finish_reason(answer),
    )


class ChatChunks(CompletionChunks):
    """As of a completion, but a choice begins with its role, and its text is a delta."""

    kind = "chat.completion.chunk"

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return the role."""
        choice = self._make_choice(index, "") | {"delta": {"role": "assistant", "content": "", "refusal": None}}
        return [self._make_event("s1", choice)]

    def _make_choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        delta = {"content": text} if text or finish_reason is None else {}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _encode_logprobs(self, index: int, logprobs: Logprobs, token: int) -> dict[str, Any]:
        return {"content": [encode_logprobs(logprobs, token)], "refusal": None}
