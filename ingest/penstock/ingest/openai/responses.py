"""`/v1/responses`. The caller prepends stored turns to the body."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from penstock.client.core import Answer, Event, build_answer
from penstock.grammar.spec import from_text_format
from penstock.grammar.tools import ConstrainedCalls
from penstock.ingest.errors import to_api_error
from penstock.ingest.ignored import HOSTED_TOOLS
from penstock.ingest.openai.body import (
    UNSUPPORTED_CODE,
    Body,
    GrammarReader,
    Metadata,
    NumTopLogprobs,
    Refused,
    ShortText,
    StrictModel,
    TokenLimit,
    allow_only,
    unsupported_value,
)
from penstock.ingest.openai.client_tools import CLIENT_TOOLS
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta, SubmitArgs, make_chat_requests
from penstock.ingest.openai.response_items import (
    ID_PREFIX,
    ITEMS,
    ChatTurns,
    Input,
    InputItem,
    InputReference,
    InputTools,
    OutputBuilder,
    OutputItem,
    ToldEvent,
    make_item_id,
)
from penstock.ingest.openai.response_tools import OfferedTool, ResponseTool, ToolNamespace
from penstock.ingest.openai.sse import (
    DONE_ID,
    PLACEHOLDER,
    JsonTemplate,
    SseEvent,
    encode_json,
    make_token_positions,
)
from penstock.ingest.openai.tokens import encode_answer_logprobs, encode_logprobs, finish_reason
from penstock.ingest.openai.tools import (
    MAX_TOOLS,
    TOOL_CHOICE,
    CallChoice,
    ChoiceMode,
    ReasoningEffort,
    TemplateVariables,
    ToolName,
    check_tool_options,
    constrain_functions,
    make_template_variables,
    qualify_name,
    refuse_other_grammar_with_tools,
)
from penstock.messages import EndEvent, TokenEvent, Usage

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
INCLUDE_LOGPROBS = "message.output_text.logprobs"


class NamedResponseTool(StrictModel):
    """The tool that is to be called."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: Annotated[ToolName | None, Field(exclude_if=lambda namespace: namespace is None)] = None
    """The namespace that it is in, if it is in one."""

    @property
    def qualified_name(self) -> str:
        """The name by which the model knows it."""
        return qualify_name(self.name, self.namespace)


class AllowedResponseTools(StrictModel):
    """The tools that may be called. The model is told of the others, too."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """`required`: one of them is called."""
    tools: Annotated[list[NamedResponseTool], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Annotated[
    Annotated[ChoiceMode, Tag("tagged-mode")]
    | Annotated[NamedResponseTool, Tag("tagged-function")]
    | Annotated[NamedResponseTool, Tag("tagged-custom")]
    | Annotated[AllowedResponseTools, Tag("tagged-allowed_tools")],
    TOOL_CHOICE,
]


def _read_choice(choice: Any) -> Any:
    """Return a choice in which a tool that the client runs is a function of its name.

    A choice that demands a hosted tool, or allows no tools but those, which were left out, is refused.
    """
    if not isinstance(choice, dict):
        return choice
    if str(choice.get("type")) in HOSTED_TOOLS or choice.get("tools") == []:
        what = "this server has no hosted tools: send 'auto', or a function by its name."
        raise PydanticCustomError(UNSUPPORTED_CODE, what)
    if isinstance(allowed := choice.get("tools"), list):
        choice = choice | {"tools": [_read_choice(one) for one in allowed]}
    is_client_tool = choice.keys() == {"type"} and str(choice["type"]) in CLIENT_TOOLS
    return {"type": "function", "name": choice["type"]} if is_client_tool else choice


class ReasoningConfig(StrictModel):
    """How the model thinks before it answers."""

    effort: ReasoningEffort | None = None
    """Given to the chat template, which must have it as `reasoning_effort`; `none` may be sent to any model."""
    context: allow_only("auto") = None  # type: ignore[valid-type]
    mode: allow_only("standard") = None  # type: ignore[valid-type]


class TextConfig(StrictModel):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    """The form of the answer: `text`, `json_object`, or `json_schema` with its schema."""


class ResponseBody(Body):
    """A request to `/v1/responses`."""

    input: Input
    """The user's turn, or all turns, with calls and their results."""
    instructions: str | None = None
    """A system message before them."""
    max_output_tokens: TokenLimit | None = None
    """The most tokens of the answer; without a limit it may fill the model's context."""
    top_logprobs: NumTopLogprobs | None = None
    """Return the log probabilities of this many likeliest tokens; needs `include`."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """`message.output_text.logprobs`: return the log probability of each token of the text.
    `reasoning.encrypted_content`: accepted; reasoning is returned as it is."""
    store: bool | None = None
    """Keep the response, so that it can be read again and gone on from; so it is unless this is false."""
    background: bool | None = None
    """Answer at once, and generate meanwhile: the response is read later by its id. Needs `store`."""
    previous_response_id: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    """The turns of this response, and of those before it, come before `input`; not its `instructions`."""
    metadata: Metadata | None = None
    """Returned with the response, as the next three."""
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    safety_identifier: ShortText | None = None
    user: ShortText | None = None
    text: TextConfig | None = None
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    """The tools that the model may call. It must have a response template, to tell its calls from text."""
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_read_choice)] = None
    """`none`: the model is not told of the tools. `required`: it calls one or several; with a name that one, once;
    `allowed_tools`: it calls none but these."""
    parallel_tool_calls: bool | None = None
    """`false`: at most one call."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the model's chat template; one that it does not have is an error."""
    reasoning: ReasoningConfig | None = None
    conversation: Refused = None
    prompt: Refused = None
    access_programs: Refused = None
    moderation: Refused = None

    @model_validator(mode="after")
    def _check(self) -> "ResponseBody":
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f"'top_logprobs' needs {INCLUDE_LOGPROBS!r} in 'include'")
        if self.background and self.store is False:
            raise ValueError("'background' needs 'store'")
        body = self if isinstance(self.input, str) else self._add_tools(self.input)
        names = [tool.name for tool in body.offered_tools]
        check_tool_options(names, self.call_choice, self.chat_template_kwargs)
        return body

    def _add_tools(self, items: Sequence[InputItem]) -> "ResponseBody":
        """Return the body with the tools that its items add."""
        tools = list(self.tools or ())
        for item in items:
            tools += [tool for tool in item.tools if tool not in tools] if isinstance(item, InputTools) else []
        return self if len(tools) == len(self.tools or ()) else self.model_copy(update={"tools": tools})

    @property
    def call_choice(self) -> CallChoice:
        """The choice that `tool_choice` and `parallel_tool_calls` make."""
        choice, is_single = self.tool_choice, self.parallel_tool_calls is False
        if isinstance(choice, NamedResponseTool):
            return CallChoice(True, [choice.qualified_name], True)
        if isinstance(choice, AllowedResponseTools):
            names = [tool.qualified_name for tool in choice.tools]
            return CallChoice(choice.mode == "required", names, is_single)
        return CallChoice(choice == "required", None, is_single)

    def hold_calls(self, template: Mapping[str, Any]) -> ConstrainedCalls | None:
        """Return what holds answers with calls, by the model's response template; None where they are free.

        Raises `InvalidRequest` if the model's calls cannot be held, and `ApiError` 400.
        """
        return constrain_functions(template, self.offered_tools, self.call_choice, self)

    @property
    def offered_tools(self) -> list[ResponseTool]:
        """The tools of which the model is told, under the names by which it knows them."""
        offered = list[ResponseTool]()
        for tool in [] if self.tool_choice == "none" else self.tools or []:
            if isinstance(tool, ToolNamespace):
                offered += [
                    member.model_copy(update={"name": qualify_name(member.name, tool.name)}) for member in tool.tools
                ]
            else:
                offered.append(tool if isinstance(tool, ResponseTool) else tool.make_function())
        return offered

    def make_items(self) -> list[dict[str, Any]]:
        """Return the items of `input` as JSON data."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(mode="json", exclude_unset=True) for item in self.input]

    def make_turns(self, *, sees: bool = False) -> list[dict[str, Any]]:
        """Return the turns of the chat, with pictures where the model `sees`. Raises `ApiError` 400."""
        made = ChatTurns(self.instructions, sees=sees)
        if isinstance(self.input, str):
            return [*made.turns, {"role": "user", "content": self.input}]
        made.add_items(self.input)
        if not made.turns:
            raise unsupported_value("input", "an empty input is not supported by this server.")
        return made.turns

    def add_history(self, history: Sequence[dict[str, Any]]) -> "ResponseBody":
        """Return the body with these items, inputs and outputs of earlier responses, before its own."""
        own = ITEMS.validate_python(self.make_items()) if isinstance(self.input, str) else self.input
        earlier = ITEMS.validate_python(history)
        return self._add_tools(earlier).model_copy(update={"input": [*earlier, *own]})

    @property
    def references(self) -> list[str]:
        """The ids of the items of earlier responses that `input` names."""
        return [item.id for item in self.input if isinstance(item, InputReference)]

    def replace_references(self, items: Mapping[str, dict[str, Any]]) -> "ResponseBody":
        """Return the body with the items that have these ids in place of what names them."""
        found = dict(zip(items, ITEMS.validate_python(list(items.values())), strict=True))
        own = [found[item.id] if isinstance(item, InputReference) else item for item in self.input]
        return self._add_tools(list(found.values())).model_copy(update={"input": own})

    def grammar_readers(self) -> dict[str, GrammarReader]:
        """Return what reads the grammar of each parameter that may have one. They raise `InvalidRequest`."""
        text_format = None if self.text is None else self.text.format
        return {"text.format": partial(from_text_format, text_format)} | super().grammar_readers()

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log probability of each token is to be returned."""
        return INCLUDE_LOGPROBS in (self.include or ())


class InputTokensDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Those whose KV was found and not computed."""
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """Details of the answer's tokens."""

    reasoning_tokens: int = 0
    """Those of `reasoning` items."""


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
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
    completed_at: int | None = None
    """When it was completed, in seconds since the epoch."""
    model: str
    status: ResponseStatus
    background: bool = False
    output: list[Annotated[OutputItem, Field(discriminator="type")]]
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    frequency_penalty: float = 0.0
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, str | None] = {"effort": None, "summary": None}
    safety_identifier: str | None = None
    service_tier: str
    store: bool = False
    temperature: float
    text: dict[str, dict[str, Any]] = {"format": {"type": "text"}}
    tool_choice: ToolChoice = "auto"
    tools: list[OfferedTool] = []
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None


class ResponsesEndpoint(ApiEndpoint[ResponseBody]):
    """`/v1/responses`."""

    path = "/v1/responses"
    id_prefix = ID_PREFIX
    prompt_field = "input"
    body_model = ResponseBody
    answer_model = Response
    tool_schema = "tools.*.parameters"
    parses_answers = True

    def make_requests(self, body: ResponseBody, request_id: str, *, sees: bool = False) -> list[SubmitArgs]:
        """Return one request."""
        refuse_other_grammar_with_tools(body, body.offered_tools)
        num_logprobs = body.top_logprobs or 0 if body.wants_logprobs else None
        requests = make_chat_requests(
            body, request_id, body.make_turns(sees=sees), body.max_output_tokens, num_logprobs
        )
        effort = None if body.reasoning is None else body.reasoning.effort
        if variables := make_template_variables(body.chat_template_kwargs, effort, body.offered_tools):
            requests[0]["chat_template_kwargs"] = variables
        return requests

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> Response:
        """Return the whole answer."""
        (answer,) = answers
        output, rest = OutputBuilder(meta), answer.text
        if output.is_parsed or answer.logprobs:
            logprobs = encode_answer_logprobs(answer)
            for number, text in enumerate(answer.token_texts):
                output.add_token(text, logprobs[number : number + 1])
            rest = answer.text[sum(map(len, answer.token_texts)) :]
        is_cut = finish_reason(answer) == "length"
        output.end(rest, is_cut=is_cut)
        return _make_ended_response(meta, output, answer, is_cut=is_cut)

    def make_chunks(self, meta: StreamMeta) -> "ResponseChunks":
        """Return the maker of the answer's stream."""
        return ResponseChunks(meta)


RESPONSES = ResponsesEndpoint()


def _make_response(meta: StreamMeta, status: ResponseStatus) -> Response:
    options = meta.options
    given = {
        name: options[name]
        for name in (
            "background", "frequency_penalty", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
            "parallel_tool_calls", "presence_penalty", "previous_response_id", "prompt_cache_key", "safety_identifier",
            "tool_choice", "tools", "top_logprobs", "user",
        )
        if options.get(name) is not None
    }  # fmt: skip
    if text_format := (options.get("text") or {}).get("format"):
        given["text"] = {"format": text_format}
    if effort := (options.get("reasoning") or {}).get("effort"):
        given["reasoning"] = {"effort": effort, "summary": None}
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
    response = _make_response(meta, read_final_status(end))
    if end.error.code != "cancelled":
        detail = to_api_error(end.error.to_exception(), ResponsesEndpoint.prompt_field).body.error
        response.error = ResponseError(code=detail.code or "server_error", message=detail.message)
    response.usage = _make_usage(end.usage, 0)
    return response


def read_final_status(end: EndEvent) -> Literal["completed", "incomplete", "cancelled", "failed"]:
    """Return the status of a response that ended so."""
    if end.error is None:
        return "incomplete" if finish_reason(end) == "length" else "completed"
    return "cancelled" if end.error.code == "cancelled" else "failed"


def describe_input_items(meta: StreamMeta) -> list[dict[str, Any]]:
    """Return what a response was asked, as it is listed: each item has an id, and a message's text lies in parts."""
    items = []
    for given in identify_input_items(meta):
        item = {"type": "message", "status": "completed"} | {k: v for k, v in given.items() if v is not None}
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append(item)
    return items


def identify_input_items(meta: StreamMeta) -> list[dict[str, Any]]:
    """Return what a response was asked, each item with its id."""
    return [
        given | {"id": given.get("id") or make_item_id(meta, given.get("type") or "message", f"in_{number}")}
        for number, given in enumerate(meta.input_items or ())
    ]


def _make_ended_response(meta: StreamMeta, output: OutputBuilder, end: Answer | EndEvent, *, is_cut: bool) -> Response:
    response = _make_response(meta, "incomplete" if is_cut else "completed")
    response.output = output.items
    response.incomplete_details = IncompleteDetails() if is_cut else None
    response.completed_at = None if is_cut else int(end.timings.finished or meta.created)
    response.usage = _make_usage(end.usage, output.num_reasoning_tokens)
    return response


def _make_usage(usage: Usage, num_reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


class ResponseChunks:
    """A stream. Its events follow from the log and are counted from its beginning: readers that resume see the same."""

    def __init__(self, meta: StreamMeta) -> None:
        self._meta, self._output = meta, OutputBuilder(meta)
        self._num_events = 0
        self._end = EndEvent(finish_reason="stop")
        self._template: tuple[str, JsonTemplate] | None = None
        """For the deltas of the item with this id."""

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return the response without output."""
        response = _make_response(self._meta, "in_progress").model_dump()
        told = [("created", {"response": response}), ("in_progress", {"response": response})]
        return self._number_events(("s1", "s2"), told)

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return what a token tells, with log probabilities if they were asked for."""
        logprobs = [] if event.logprobs is None else [encode_logprobs(event.logprobs, event.token)]
        told = self._output.add_token(event.text, logprobs)
        return self._number_events(make_token_positions(event.id, len(told)), told)

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Return what was held back, and the end of the last item."""
        self._end = event
        told = self._output.end(event.text, is_cut=finish_reason(event) == "length")
        return self._number_events([f"e{number}" for number in range(1, len(told) + 1)], told)

    def end_stream(self) -> list[SseEvent]:
        """Return the whole response."""
        is_cut = finish_reason(self._end) == "length"
        response = _make_ended_response(self._meta, self._output, self._end, is_cut=is_cut)
        return self._number_events((DONE_ID,), [(response.status, {"response": response.model_dump()})])

    def _number_events(self, positions: Iterable[str], told: Sequence[ToldEvent]) -> list[SseEvent]:
        events = []
        for position, (kind, data) in zip(positions, told, strict=True):
            encoded = self._encode_event(kind, self._num_events, data)
            events.append(SseEvent(position, encoded, f"response.{kind}", self._num_events))
            self._num_events += 1
        return events

    def _encode_event(self, kind: str, number: int, data: dict[str, Any]) -> str:
        if kind != "output_text.delta" or data["logprobs"]:
            return encode_json({"type": f"response.{kind}", "sequence_number": number, **data})
        if self._template is None or self._template[0] != data["item_id"]:
            fields = {"type": f"response.{kind}", "sequence_number": PLACEHOLDER, **data, "delta": PLACEHOLDER}
            self._template = data["item_id"], JsonTemplate(fields)
        return self._template[1].fill_in(number, data["delta"])
