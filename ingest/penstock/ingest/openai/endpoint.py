"""The interface of all endpoints: one interface, used by the gateway's routes and by the batch runner.

body = endpoint.parse_body(raw)                     # ApiError 400, with the parameter's name
requests = endpoint.make_requests(body, request_id) # the arguments of `Client.submit`, one for each choice
meta = make_stream_meta(endpoint, body, request_id) # what is needed to make the answer of the results
endpoint.make_answer(meta, answers)                 # the body of the answer
endpoint.make_chunks(meta)                          # or its stream events
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from penstock.client.core import Answer, RequestFields, make_request
from penstock.errors import InvalidRequest
from penstock.grammar.tools import ENDPOINT_TEMPLATE, ConstrainedCalls, leave_schemas
from penstock.ingest.errors import ApiError, ErrorBody
from penstock.ingest.openai.answer_parser import CallsForm
from penstock.ingest.openai.body import Body, ModelBody, invalid_value, parse_body, unsupported_value
from penstock.ingest.openai.sse import SseEvent
from penstock.messages import MAX_LOGPROBS, ChatMessage, EndEvent, FunctionCall, Request, TokenEvent, ToolCall
from penstock.sealing import is_sealed, open_message, read_envelope, seal_message

B = TypeVar("B", bound=ModelBody)
Task = Literal["generate", "embed", "score"]
"""What a model does: it generates text, or computes a vector of each text, or scores texts by a query."""
NO_TOKEN_LIMIT = 2**31 - 1
"""As a limit of tokens: more than any context has."""
PROMPT_FIELDS = ("prompt", "messages", "token_ids", "chat_template_kwargs", "texts", "embed")
"""The fields of `SubmitArgs` that have the prompt."""


class SubmitArgs(RequestFields, total=False):
    """One request for the pipeline: `client.submit(**args)`."""

    prompt: str | None


class EarlierTurns(BaseModel):
    """The turns before a response."""

    model_config = ConfigDict(frozen=True)

    first_id: str
    """The id of the first response of the chain."""
    items: list[dict[str, Any]]
    """What each response of the chain was asked, and its output, in their order."""


class StreamMeta(BaseModel):
    """The data by which a gateway that never saw a request can stream its answer."""

    model_config = ConfigDict(frozen=True)

    id: str
    path: str
    """The endpoint's path."""
    model: str
    """The model's name in the body."""
    created: int
    """Seconds since the epoch."""
    request_ids: list[str]
    """The ids of the pipeline's requests, one for each choice."""
    options: dict[str, Any] = {}
    """The body without its prompt."""
    body_hash: str = ""
    """With an `Idempotency-Key`, a hash of all fields that determine the answer (`hash_answer_fields`)."""
    bodies: list[str] = []
    """The body hash of each of the pipeline's requests (`penstock.messages.EncodedRequest`). The request's
    record has the same, unless another producer used the id."""
    published: float = 0.0
    """When its requests were last published, in seconds since the epoch; 0: not known."""
    places: dict[str, str] = {}
    """Where the bus has the message of each request, by id; empty until that is noted."""
    pipeline: str = ""
    tenant: str = "default"
    response_template: dict[str, Any] | None = None
    """The model's, by which its answers are parsed; None: they are text."""
    calls: CallsForm = "free"
    """How its calls are written."""
    input_items: list[dict[str, Any]] | None = None
    """The input of a response, without the responses before it; None: it is not kept (`store`)."""
    earlier: EarlierTurns | None = None
    """The turns before a kept response; None: none, or it was kept by an earlier version, which did not copy them."""
    is_adopted: bool = False
    """Its home died, and this region answers it: its first tokens may have come from there."""
    is_lost_unread: bool = False
    """Its caller gave nothing by which to come back: it may be cancelled when nobody reads it."""

    @property
    def service_tier(self) -> str:
        """The service tier that answers."""
        return "flex" if self.options.get("service_tier") == "flex" else "default"

    @property
    def wants_usage(self) -> bool:
        """Whether the stream has the usage before its end."""
        return bool((self.options.get("stream_options") or {}).get("include_usage"))

    @property
    def choices_per_prompt(self) -> int:
        """How many choices each prompt has."""
        return self.options.get("n") or 1


class AnswerChunks(Protocol):
    """Makes the events of one stream. It is given all events from the beginning, in any order of the choices."""

    def open_choice(self, index: int) -> Sequence[SseEvent]:
        """Return the events before the first token of a choice."""

    def add_token(self, index: int, event: TokenEvent) -> Sequence[SseEvent]:
        """Return the events of a token."""

    def end_choice(self, index: int, event: EndEvent) -> Sequence[SseEvent]:
        """Return the events at the end of a choice."""

    def end_stream(self) -> Sequence[SseEvent]:
        """Return the events after the ends of all choices. The position of the last is `sse.DONE_ID`."""


class ApiEndpoint(ABC, Generic[B]):
    """An endpoint that makes requests."""

    path: str
    id_prefix: str
    """The prefix of its ids."""
    prompt_field: str
    """The parameter that has the prompt."""
    body_model: type[BaseModel]
    """The model of the body as it is sent."""
    answer_model: type[BaseModel]
    """The model of the whole answer."""
    error_model: type[BaseModel] = ErrorBody
    """The model of the body of an error."""
    tool_schema = "tools.*.function.parameters"
    """Where bodies have the schemas of tools."""
    task: Task = "generate"
    """What it asks of a model."""
    parses_answers = False
    """Whether it tells calls and reasoning from the text, where the model has a response template."""

    def parse_body(self, raw: bytes | dict[str, Any]) -> B:
        """Parse a body. Raises `ApiError` 400 that names the parameter."""
        return cast("B", parse_body(self.body_model, raw, self.path))

    def make_error_body(self, error: ApiError) -> BaseModel:
        """Return the body of an error."""
        return error.body

    @abstractmethod
    def make_requests(self, body: B, request_id: str, *, sees: bool = False) -> list[SubmitArgs]:
        """Return the pipeline's requests, one for each choice, in the order of their indices.

        Where the model `sees`, turns may have pictures as clients give them (`GivenPicture`), which the caller reads.

        The ids are `request_id`, or `request_id.0`, `.1`, … if there are several. The caller adds tenant, session
        and deadline. Raises `ApiError` 400.
        """

    @abstractmethod
    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> BaseModel:
        """Return the whole answer; `answers` are in the order of the requests."""

    @abstractmethod
    def make_chunks(self, meta: StreamMeta) -> AnswerChunks:
        """Return the maker of the answer's stream."""


class AnswerForm(NamedTuple):
    """By what the text of answers is parsed."""

    template: dict[str, Any] | None = None
    """The model's response template; None: answers are text."""
    calls: CallsForm = "free"
    """How calls are written."""
    loose_names: frozenset[str] = frozenset()
    """The tools whose schemas are held as far as they can be enforced."""


TEXT = AnswerForm()


def make_stream_meta(
    endpoint: ApiEndpoint[B],
    body: B,
    request_id: str,
    *,
    pipeline: str = "",
    tenant: str = "default",
    body_hash: str = "",
    input_items: list[dict[str, Any]] | None = None,
    earlier: EarlierTurns | None = None,
    form: AnswerForm = TEXT,
) -> StreamMeta:
    """Return the meta data of a new request, whose answers have the form that `use_response_template` returned."""
    return StreamMeta(
        id=request_id,
        path=endpoint.path,
        model=body.model,
        created=int(time.time()),
        request_ids=make_request_ids(request_id, body.num_choices),
        options=body.dump_options(),
        body_hash=body_hash,
        pipeline=pipeline,
        tenant=tenant,
        input_items=input_items,
        earlier=None if input_items is None else earlier,
        response_template=form.template,
        calls=form.calls,
    )


def hash_answer_fields(endpoint: ApiEndpoint[B], body: B) -> str:
    """Return a hash of the fields that determine the answer: all but how it is streamed, and where it is computed."""
    beside = {"stream", "stream_options", "session", "prompt_cache_key"}
    # An answer that has a field again is another one with another value.
    unhashed = beside - endpoint.answer_model.model_fields.keys()
    fields = body.model_dump(mode="json", exclude_unset=True, exclude=unhashed)
    return hashlib.sha256(json.dumps([endpoint.path, fields], sort_keys=True).encode()).hexdigest()


def use_response_template(
    endpoint: ApiEndpoint[B], body: B, requests: Sequence[SubmitArgs], template: dict[str, Any] | None
) -> AnswerForm:
    """Return the form of a body's answers, by the model's `template`, and have its requests tell all marks.

    Where calls are held to a grammar, the requests get it. An endpoint's worker writes the form of held calls in any
    case, and the grammar tells it which calls the answer may have.

    Without a template answers are text; so they are where a grammar says what they are and there are no tools. Raises
    `ApiError` 400 where tools were given to a model without one, or calls cannot be held.
    """
    has_tools, is_endpoints = bool(getattr(body, "offered_tools", None)), template == ENDPOINT_TEMPLATE
    if not endpoint.parses_answers or (body.find_grammar() is not None and not has_tools and not is_endpoints):
        return TEXT
    if template is None and getattr(body, "tools", None):
        raise unsupported_value("tools", "the model's tokenizer has no response template to tell calls from text by.")
    if template is None:
        return TEXT
    try:
        held = _hold_calls(body, template)
        grammar = None if held is None else held.make_spec()
    except InvalidRequest as error:
        raise invalid_value("tools", str(error)) from None
    if grammar is not None and getattr(body, "ignore_eos", None):
        raise invalid_value(
            "ignore_eos", "it cannot be used where calls follow a grammar: after its end nothing follows"
        )
    for args in requests:
        args["special_text"] = True
        if grammar is not None:
            args["grammar"] = grammar
    if is_endpoints or held is None:
        return AnswerForm(template, "held" if is_endpoints else "free")
    return AnswerForm(template, "held" if held.answer is None else "or_json", held.loose_names)


def _hold_calls(body: ModelBody, template: Mapping[str, Any]) -> ConstrainedCalls | None:
    """Return what holds a body's answers with calls. An endpoint has the schemas of tools with its question."""
    held = body.hold_calls(template)
    if template != ENDPOINT_TEMPLATE or held is None:
        return held
    return leave_schemas(held, len(getattr(body, "offered_tools", ())))


def name_loosened(endpoint: ApiEndpoint[Any], keywords: Sequence[str]) -> list[str]:
    """Return how the header `penstock-ignored` names keywords that were left out of the schemas of tools."""
    return [f"{endpoint.tool_schema}.{keyword}".removesuffix(".") for keyword in keywords]


def make_chat_requests(
    body: Body, request_id: str, turns: Sequence[dict[str, Any]], max_tokens: int | None, num_logprobs: int | None
) -> list[SubmitArgs]:
    """Return one request for each choice of a chat, of which `num_logprobs` likeliest tokens are returned, if any.

    Without a limit an answer may fill the context, and with log probabilities go up to their limit.
    """
    fields = body.request_fields()
    fields["messages"] = turns
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if num_logprobs is not None:
        fields["logprobs"] = num_logprobs
    if "max_tokens" not in fields:
        fields["max_tokens"] = NO_TOKEN_LIMIT if num_logprobs is None else MAX_LOGPROBS // (1 + num_logprobs)
        fields["fit_context"] = True
    ids = make_request_ids(request_id, body.num_choices)
    return [make_submit_args(fields, body.choice_seed(choice), choice_id) for choice, choice_id in enumerate(ids)]


def build_request(args: SubmitArgs) -> Request:
    """Return a request of the pipeline. Raises `InvalidRequest`.

    Its prompt is not validated again, as it is of a body that was: only the other fields are.
    """
    rest = cast("RequestFields", {name: value for name, value in args.items() if name not in PROMPT_FIELDS})
    prompt: dict[str, Any] = {name: value for name in PROMPT_FIELDS if (value := args.get(name)) is not None}
    if turns := args.get("messages"):
        prompt["messages"] = [turn if isinstance(turn, ChatMessage) else _build_turn(turn) for turn in turns]
    return make_request("-", rest).model_copy(update={"prompt": None, **prompt})


def _build_turn(turn: dict[str, Any]) -> ChatMessage:
    calls = [
        ToolCall.model_construct(**{**call, "function": FunctionCall.model_construct(**call["function"])})
        for call in turn.get("tool_calls", ())
    ]
    return ChatMessage.model_construct(**{**turn, **({"tool_calls": calls} if calls else {})})


def make_submit_args(fields: RequestFields, seed: RequestFields, request_id: str) -> SubmitArgs:
    """Return one choice's request; the caller adds the prompt unless it is a chat. Raises `ApiError` 400."""
    if (fields.get("min_tokens") or 0) > fields["max_tokens"]:
        message = f"'min_tokens' may be at most the limit of the answer, here {fields['max_tokens']}"
        raise ApiError(400, message, param="min_tokens", code="invalid_value")
    return cast("SubmitArgs", {**fields, **seed, "id": request_id})


def cap_open_answers(requests: Sequence[SubmitArgs], max_tokens: int | None) -> None:
    """Limit answers without a limit to `max_tokens` together, and to at least one token each."""
    for args in requests:
        if max_tokens is not None and "fit_context" in args:
            args["max_tokens"] = min(args["max_tokens"], max(1, max_tokens // len(requests)))


def make_request_ids(request_id: str, num_choices: int) -> list[str]:
    """Return the ids of the pipeline's requests of one HTTP request."""
    return [request_id] if num_choices == 1 else [f"{request_id}.{index}" for index in range(num_choices)]


def encode_meta(meta: StreamMeta) -> bytes:
    """Return meta data as JSON, sealed if its tenant has a key: it may have what a response was asked."""
    return seal_message("card", meta.tenant, meta.id, meta.model_dump_json().encode())


def decode_meta(stream_id: str | None, found: bytes) -> StreamMeta:
    """Return meta data from its JSON, of a stream or of any (None). Raises `ContentErased` and `TenantKeyMissing`, and
    `InvalidRequest` for that of another stream.
    """
    if is_sealed(found):
        body = read_envelope(found)
        if stream_id not in (None, body["id"]):
            raise InvalidRequest(f"the meta data of {stream_id} is another stream's")
        found = open_message(body, "card")
    return StreamMeta.model_validate_json(found)
