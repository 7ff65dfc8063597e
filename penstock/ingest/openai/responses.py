"""`/v1/responses`: text in, text out. Nothing is kept for a later turn but the stream itself."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from penstock.client.core import Answer
from penstock.ingest.openai.body import Body, OptionsOfStream, Refused, Strict, only, parse, text_schema, unsupported
from penstock.ingest.openai.chat import ROLES, text_of, tier
from penstock.ingest.openai.endpoint import Ask, Card, ask_of
from penstock.ingest.openai.sse import DONE, HOLE, Form, Piece, as_json
from penstock.ingest.openai.tokens import TokenLogprobs, logprobs_entry
from penstock.messages import EndEvent, TokenEvent, Usage

TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"


class InputItem(Strict):
    """One turn."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, Any]], text_schema(*TEXTS)]
    """Text, or a list of parts of type `input_text` or `output_text`."""
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextConfig(Strict):
    """How the answer is to look: as plain text."""

    format: only({"type": "text"}) = None  # type: ignore[valid-type]
    verbosity: only("medium") = None  # type: ignore[valid-type]


class ResponseBody(Body):
    """What is asked of `/v1/responses`."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputItem], Field(min_length=1)]
    """The user's turn, or all turns."""
    instructions: str | None = None
    """A turn of the system before them."""
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The most tokens of the answer; without a limit it may fill the model's context."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """The log probabilities of so many likeliest tokens; needs `include`."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """`message.output_text.logprobs`: tell the log probability of each token. `reasoning.encrypted_content`: accepted;
    there is no reasoning."""
    stream_options: OptionsOfStream = None
    store: bool | None = None
    """Accepted: the response can be read again for a while in any case."""
    text: TextConfig | None = None
    tools: Refused = None
    tool_choice: only("none", "auto") = None  # type: ignore[valid-type]
    parallel_tool_calls: bool | None = None
    """Accepted; there are no tools."""
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Accepted; there are no tools."""
    truncation: only("disabled") = None  # type: ignore[valid-type]
    reasoning: Refused = None
    background: Refused = None
    conversation: Refused = None
    previous_response_id: Refused = None
    prompt: Refused = None
    context_management: Refused = None
    moderation: Refused = None

    @model_validator(mode="after")
    def _check(self) -> "ResponseBody":
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f"'top_logprobs' needs {LOGPROBS!r} in 'include'")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log probability of each token is to be told."""
        return LOGPROBS in (self.include or ())


class OutputText(BaseModel):
    """The text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprobs] = []


class OutputMessage(BaseModel):
    """The answer's turn."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int
    """Those whose KV was found, not computed."""
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Of the answer's tokens."""

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


class Response(BaseModel):
    """The answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[OutputMessage]
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    service_tier: str
    store: bool = False
    temperature: float
    text: dict[str, dict[str, str]] = {"format": {"type": "text"}}
    tool_choice: Literal["auto"] = "auto"
    tools: list[None] = []
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None


class Responses:
    """`/v1/responses`."""

    path = "/v1/responses"
    prefix = "resp_"
    prompt = "input"
    body = ResponseBody
    answer = Response

    def parse(self, raw: bytes | dict[str, Any]) -> ResponseBody:
        """The body, or `ApiError` 400."""
        return parse(ResponseBody, raw)

    def asks(self, body: ResponseBody, request_id: str) -> list[Ask]:
        """One request."""
        fields = body.fields()
        fields["messages"] = list(_turns(body))
        if body.max_output_tokens is not None:
            fields["max_tokens"] = body.max_output_tokens
        if body.wants_logprobs:
            fields["logprobs"] = body.top_logprobs or 0
        body.end_with_context(fields)
        return [ask_of(fields, body.seed_of(0), request_id)]

    def whole(self, card: Card, answers: Sequence[Answer]) -> Response:
        """The answer as a whole."""
        (answer,) = answers
        pairs = zip(answer.logprobs, answer.token_ids, strict=True) if answer.logprobs else ()
        told = [logprobs_entry(one, token) for one, token in pairs]
        return _ended(card, answer.text, told, answer.finish_reason == "length", answer.usage)

    def chunks(self, card: Card) -> "ResponseChunks":
        """The answer in pieces."""
        return ResponseChunks(card)


RESPONSES = Responses()


def _turns(body: ResponseBody) -> Sequence[dict[str, str]]:
    turns = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*turns, {"role": "user", "content": body.input}]
    for place, item in enumerate(body.input):
        text = text_of(item.content, f"input.{place}.content", TEXTS)
        turns.append({"role": ROLES[item.role], "content": text})
    if not turns:
        raise unsupported("input", "an empty input is not supported by this server.")
    return turns


def _response(card: Card, status: Literal["in_progress", "completed", "incomplete"]) -> Response:
    options = card.options
    given = {
        name: options[name]
        for name in (
            "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "top_logprobs", "user",
        )
        if options.get(name) is not None
    }  # fmt: skip
    return Response(
        id=card.id,
        created_at=card.created,
        model=card.model,
        status=status,
        output=[],
        service_tier=tier(card),
        temperature=1.0 if options.get("temperature") is None else options["temperature"],
        top_p=1.0 if options.get("top_p") is None else options["top_p"],
        **given,
    )


def begun(card: Card) -> Response:
    """A response that is not there yet."""
    return _response(card, "in_progress")


def _item_id(card: Card) -> str:
    return "msg_" + card.id.removeprefix(Responses.prefix)


def _item(card: Card, text: str, told: list[dict[str, Any]], is_cut: bool) -> OutputMessage:
    content = OutputText(text=text, logprobs=[TokenLogprobs.model_validate(one) for one in told])
    return OutputMessage(id=_item_id(card), status="incomplete" if is_cut else "completed", content=[content])


def _ended(card: Card, text: str, told: list[dict[str, Any]], is_cut: bool, usage: Usage) -> Response:
    response = _response(card, "incomplete" if is_cut else "completed")
    response.output = [_item(card, text, told, is_cut)]
    response.incomplete_details = IncompleteDetails() if is_cut else None
    response.usage = ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
    return response


class ResponseChunks:
    """Its events. A token's number is its position after the four events before it: the same for whoever resumes."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._where = {"output_index": 0, "item_id": _item_id(card)}
        self._text = Form(_event("output_text.delta", HOLE, **self._delta(HOLE, [])))
        self._texts: list[str] = []
        self._told: list[dict[str, Any]] = []
        self._num_tokens = 0
        self._end = EndEvent(finish_reason="stop")

    def open(self, index: int) -> list[Piece]:
        """The response, its one item, and that item's one part."""
        response = _response(self._card, "in_progress").model_dump()
        item = _item(self._card, "", [], is_cut=False).model_dump() | {"status": "in_progress", "content": []}
        part = OutputText(text="").model_dump()
        return [
            self._piece("s1", "created", 0, response=response),
            self._piece("s2", "in_progress", 1, response=response),
            self._piece("s3", "output_item.added", 2, output_index=0, item=item),
            self._piece("s4", "content_part.added", 3, **self._where, content_index=0, part=part),
        ]

    def token(self, index: int, event: TokenEvent) -> list[Piece]:
        """A token's text, and its log probability where that was asked for."""
        number = 4 + self._num_tokens
        self._num_tokens += 1
        told = [] if event.logprobs is None else [logprobs_entry(event.logprobs, event.token)]
        self._texts.append(event.text)
        self._told += told
        if told:
            return [self._piece(event.id, "output_text.delta", number, **self._delta(event.text, told))]
        return [self._said(event.id, number, event.text)] if event.text else []

    def end(self, index: int, event: EndEvent) -> list[Piece]:
        """The whole of the part and of the item."""
        self._end, number = event, 4 + self._num_tokens
        self._texts.append(event.text)
        text, is_cut = "".join(self._texts), event.finish_reason == "length"
        item = _item(self._card, text, self._told, is_cut)
        told, part = self._told, item.content[0].model_dump()
        where = {**self._where, "content_index": 0}
        return [
            *([self._said("e1", number, event.text)] if event.text else []),
            self._piece("e2", "output_text.done", number + 1, **where, text=text, logprobs=told),
            self._piece("e3", "content_part.done", number + 2, **where, part=part),
            self._piece("e4", "output_item.done", number + 3, output_index=0, item=item.model_dump()),
        ]

    def close(self) -> list[Piece]:
        """The whole of the response."""
        end, is_cut = self._end, self._end.finish_reason == "length"
        response = _ended(self._card, "".join(self._texts), self._told, is_cut, end.usage)
        number = 4 + self._num_tokens + 4
        return [self._piece(DONE, response.status, number, response=response.model_dump())]

    def _said(self, place: str, number: int, text: str) -> Piece:
        return Piece(place, self._text.filled(number, text), "response.output_text.delta")

    def _delta(self, text: str, told: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._where, "content_index": 0, "delta": text, "logprobs": told}

    def _piece(self, place: str, kind: str, number: int, **data: Any) -> Piece:
        return Piece(place, as_json(_event(kind, number, **data)), f"response.{kind}")


def _event(kind: str, number: int | str, **data: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": number, **data}
