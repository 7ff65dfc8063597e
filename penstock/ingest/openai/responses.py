"""`/v1/responses`: text in, text out. Who keeps responses for later turns puts those turns into the body."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, model_validator

from penstock.client.core import Answer, Event, build_answer
from penstock.grammar.spec import from_text_format
from penstock.ingest.errors import to_api_error
from penstock.ingest.openai.body import (
    Body,
    GrammarReader,
    NumTopLogprobs,
    Refused,
    StrictModel,
    TokenLimit,
    allow_only,
    make_text_schema,
    unsupported_value,
)
from penstock.ingest.openai.chat import ROLES, join_text_parts
from penstock.ingest.openai.endpoint import Endpoint, StreamMeta, SubmitArgs, make_chat_requests
from penstock.ingest.openai.sse import DONE_ID, PLACEHOLDER, JsonTemplate, SseEvent, encode_json
from penstock.ingest.openai.tokens import TokenLogprobs, encode_answer_logprobs, encode_logprobs, finish_reason
from penstock.messages import EndEvent, TokenEvent, Usage

TEXT_PART_TYPES = ("input_text", "output_text", "text")
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
INCLUDE_LOGPROBS = "message.output_text.logprobs"


class InputItem(StrictModel):
    """One turn."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, Any]], make_text_schema(*TEXT_PART_TYPES)]
    """Text, or a list of parts of type `input_text` or `output_text`."""
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextConfig(StrictModel):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    """What the answer must be: `text`, `json_object`, or `json_schema` with its schema."""
    verbosity: allow_only("medium") = None  # type: ignore[valid-type]


class ResponseBody(Body):
    """A request to `/v1/responses`."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1)]
    """The user's turn, or all turns."""
    instructions: str | None = None
    """A system message before them."""
    max_output_tokens: TokenLimit | None = None
    """The most tokens of the answer; without a limit it may fill the model's context."""
    top_logprobs: NumTopLogprobs | None = None
    """Return the log probabilities of this many likeliest tokens; needs `include`."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """`message.output_text.logprobs`: return the log probability of each token. `reasoning.encrypted_content`:
    accepted; there is no reasoning."""
    store: bool | None = None
    """Keep the response, so that it can be read again and gone on from; so it is unless this is false."""
    background: bool | None = None
    """Answer at once, and generate meanwhile: the response is read later by its id. Needs `store`."""
    previous_response_id: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """The turns of this response, and of those before it, come before `input`; not its `instructions`."""
    text: TextConfig | None = None
    tools: Refused = None
    tool_choice: allow_only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None
    """Accepted; there are no tools."""
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Accepted; there are no tools."""
    truncation: allow_only("disabled") = None  # type: ignore[valid-type]
    reasoning: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    context_management: Refused = None
    moderation: Refused = None

    @model_validator(mode="after")
    def _check(self) -> "ResponseBody":
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f"'top_logprobs' needs {INCLUDE_LOGPROBS!r} in 'include'")
        if self.background and self.store is False:
            raise ValueError("'background' needs 'store'")
        return self

    def make_items(self) -> list[dict[str, Any]]:
        """Return the items of `input` as JSON data."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(mode="json", exclude_unset=True) for item in self.input]

    def add_history(self, history: Sequence[dict[str, Any]]) -> "ResponseBody":
        """Return the body with these items, inputs and outputs of earlier responses, before its own."""
        return self.model_copy(update={"input": _ITEMS.validate_python([*history, *self.make_items()])})

    def grammar_readers(self) -> dict[str, GrammarReader]:
        """Return what reads the grammar of each parameter that may have one. They raise `InvalidRequest`."""
        text_format = None if self.text is None else self.text.format
        return {"text.format": partial(from_text_format, text_format)} | super().grammar_readers()

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log probability of each token is to be returned."""
        return INCLUDE_LOGPROBS in (self.include or ())


_ITEMS = TypeAdapter(list[InputItem])


class OutputText(BaseModel):
    """The text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprobs] = []


class OutputMessage(BaseModel):
    """The message of the answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Those whose KV was found and not computed."""
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Details of the answer's tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why the answer is cut short."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class Response(BaseModel):
    """The answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: ResponseStatus
    background: bool = False
    output: list[OutputMessage]
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    service_tier: str
    store: bool = False
    temperature: float
    text: dict[str, dict[str, Any]] = {"format": {"type": "text"}}
    tool_choice: Literal["auto"] = "auto"
    tools: list[None] = []
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None


class ResponsesEndpoint(Endpoint[ResponseBody]):
    """`/v1/responses`."""

    path = "/v1/responses"
    id_prefix = "resp_"
    prompt_field = "input"
    body_model = ResponseBody
    answer_model = Response

    def make_requests(self, body: ResponseBody, request_id: str) -> list[SubmitArgs]:
        """Return one request."""
        num_logprobs = body.top_logprobs or 0 if body.wants_logprobs else None
        return make_chat_requests(body, request_id, _make_turns(body), body.max_output_tokens, num_logprobs)

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> Response:
        """Return the whole answer."""
        (answer,) = answers
        logprobs, is_cut = encode_answer_logprobs(answer), finish_reason(answer) == "length"
        return _make_ended_response(meta, answer.text, logprobs, is_cut, answer.usage)

    def make_chunks(self, meta: StreamMeta) -> "ResponseChunks":
        """Return the maker of the answer's stream."""
        return ResponseChunks(meta)


RESPONSES = ResponsesEndpoint()


def _make_turns(body: ResponseBody) -> Sequence[dict[str, str]]:
    turns = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    for position, item in enumerate(body.input):
        text = join_text_parts(item.content, f"input.{position}.content", TEXT_PART_TYPES)
        turns.append({"role": ROLES[item.role], "content": text})
    if not turns:
        raise unsupported_value("input", "an empty input is not supported by this server.")
    return turns


def _make_response(meta: StreamMeta, status: ResponseStatus) -> Response:
    options = meta.options
    given = {
        name: options[name]
        for name in (
            "background", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
            "previous_response_id", "top_logprobs", "user",
        )
        if options.get(name) is not None
    }  # fmt: skip
    if text_format := (options.get("text") or {}).get("format"):
        given["text"] = {"format": text_format}
    return Response(
        id=meta.id,
        created_at=meta.created,
        model=meta.model,
        status=status,
        output=[],
        service_tier=meta.service_tier,
        store=meta.input_items is not None,
        temperature=1.0 if options.get("temperature") is None else options["temperature"],
        top_p=1.0 if options.get("top_p") is None else options["top_p"],
        **given,
    )


def make_unfinished_response(meta: StreamMeta, status: ResponseStatus) -> Response:
    """Return a response that has no output yet."""
    return _make_response(meta, status)


def make_response(meta: StreamMeta, events: Sequence[Event]) -> Response:
    """Return the response of a whole log, also of one that ends with an error."""
    end = events[-1]
    assert isinstance(end, EndEvent), "the log is whole"
    if end.error is None:
        return RESPONSES.make_answer(meta, [build_answer(meta.id, events)])
    if end.error.code == "cancelled":
        response = _make_response(meta, "cancelled")
    else:
        response = _make_response(meta, "failed")
        detail = to_api_error(end.error.to_exception(), ResponsesEndpoint.prompt_field).body.error
        response.error = ResponseError(code=detail.code or "server_error", message=detail.message)
    response.usage = _make_usage(end.usage)
    return response


def describe_input_items(meta: StreamMeta) -> list[dict[str, Any]]:
    """Return what a response was asked, as it is listed: each item has an id, and a message's text lies in parts."""
    items = []
    for number, given in enumerate(meta.input_items or ()):
        item_id = given.get("id") or f"{_make_item_id(meta)}_{number}"
        item = {"type": "message", "status": "completed"} | {k: v for k, v in given.items() if v is not None}
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append(item | {"id": item_id})
    return items


def _make_item_id(meta: StreamMeta) -> str:
    return "msg_" + meta.id.removeprefix(ResponsesEndpoint.id_prefix)


def _make_item(meta: StreamMeta, text: str, logprobs: list[dict[str, Any]], is_cut: bool) -> OutputMessage:
    content = OutputText(text=text, logprobs=[TokenLogprobs.model_validate(one) for one in logprobs])
    return OutputMessage(id=_make_item_id(meta), status="incomplete" if is_cut else "completed", content=[content])


def _make_ended_response(
    meta: StreamMeta, text: str, logprobs: list[dict[str, Any]], is_cut: bool, usage: Usage
) -> Response:
    response = _make_response(meta, "incomplete" if is_cut else "completed")
    response.output = [_make_item(meta, text, logprobs, is_cut)]
    response.incomplete_details = IncompleteDetails() if is_cut else None
    response.usage = _make_usage(usage)
    return response


def _make_usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


class ResponseChunks:
    """A stream. A token's sequence number follows from its position: it is the same for readers that resume."""

    def __init__(self, meta: StreamMeta) -> None:
        self._meta = meta
        self._item_fields = {"output_index": 0, "item_id": _make_item_id(meta)}
        self._template = JsonTemplate(
            _event_fields("output_text.delta", PLACEHOLDER, **self._delta_fields(PLACEHOLDER, []))
        )
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._num_tokens = 0
        self._end = EndEvent(finish_reason="stop")

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return the response, its one item, and that item's one part."""
        response = _make_response(self._meta, "in_progress").model_dump()
        item = _make_item(self._meta, "", [], is_cut=False).model_dump() | {"status": "in_progress", "content": []}
        part = OutputText(text="").model_dump()
        return [
            self._make_event("s1", "created", 0, response=response),
            self._make_event("s2", "in_progress", 1, response=response),
            self._make_event("s3", "output_item.added", 2, output_index=0, item=item),
            self._make_event("s4", "content_part.added", 3, **self._item_fields, content_index=0, part=part),
        ]

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return a token's text, with its log probability if that was asked for."""
        number = 4 + self._num_tokens
        self._num_tokens += 1
        logprobs = [] if event.logprobs is None else [encode_logprobs(event.logprobs, event.token)]
        self._texts.append(event.text)
        self._logprobs += logprobs
        if logprobs:
            return [self._make_event(event.id, "output_text.delta", number, **self._delta_fields(event.text, logprobs))]
        return [self._make_text_delta(event.id, number, event.text)] if event.text else []

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Return the whole part and the whole item."""
        self._end, number = event, 4 + self._num_tokens
        self._texts.append(event.text)
        text, is_cut = "".join(self._texts), finish_reason(event) == "length"
        item = _make_item(self._meta, text, self._logprobs, is_cut)
        logprobs, part = self._logprobs, item.content[0].model_dump()
        fields = {**self._item_fields, "content_index": 0}
        return [
            *([self._make_text_delta("e1", number, event.text)] if event.text else []),
            self._make_event("e2", "output_text.done", number + 1, **fields, text=text, logprobs=logprobs),
            self._make_event("e3", "content_part.done", number + 2, **fields, part=part),
            self._make_event("e4", "output_item.done", number + 3, output_index=0, item=item.model_dump()),
        ]

    def end_stream(self) -> list[SseEvent]:
        """Return the whole response."""
        end, is_cut = self._end, finish_reason(self._end) == "length"
        response = _make_ended_response(self._meta, "".join(self._texts), self._logprobs, is_cut, end.usage)
        number = 4 + self._num_tokens + 4
        return [self._make_event(DONE_ID, response.status, number, response=response.model_dump())]

    def _make_text_delta(self, position: str, number: int, text: str) -> SseEvent:
        return SseEvent(position, self._template.fill_in(number, text), "response.output_text.delta", number)

    def _delta_fields(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._item_fields, "content_index": 0, "delta": text, "logprobs": logprobs}

    def _make_event(self, position: str, kind: str, number: int, **data: Any) -> SseEvent:
        return SseEvent(position, encode_json(_event_fields(kind, number, **data)), f"response.{kind}", number)


def _event_fields(kind: str, number: int | str, **data: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": number, **data}
