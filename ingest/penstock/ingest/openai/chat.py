"""`/v1/chat/completions`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)

from penstock.client.core import Answer
from penstock.grammar.tools import ConstrainedCalls
from penstock.ingest.openai.answer_parser import AnswerParser, AnswerPart
from penstock.ingest.openai.body import (
    IMAGE_SCHEMAS,
    CompletionsBody,
    NumTopLogprobs,
    Refused,
    ShortText,
    StrictModel,
    TokenLimit,
    allow_only,
    invalid_value,
    make_text_schema,
    unsupported_value,
)
from penstock.ingest.openai.completions import ChoicesAnswer, CompletionChunks, make_choices_answer
from penstock.ingest.openai.custom_tools import (
    CUSTOM,
    PlainFormat,
    TextGrammar,
    TextReader,
    list_custom_names,
    make_function,
    write_arguments,
)
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta, SubmitArgs, make_chat_requests
from penstock.ingest.openai.picture_parts import read_content
from penstock.ingest.openai.sse import SseEvent
from penstock.ingest.openai.tokens import TokenLogprobs, encode_answer_logprobs, encode_logprobs, finish_reason
from penstock.ingest.openai.tools import (
    MAX_TOOLS,
    ROLES,
    TOOL_CHOICE,
    CallChoice,
    ChoiceMode,
    FunctionKind,
    FunctionName,
    NamedTool,
    ReasoningEffort,
    TemplateVariables,
    ToolFunction,
    ToolName,
    check_tool_options,
    constrain_functions,
    make_call_id,
    make_parser,
    make_template_variables,
    refuse_other_grammar_with_tools,
)
from penstock.messages import EndEvent, Logprobs, TokenEvent


class CalledFunction(StrictModel):
    """The function of a call."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Also one that was not offered: a model may have made it up."""
    arguments: str
    """As JSON."""


class MessageFunctionCall(StrictModel):
    """A call of a function in an assistant's message."""

    id: ShortText
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustomTool(StrictModel):
    """The custom tool of a call."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    input: str


class MessageCustomCall(StrictModel):
    """A call of a custom tool in an assistant's message; the model sees its text as the argument `input`."""

    id: ShortText
    type: Literal["custom"]
    custom: CalledCustomTool


def _find_tag(one: Any) -> str:
    """Return which model a tool or a call is of; a call may have no type."""
    kind = one.get("type") if isinstance(one, Mapping) else getattr(one, "type", None)
    return "tagged-custom" if kind == CUSTOM else "tagged-function"


MessageToolCall = Annotated[
    Annotated[MessageFunctionCall, Tag("tagged-function")] | Annotated[MessageCustomCall, Tag("tagged-custom")],
    Discriminator(_find_tag),
]


class Tool(FunctionKind):
    """A tool that the model may call."""

    function: ToolFunction


class GrammarFormat(StrictModel):
    """A grammar for the text of calls."""

    type: Literal["grammar"]
    grammar: TextGrammar


class CustomToolFields(StrictModel):
    """A custom tool."""

    name: ToolName
    description: str | None = None
    format: Annotated[PlainFormat | GrammarFormat, Field(discriminator="type")] | None = None
    """What the text of a call may be: any, or what a grammar allows."""


class CustomTool(StrictModel):
    """A tool whose calls have a text in place of arguments."""

    type: Literal["custom"]
    custom: CustomToolFields

    def make_function(self) -> Tool:
        """Return the function that it is to the model."""
        form = self.custom.format
        grammar = form.grammar if isinstance(form, GrammarFormat) else None
        function = make_function(self.custom.name, self.custom.description, grammar)
        return Tool(type="function", function=ToolFunction(**function))


OfferedTool = Annotated[
    Annotated[Tool, Tag("tagged-function")] | Annotated[CustomTool, Tag("tagged-custom")], Discriminator(_find_tag)
]


class NamedCustomTool(StrictModel):
    """The custom tool that is to be called."""

    type: Literal["custom"]
    custom: FunctionName

    @property
    def function(self) -> FunctionName:
        """The function that it is to the model."""
        return self.custom


NamedChoice = Annotated[
    Annotated[NamedTool, Tag("tagged-function")] | Annotated[NamedCustomTool, Tag("tagged-custom")],
    Discriminator(_find_tag),
]


class AllowedFunctions(StrictModel):
    """Functions that may be called."""

    mode: Literal["auto", "required"]
    """`required`: one of them is called."""
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(StrictModel):
    """The tools that may be called. The model is told of the others, too."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


ToolChoice = Annotated[
    Annotated[ChoiceMode, Tag("tagged-mode")]
    | Annotated[NamedTool, Tag("tagged-function")]
    | Annotated[NamedCustomTool, Tag("tagged-custom")]
    | Annotated[AllowedTools, Tag("tagged-allowed_tools")],
    TOOL_CHOICE,
]


class Message(StrictModel):
    """One turn of a chat."""

    model_config = ConfigDict(json_schema_extra={"required": ["role", "content"]})

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        WithJsonSchema({"type": "string", "enum": list(ROLES)}),
    ]
    content: Annotated[str | list[dict[str, Any]] | None, make_text_schema("text", "refusal", others=IMAGE_SCHEMAS)] = (
        None
    )
    """Text, or a list of parts of type `text`; an assistant's may be of type `refusal`, too, or be missing. Where the
    model sees, parts of type `image_url` as well."""
    name: ShortText | None = None
    """Who speaks. Given to the chat template; most leave it out."""
    tool_call_id: ShortText | None = None
    """The call that a message of role `tool` has the result of."""
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MAX_TOOLS)] | None = None
    """The calls of an assistant's message."""
    reasoning_content: str | None = None
    """The assistant's reasoning before its message; most chat templates leave it out."""
    reasoning: str | None = None
    """Another name for `reasoning_content`, which vLLM has."""
    refusal: str | None = None
    """The text with which the assistant refused; it stands behind its content."""
    annotations: Refused = None
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
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)] | None = None
    """The tools that the model may call. It must have a response template, to tell its calls from text."""
    tool_choice: ToolChoice | None = None
    """`none`: the model is not told of the tools. `required`: it calls one or several; with a name that one, once;
    `allowed_tools`: it calls none but these."""
    parallel_tool_calls: bool | None = None
    """`false`: at most one call."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables of the model's chat template; one that it does not have is an error."""
    functions: Refused = None
    function_call: allow_only("none", "auto") = None  # type: ignore[valid-type]
    modalities: allow_only(["text"]) = None  # type: ignore[valid-type]
    audio: Refused = None
    moderation: Refused = None
    web_search_options: allow_only() = None  # type: ignore[valid-type]
    """Not supported. `{}` is refused too, as it would switch the search on."""
    reasoning_effort: ReasoningEffort | None = None
    """Given to the chat template, which must have it; `none` may be sent to any model."""
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
        names = [tool.function.name for tool in self.offered_tools]
        check_tool_options(names, self.call_choice, self.chat_template_kwargs)
        return self

    @property
    def call_choice(self) -> CallChoice:
        """The choice that `tool_choice` and `parallel_tool_calls` make."""
        choice, is_single = self.tool_choice, self.parallel_tool_calls is False
        if isinstance(choice, (NamedTool, NamedCustomTool)):
            return CallChoice(True, [choice.function.name], True)
        if isinstance(choice, AllowedTools):
            names = [tool.function.name for tool in choice.allowed_tools.tools]
            return CallChoice(choice.allowed_tools.mode == "required", names, is_single)
        return CallChoice(choice == "required", None, is_single)

    def hold_calls(self, template: Mapping[str, Any]) -> ConstrainedCalls | None:
        """Return what holds answers with calls, by the model's response template; None where they are free.

        Raises `InvalidRequest` if the model's calls cannot be held, and `ApiError` 400.
        """
        return constrain_functions(template, [tool.function for tool in self.offered_tools], self.call_choice, self)

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools of which the model is told, as functions."""
        offered = [] if self.tool_choice == "none" else self.tools or []
        return [tool.make_function() if isinstance(tool, CustomTool) else tool for tool in offered]

    @property
    def num_choices(self) -> int:
        """How many requests of the pipeline are needed."""
        return self.n or 1


def _is_none(value: object) -> bool:
    return value is None


class ChatMessageOut(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """None where the model only calls tools."""
    refusal: None = None
    annotations: list[None] = []
    reasoning_content: Annotated[str | None, Field(exclude_if=_is_none)] = None
    """The model's reasoning before its answer; present if there is any."""
    tool_calls: Annotated[list[MessageToolCall] | None, Field(exclude_if=_is_none)] = None
    """The calls; present if there are any."""


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[TokenLogprobs]
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessageOut
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(ChoicesAnswer):
    """The answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatEndpoint(ApiEndpoint[ChatBody]):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    prompt_field = "messages"
    body_model = ChatBody
    answer_model = ChatCompletion
    parses_answers = True

    def make_requests(self, body: ChatBody, request_id: str, *, sees: bool = False) -> list[SubmitArgs]:
        """Return one request for each of `n`."""
        refuse_other_grammar_with_tools(body, body.offered_tools)
        turns = [_make_turn(message, f"messages.{index}", sees=sees) for index, message in enumerate(body.messages)]
        num_logprobs = body.top_logprobs or 0 if body.logprobs else None
        requests = make_chat_requests(body, request_id, turns, body.max_completion_tokens, num_logprobs)
        tools = body.offered_tools
        if variables := make_template_variables(body.chat_template_kwargs, body.reasoning_effort, tools):
            for args in requests:
                args["chat_template_kwargs"] = variables
        return requests

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> ChatCompletion:
        """Return the whole answer."""
        choices = [_make_choice(meta, index, answer) for index, answer in enumerate(answers)]
        return make_choices_answer(ChatCompletion, meta, choices, answers)

    def make_chunks(self, meta: StreamMeta) -> "ChatChunks":
        """Return the maker of the answer's stream."""
        return ChatChunks(meta) if meta.response_template is None else ParsedChatChunks(meta)


CHAT = ChatEndpoint()


def _make_turn(message: Message, param: str, *, sees: bool) -> dict[str, Any]:
    if message.role not in ROLES:
        raise unsupported_value(f"{param}.role", f"messages of role '{message.role}' are not supported by this server.")
    if message.role == "tool" and message.tool_call_id is None:
        raise invalid_value(f"{param}.tool_call_id", "a message of role 'tool' names the call that it answers")
    is_assistant = message.role == "assistant"
    if message.tool_calls and not is_assistant:
        raise invalid_value(f"{param}.tool_calls", "only messages of role 'assistant' have calls")
    if message.content is None and not is_assistant:
        raise unsupported_value(f"{param}.content", "a message without content is not supported by this server.")
    if message.refusal and not is_assistant:
        raise invalid_value(f"{param}.refusal", "only messages of role 'assistant' refuse")
    kinds = ("text", "refusal") if is_assistant else ("text",)
    content = read_content(message.content, f"{param}.content", kinds, sees=sees and not is_assistant)
    turn: dict[str, Any] = {"role": ROLES[message.role]}
    turn["content"] = f"{content}{message.refusal}" if message.refusal else content
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = [_make_function_call(call).model_dump() for call in message.tool_calls]
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and is_assistant:
        turn["reasoning_content"] = reasoning
    return turn


def _make_function_call(call: MessageToolCall) -> MessageFunctionCall:
    """Return a call as the model sees it."""
    if isinstance(call, MessageFunctionCall):
        return call
    function = CalledFunction(name=call.custom.name, arguments=write_arguments(call.custom.input))
    return MessageFunctionCall(id=call.id, function=function)


def _make_call(meta: StreamMeta, choice: int, number: int, name: str, text: str) -> MessageToolCall:
    """Return a call of an answer by its arguments or, of a custom tool, text. Its id follows from the request's."""
    call_id = make_call_id(meta.request_ids[choice].removeprefix(ChatEndpoint.id_prefix), number)
    if name in list_custom_names(meta.options):
        called = CalledCustomTool.model_construct(name=name, input=text)
        return MessageCustomCall(id=call_id, type="custom", custom=called)
    return MessageFunctionCall(id=call_id, function=CalledFunction.model_construct(name=name, arguments=text))


def _make_calls(meta: StreamMeta, choice: int, calls: Sequence[tuple[str, str]]) -> list[MessageToolCall]:
    custom = list_custom_names(meta.options)
    return [
        _make_call(meta, choice, number, name, TextReader().add_text(text, is_last=True) if name in custom else text)
        for number, (name, text) in enumerate(calls)
    ]


def _make_choice(meta: StreamMeta, index: int, answer: Answer) -> ChatChoice:
    logprobs = [TokenLogprobs.model_validate(one) for one in encode_answer_logprobs(answer)]
    reason: str = finish_reason(answer)
    parser = make_parser(meta)
    message = ChatMessageOut(content=answer.text)
    if parser is not None:
        part = parser.end(answer.text)
        message = ChatMessageOut(
            content=part.content if part.content or not part.calls else None,
            reasoning_content=part.reasoning or None,
            tool_calls=_make_calls(meta, index, part.calls) or None,
        )
        reason = _find_reason(parser, reason)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=ChatLogprobs(content=logprobs) if logprobs else None,
        finish_reason=cast("Any", reason),
    )


def _find_reason(parser: AnswerParser, reason: str) -> str:
    return "tool_calls" if parser.num_calls and reason == "stop" else reason


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


class ParsedChatChunks(ChatChunks):
    """As `ChatChunks`, with calls and reasoning apart from the text.

    Calls come in the pieces that the parser tells, but no call is whole before the answer's end: the last character of
    the first call, and the calls behind it, come right before the finish reason. Some agents run a call as soon as it
    is whole, and ask again if the stream breaks before the end: they would run it twice.
    """

    def __init__(self, meta: StreamMeta) -> None:
        super().__init__(meta)
        self._meta = meta
        self._parsers = [cast("AnswerParser", make_parser(meta)) for _ in meta.request_ids]
        self._custom_names = list_custom_names(meta.options)
        self._readers: list[TextReader | None] = [None for _ in meta.request_ids]
        """By choice: that of the call under way, if it is a custom tool's."""
        self._held: list[dict[int, dict[str, Any]]] = [{} for _ in meta.request_ids]
        """By choice: what is told with the end, by the numbers of calls. Empty while no call is whole."""

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return what a token tells, with its log probability if that was asked for."""
        delta = self._make_delta(index, self._parsers[index].add_text(event.text))
        if event.logprobs is None and not delta:
            return []
        logprobs = None if event.logprobs is None else self._encode_logprobs(index, event.logprobs, event.token)
        choice = self._make_choice(index, "", logprobs) | {"delta": delta or {"content": ""}}
        return [self._make_event(event.id, choice)]

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Return what was held back, and the finish reason. Each call has an event of its own: some frameworks read one
        of an event, and none that comes with a finish reason.
        """
        self._usages[index] = event.usage
        parser = self._parsers[index]
        delta = self._make_delta(index, parser.end(event.text), is_end=True)
        calls = [*delta.pop("tool_calls", []), *self._held[index].values()]
        deltas = [delta] if not calls else [*([delta] if delta else []), *({"tool_calls": [one]} for one in calls), {}]
        reasons = [None] * (len(deltas) - 1) + [_find_reason(parser, finish_reason(event))]
        return [
            self._make_event(f"e{number}", self._make_choice(index, "", finish_reason=reason) | {"delta": one})
            for number, (one, reason) in enumerate(zip(deltas, reasons, strict=True), 1)
        ]

    def _make_delta(self, index: int, part: AnswerPart, *, is_end: bool = False) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": part.content} if part.content else {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        pieces = [piece for piece in part.pieces if piece.kind == "call"]
        number, held = self._parsers[index].num_calls - len(part.calls) - 1, self._held[index]
        for piece in pieces:
            if piece.name:
                number += 1
                self._readers[index] = TextReader() if piece.name in self._custom_names else None
            reader = self._readers[index]
            text = piece.text if reader is None else reader.add_text(piece.text, is_last=piece.is_last)
            kind, field = ("function", "arguments") if reader is None else ("custom", "input")
            is_first_whole = piece.is_last and not is_end and not held
            told: dict[str, Any] = {kind: {field: text[:-1] if is_first_whole else text}}
            if piece.name:
                told = _make_call(self._meta, index, number, piece.name, told[kind][field]).model_dump()
            if number in held:
                held[number][kind][field] += text
            elif held:
                held[number] = {"index": number, **told}
            elif piece.name or told[kind][field]:
                delta.setdefault("tool_calls", []).append({"index": number, **told})
            if is_first_whole:
                held[number] = {"index": number, kind: {field: text[-1:]}}
        return delta
