"""`/v1/messages`: bodies become those of `/v1/chat/completions`, and the pieces of answers become content blocks.

White space alone is no block: between reasoning, text and calls it is left out. The blocks are a function of the
answer's text, so a stream that goes on after any of its events has the same ones.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import from_json

from penstock.client.core import Answer
from penstock.grammar.spec import from_text_format
from penstock.ingest.anthropic.client_tools import CLIENT_TOOLS
from penstock.ingest.errors import TYPE_BY_STATUS, ApiError
from penstock.ingest.openai.answer_parser import AnswerPart, AnswerPiece
from penstock.ingest.openai.body import (
    GrammarReader,
    Refused,
    ShortText,
    Stop,
    StrictModel,
    TokenLimit,
    allow_only,
    hash_session,
    invalid_value,
    parse_body,
    unsupported_value,
)
from penstock.ingest.openai.chat import CHAT, ChatBody
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta, SubmitArgs
from penstock.ingest.openai.sse import DONE_ID, SseEvent, encode_json, make_token_positions
from penstock.ingest.openai.tools import MAX_TOOLS, ToolName, make_parser
from penstock.messages import EndEvent, TokenEvent, Usage

THREAD_CODE = "thread_unsupported_request"
"""The code of an error after which the SDK's tool runner asks again without a thread, with all turns."""
THINKING_VARIABLE = "enable_thinking"
"""The variable by which chat templates switch thinking on and off."""
MCP_ADVICE = "It calls no MCP servers: call them in the client, and send what they offer as 'tools'."
TYPE_BY_OTHER_STATUS: Mapping[int, str] = {
    409: "invalid_request_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
"""`type` for each HTTP status of which Anthropic has another one than OpenAI; else a 5xx is an `api_error`."""


class TextParam(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingParam(StrictModel):
    """The assistant's reasoning, as an earlier answer has it."""

    type: Literal["thinking"]
    thinking: str
    """Given to the chat template; most leave it out."""


class RedactedThinkingParam(StrictModel):
    """Reasoning that only Anthropic's servers can read. It is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseParam(StrictModel):
    """A call of an assistant's turn."""

    type: Literal["tool_use"]
    id: ShortText
    name: Annotated[ShortText, Field(min_length=1)]
    """Also one that was not offered: a model may have made it up."""
    input: dict[str, Any]


def _make_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextContent = Annotated[list[TextParam], BeforeValidator(_make_blocks, json_schema_input_type=str | list[TextParam])]
"""A text, or blocks of text."""


class WrittenBlock(StrictModel):
    """A block that becomes text: between two marks with its type and what names it."""

    def write_text(self) -> str:
        """Return the text."""
        raise NotImplementedError

    def _write_between(self, kind: str, text: str, **names: str | None) -> str:
        attributes = "".join(
            f" {name}={json.dumps(value, ensure_ascii=False)}" for name, value in names.items() if value
        )
        return f"<{kind}{attributes}>\n{text}\n</{kind}>\n"


class PlainTextSource(StrictModel):
    """The text of a document."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class ContentSource(StrictModel):
    """A document as blocks of text."""

    type: Literal["content"]
    content: TextContent


class DocumentParam(WrittenBlock):
    """A document of text."""

    type: Literal["document"]
    source: Annotated[PlainTextSource | ContentSource, Field(discriminator="type")]
    """Text; files and addresses are not read."""
    title: str | None = None
    context: str | None = None

    def write_text(self) -> str:
        """Return the text."""
        text = self.source.data if isinstance(self.source, PlainTextSource) else _join_texts(self.source.content)
        return self._write_between("document", text, title=self.title, context=self.context)


class SearchResultParam(WrittenBlock):
    """What the client has found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextParam]

    def write_text(self) -> str:
        """Return the text."""
        return self._write_between("search_result", _join_texts(self.content), source=self.source, title=self.title)


class ToolReferenceParam(WrittenBlock):
    """A tool that the client's search for tools has found; the model knows all of them."""

    type: Literal["tool_reference"]
    tool_name: str

    def write_text(self) -> str:
        """Return the text."""
        return self._write_between("tool_reference", self.tool_name)


class ServerToolUseParam(WrittenBlock):
    """A call that other servers made."""

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: ShortText
    name: ShortText
    server_name: str | None = None
    input: dict[str, Any]

    def write_text(self) -> str:
        """Return the text."""
        return self._write_between(self.type, _describe(self.input), server_name=self.server_name, name=self.name)


class ServerToolResultParam(WrittenBlock):
    """The result of a call that other servers made."""

    type: Literal[
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "mcp_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]
    tool_use_id: ShortText
    content: str | list[Any] | dict[str, Any] = ""

    def write_text(self) -> str:
        """Return the text."""
        return self._write_between(self.type, _describe(self.content))


class Base64Source(StrictModel):
    """The file of an image."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(StrictModel):
    """The address of an image."""

    type: Literal["url"]
    url: str


class FileSource(StrictModel):
    """An image that was uploaded to `/v1/files`."""

    type: Literal["file"]
    file_id: str


class ImageParam(StrictModel):
    """An image, for models that see."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]

    def make_part(self) -> dict[str, Any]:
        """Return the part of a chat's message that it is."""
        match self.source:
            case Base64Source(media_type=kind, data=data):
                given = {"image_url": f"data:{kind};base64,{data}"}
            case UrlSource(url=url):
                given = {"image_url": url}
            case FileSource(file_id=file_id):
                given = {"file_id": file_id}
        return {"type": "input_image", **given}


def _describe(value: Any) -> str:
    """Return what other servers told as a text: texts as they are, and all else as JSON without what is encrypted."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(_describe, value))
    if isinstance(value, dict):
        if value.get("type") == "text" and isinstance(value.get("text"), str):
            return str(value["text"])
        value = {name: one for name, one in value.items() if not name.startswith("encrypted_")}
    return json.dumps(value, ensure_ascii=False)


ResultBlock = Annotated[
    TextParam | ImageParam | DocumentParam | SearchResultParam | ToolReferenceParam, Field(discriminator="type")
]


class ToolResultParam(StrictModel):
    """The result of a call, in a user's turn."""

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: Annotated[
        list[ResultBlock], BeforeValidator(_make_blocks, json_schema_input_type=str | list[ResultBlock])
    ] = Field(default=[])


Block = Annotated[
    TextParam
    | ImageParam
    | ThinkingParam
    | RedactedThinkingParam
    | ToolUseParam
    | ToolResultParam
    | DocumentParam
    | SearchResultParam
    | ServerToolUseParam
    | ServerToolResultParam,
    Field(discriminator="type"),
]
BLOCKS_BY_ROLE: Mapping[str, tuple[type[StrictModel], ...]] = {
    "system": (TextParam,),
    "user": (TextParam, ImageParam, ToolResultParam, DocumentParam, SearchResultParam),
    "assistant": (
        *(TextParam, ThinkingParam, RedactedThinkingParam, ToolUseParam),
        *(ServerToolUseParam, ServerToolResultParam),
    ),
}


class MessageParam(StrictModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    """`system`: those that stand first are one system message with `system`. Where the chat template has no place for
    another one, it stands behind the user's turn before it, marked as such."""
    content: Annotated[list[Block], BeforeValidator(_make_blocks, json_schema_input_type=str | list[Block])]
    """Text, or blocks."""
    clear_at: Literal["next_user_message", "never"] | None = None
    """`next_user_message`: a system turn is left out where a user's turn follows it."""
    output_config: allow_only({}) = None  # type: ignore[valid-type]


def _check_tool_type(kind: str) -> str:
    if kind != "custom" and kind not in CLIENT_TOOLS:
        known = ", ".join(CLIENT_TOOLS)
        raise ValueError(f"this server has no {kind!r}, only tools with an 'input_schema' (type 'custom') and {known}")
    return kind


class ToolParam(StrictModel):
    """A tool that the model may call."""

    type: Annotated[str, AfterValidator(_check_tool_type)] | None = None
    """`custom`, or a tool of Anthropic's that the client runs, such as `bash_20250124`: its description and schema are
    filled in. Tools that Anthropic's servers run are left out."""
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    """A JSON schema of the input. The model sees it."""
    strict: bool | None = None
    """Whether the input follows the schema token by token, and one that cannot be enforced is refused. Else it follows
    what can be enforced where the model must call, and is any object where it may."""


def _fill_in_tools(tools: object) -> object:
    """Return tools with the published descriptions and schemas of those that clients run."""
    if not isinstance(tools, list):
        return tools
    return [{**CLIENT_TOOLS.get(str(one.get("type")), {}), **one} if isinstance(one, dict) else one for one in tools]


class ToolChoiceParam(StrictModel):
    """Whether the model may call tools."""

    type: Literal["auto", "any", "tool", "none"]
    """`none`: the model is not told of the tools. `any`: it calls one or several; `tool`: that with the name, once."""
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None
    """With true it calls at most once."""

    @model_validator(mode="after")
    def check_name(self) -> Self:
        """Refuse a choice of a tool without its name, and a name beside another choice."""
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("'name' is given where 'type' is 'tool', and only there")
        return self


class ThinkingConfig(StrictModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    """`enabled` and `disabled` are the variable `enable_thinking` of the chat template, which must have it. `adaptive`
    leaves it to the template, as without this field."""


class OutputConfig(StrictModel):
    """The form of the answer."""

    format: dict[str, Any] | None = None
    """`json_schema` with its schema: what the answer must be."""


class CountTokensBody(StrictModel):
    """A request to `/v1/messages/count_tokens`: all of a request to `/v1/messages` that becomes its prompt."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """One of those that `/v1/models` lists."""
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    """The last one is the user's: the answer cannot go on within a turn of the assistant."""
    system: TextContent | None = None
    """A system message before them."""
    tools: Annotated[list[ToolParam], BeforeValidator(_fill_in_tools), Field(max_length=MAX_TOOLS)] | None = None
    """The tools that the model may call. It must have a response template, to tell its calls from text."""
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    # What Anthropic's servers have besides.
    billing_policy: Refused = None
    compaction: Refused = None
    container: Refused = None
    inference_geo: allow_only("global", instead="This server is where it is.") = None  # type: ignore[valid-type]
    mcp_servers: allow_only([], instead=MCP_ADVICE) = None  # type: ignore[valid-type]
    output_format: allow_only(instead="Use 'output_config.format'.") = None  # type: ignore[valid-type]
    thread: dict[str, Any] | None = None
    """Refused."""

    def make_chat(self) -> "MessagesChat":
        """Return the same request to `/v1/chat/completions`. Raises `ApiError` 400."""
        return parse_body(MessagesChat, self.make_chat_fields())

    def make_chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat. Raises `ApiError` 400."""
        if self.thread is not None:
            message = "'thread': this server keeps no threads. Send all turns with each request."
            raise ApiError(400, message, param="thread", code=THREAD_CODE)
        fields: dict[str, Any] = {"model": self.model, "messages": self._make_turns()}
        if self.tools is not None:
            fields["tools"] = [_make_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            fields["tool_choice"] = _make_tool_choice(self.tool_choice)
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None and self.thinking.type != "adaptive":
            fields["chat_template_kwargs"] = {THINKING_VARIABLE: self.thinking.type == "enabled"}
        if self.output_config is not None:
            fields["output_format"] = self.output_config.format
        return fields

    def _make_turns(self) -> list[dict[str, Any]]:
        turns = [] if self.system is None else [{"role": "system", "content": _join_texts(self.system)}]
        last_user = max((n for n, message in enumerate(self.messages) if message.role == "user"), default=-1)
        for index, message in enumerate(self.messages):
            param = f"messages.{index}"
            _check_message(message, param)
            match message.role:
                case "user":
                    turns += _make_user_turns(message)
                case "assistant":
                    turns.append(_make_assistant_turn(message, param))
                case "system" if message.clear_at != "next_user_message" or index > last_user:
                    _add_system_text(turns, _join_texts(message.content))
        if turns and turns[-1]["role"] == "assistant":
            what = "the last turn must be the user's: an answer cannot go on within a turn of the assistant."
            raise unsupported_value(f"messages.{len(self.messages) - 1}.role", what)
        return turns


class MetadataParam(StrictModel):
    """The user behind a request."""

    user_id: str | None = None
    """The text behind `session_` names the chat. Requests of a chat find the worker that has their KV."""

    def find_session(self) -> str | None:
        """Return the chat that `user_id` names; None where it names none."""
        _, _, name = (self.user_id or "").rpartition("session_")
        return hash_session(name) if name != self.user_id and name else None


class MessagesBody(CountTokensBody):
    """A request to `/v1/messages`."""

    max_tokens: TokenLimit
    """The most tokens of the answer."""
    stream: bool | None = None
    """Send the answer in pieces, as server-sent events."""
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    """The answer ends before the first of these."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Sample from this many likeliest tokens; 0: from all."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 takes the likeliest token."""
    metadata: MetadataParam | None = None

    def make_chat_fields(self) -> dict[str, Any]:
        """Return the fields of the chat. Raises `ApiError` 400."""
        session = None if self.metadata is None else self.metadata.find_session()
        given = {"max_tokens": self.max_tokens, "stream": self.stream, "stop": self.stop_sequences, "session": session}
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        own = {name: value for name, value in (given | sampling).items() if value is not None}
        return super().make_chat_fields() | own


class MessagesChat(ChatBody):
    """The chat that a body becomes."""

    output_format: dict[str, Any] | None = None
    session: str | None = None

    def grammar_readers(self) -> dict[str, GrammarReader]:
        """Return what reads the grammar of each parameter that may have one. They raise `InvalidRequest`."""
        read = partial(from_text_format, self.output_format, "output_config.format")
        return super().grammar_readers() | {"output_config.format": read}


def _join_texts(blocks: Sequence[StrictModel]) -> str:
    """Return the texts of the blocks that have one."""
    return "".join(map(_read_text, blocks))


def _make_content(blocks: Sequence[StrictModel]) -> str | list[dict[str, Any]]:
    """Return the content of a chat's message: text, or parts where there are images."""
    if not any(isinstance(block, ImageParam) for block in blocks):
        return _join_texts(blocks)
    return [
        block.make_part() if isinstance(block, ImageParam) else {"type": "text", "text": _read_text(block)}
        for block in blocks
    ]


def _read_text(block: StrictModel) -> str:
    if isinstance(block, WrittenBlock):
        return block.write_text()
    return block.text if isinstance(block, TextParam) else ""


def _check_message(message: MessageParam, param: str) -> None:
    for number, block in enumerate(message.content):
        if not isinstance(block, BLOCKS_BY_ROLE[message.role]):
            what = f"a turn of role '{message.role}' has no blocks of type '{block.type}'"
            raise invalid_value(f"{param}.content.{number}.type", what)
    if message.clear_at is not None and message.role != "system":
        raise invalid_value(f"{param}.clear_at", "only turns of role 'system' have it")


def _add_system_text(turns: list[dict[str, Any]], text: str) -> None:
    """Add a system turn, or its text to the only turn before it, if that is one of these, too."""
    if [turn["role"] for turn in turns] == ["system"]:
        turns[0]["content"] += f"\n\n{text}"
    else:
        turns.append({"role": "system", "content": text})


def _make_tool_choice(choice: ToolChoiceParam) -> Any:
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _make_tool(tool: ToolParam) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _make_user_turns(message: MessageParam) -> list[dict[str, Any]]:
    """Return a turn for each result and for what is between them, in their order."""
    turns: list[dict[str, Any]] = []
    for is_result, blocks in groupby(message.content, lambda block: isinstance(block, ToolResultParam)):
        if is_result:
            turns += [
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": _make_content(block.content)}
                for block in blocks
                if isinstance(block, ToolResultParam)
            ]
        else:
            turns.append({"role": "user", "content": _make_content(list(blocks))})
    return turns or [{"role": "user", "content": ""}]


def _make_assistant_turn(message: MessageParam, param: str) -> dict[str, Any]:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": _join_texts(message.content),
    }
    if thoughts := [block.thinking for block in message.content if isinstance(block, ThinkingParam)]:
        turn["reasoning_content"] = "".join(thoughts)
    calls = [
        _make_call(block, f"{param}.content.{number}")
        for number, block in enumerate(message.content)
        if isinstance(block, ToolUseParam)
    ]
    if len(calls) > MAX_TOOLS:
        raise invalid_value(f"{param}.content", f"a turn has at most {MAX_TOOLS} calls")
    return turn | ({"tool_calls": calls} if calls else {})


def _make_call(block: ToolUseParam, param: str) -> dict[str, Any]:
    try:
        arguments = json.dumps(block.input, allow_nan=False)
    except ValueError:
        raise invalid_value(f"{param}.input", "a number of JSON is finite") from None
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


# The answer.


class TextBlock(BaseModel):
    """Text."""

    type: Literal["text"] = "text"
    text: str
    citations: list[None] = []
    """Always empty: Anthropic's schema demands the field, and the AI SDK's provider 3 refuses null."""


class ThinkingBlock(BaseModel):
    """The model's reasoning before its answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""
    """Empty: nothing is signed."""


class ToolCaller(BaseModel):
    """The caller of a tool: the model."""

    type: Literal["direct"] = "direct"


class ToolUseBlock(BaseModel):
    """A call."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]
    caller: ToolCaller = ToolCaller()


class MessageUsage(BaseModel):
    """Token counts. Those of the prompt are the sum of the first three."""

    input_tokens: int
    """Those that were computed."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    """Those whose KV was found and not computed."""
    cache_creation: None = None
    output_tokens: int
    output_tokens_details: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class MessageAnswer(BaseModel):
    """The answer of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    """Why the answer ended; None while it goes on."""
    stop_sequence: str | None = None
    """The stop sequence that ended it."""
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class MessageTokenCount(BaseModel):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageErrorCode(BaseModel):
    """The error, as the gateway's other routes name it in `code`."""

    error_code: str


class MessageErrorDetail(BaseModel):
    """The error, for programs (`type`, `details`) and for people (`message`)."""

    type: str
    message: str
    details: MessageErrorCode | None = None


class MessageErrorBody(BaseModel):
    """The body of every error of `/v1/messages`, as Anthropic's SDKs expect it."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail


class MessagesEndpoint(ApiEndpoint[ChatBody]):
    """`/v1/messages`: what makes requests is the chat that a body is translated to."""

    path = "/v1/messages"
    id_prefix = "msg_"
    prompt_field = "messages"
    body_model = MessagesBody
    answer_model = MessageAnswer
    error_model = MessageErrorBody
    tool_schema = "tools.*.input_schema"
    parses_answers = True

    def parse_body(self, raw: bytes | dict[str, Any]) -> ChatBody:
        """Parse a body into a chat's. Raises `ApiError` 400 that names the parameter."""
        return parse_body(MessagesBody, raw, self.path).make_chat()

    def make_requests(self, body: ChatBody, request_id: str, *, sees: bool = False) -> list[SubmitArgs]:
        """Return one request."""
        (args,) = CHAT.make_requests(body, request_id, sees=sees)
        if args.get("stop"):
            args["tell_stop"] = True
        return [args]

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> MessageAnswer:
        """Return the whole answer."""
        (answer,) = answers
        blocks = ContentBlocks(meta)
        content: list[dict[str, Any]] = []
        for event in blocks.end(answer.text):
            match event["type"]:
                case "content_block_start":
                    content.append(event["content_block"])
                case "content_block_delta":
                    _add_delta(content[-1], event["delta"])
        return MessageAnswer.model_validate(
            {
                "id": meta.id,
                "model": meta.model,
                "content": content,
                "stop_reason": blocks.find_stop_reason(answer),
                "stop_sequence": answer.stop,
                "usage": _make_usage(answer.usage),
            }
        )

    def make_chunks(self, meta: StreamMeta) -> "MessageChunks":
        """Return the maker of the answer's stream."""
        return MessageChunks(meta)

    def make_error_body(self, error: ApiError) -> MessageErrorBody:
        """Return the body of an error."""
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = TYPE_BY_OTHER_STATUS.get(error.status) or TYPE_BY_STATUS.get(error.status, default)
        details = None if error.code is None else MessageErrorCode(error_code=error.code)
        return MessageErrorBody(error=MessageErrorDetail(type=kind, message=str(error), details=details))


MESSAGES = MessagesEndpoint()


def _make_usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def _add_delta(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "input_json_delta":
            block["input"] = _read_input(delta["partial_json"])


def _read_input(text: str) -> Any:
    """Return what is whole of a call's arguments, which may be cut, as Anthropic's SDK reads them from a stream.

    It is empty where they cannot be read: deeper than 200 levels, or with a number of more than 4,300 digits.
    """
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}


class ContentBlocks:
    """Turns the text of one answer into the events of its content blocks."""

    def __init__(self, meta: StreamMeta) -> None:
        self._parser = make_parser(meta)
        self._name = meta.id.removeprefix(MessagesEndpoint.id_prefix)
        self._index = -1
        """The index of the block that was begun last."""
        self._open: Literal["content", "reasoning", "call"] | None = None
        """The contents of the open block."""
        self._held = AnswerPiece("content", "")
        """White space after the open block, of another kind."""

    def add_text(self, text: str) -> list[dict[str, Any]]:
        """Return the events that a piece of text adds."""
        return self._add_part(_make_part(text) if self._parser is None else self._parser.add_text(text))

    def end(self, text: str) -> list[dict[str, Any]]:
        """Return the events that the last piece of text adds, up to the end of the last block."""
        part = _make_part(text) if self._parser is None else self._parser.end(text)
        return self._add_part(part) + self._close_block()

    def find_stop_reason(self, end: Answer | EndEvent) -> str:
        """Return why the answer ended."""
        if end.finish_reason == "length":
            return "max_tokens"
        if end.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._parser is not None and self._parser.num_calls else "end_turn"

    def _add_part(self, part: AnswerPart) -> list[dict[str, Any]]:
        return [event for piece in part.pieces for event in self._add_piece(piece)]

    def _add_piece(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        if piece.kind == "call":
            return self._add_call(piece)
        begun = []
        if piece.kind == self._open:
            text = piece.text
        else:
            text = self._held.text + piece.text if self._held.kind == piece.kind else piece.text
            if not text.strip():
                self._held = AnswerPiece(piece.kind, text)
                return []
            block = TextBlock(text="") if piece.kind == "content" else ThinkingBlock(thinking="")
            begun = self._open_block(piece.kind, block)
        self._held = AnswerPiece("content", "")
        delta = (
            {"type": "text_delta", "text": text}
            if piece.kind == "content"
            else {"type": "thinking_delta", "thinking": text}
        )
        return [*begun, self._make_event("content_block_delta", delta=delta)]

    def _open_block(self, kind: Literal["content", "reasoning", "call"], block: BaseModel) -> list[dict[str, Any]]:
        ended = self._close_block()
        self._open = kind
        self._index += 1
        return [*ended, self._make_event("content_block_start", content_block=block.model_dump())]

    def _close_block(self) -> list[dict[str, Any]]:
        was_open, self._open = self._open, None
        return [] if was_open is None else [self._make_event("content_block_stop")]

    def _add_call(self, piece: AnswerPiece) -> list[dict[str, Any]]:
        self._held = AnswerPiece("content", "")
        begun: list[dict[str, Any]] = []
        if piece.name:
            # Each call is a block: an id follows from the block's index.
            call_id = f"toolu_{self._name}_{self._index + 1}"
            begun = self._open_block("call", ToolUseBlock(id=call_id, name=piece.name, input={}))
        delta = {"type": "input_json_delta", "partial_json": piece.text}
        added = self._make_event("content_block_delta", delta=delta)
        return [*begun, added, *(self._close_block() if piece.is_last else [])]

    def _make_event(self, kind: str, **data: Any) -> dict[str, Any]:
        return {"type": kind, "index": self._index, **data}


def _make_part(text: str) -> AnswerPart:
    return AnswerPart([AnswerPiece("content", text)] if text else [])


class MessageChunks:
    """A stream: the message without content, its blocks, what ended it with the usage, and its end."""

    def __init__(self, meta: StreamMeta) -> None:
        self._meta, self._blocks = meta, ContentBlocks(meta)

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return the message without content. The number of the prompt's tokens is not known yet."""
        message = MessageAnswer(id=self._meta.id, model=self._meta.model, usage=_make_usage(Usage()))
        start = {"type": "message_start", "message": message.model_dump()}
        return _make_events(["s1", "s2"], [start, {"type": "ping"}])

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return what a token tells."""
        events = self._blocks.add_text(event.text)
        return _make_events(make_token_positions(event.id, len(events)), events)

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Return what was held back, the reason of the end, and the usage."""
        events = self._blocks.end(event.text)
        delta = {"stop_reason": self._blocks.find_stop_reason(event), "stop_sequence": event.stop}
        events.append({"type": "message_delta", "delta": delta, "usage": _make_usage(event.usage).model_dump()})
        return _make_events([f"e{number}" for number in range(1, len(events) + 1)], events)

    def end_stream(self) -> list[SseEvent]:
        """Return the end."""
        return _make_events([DONE_ID], [{"type": "message_stop"}])


def _make_events(positions: Sequence[str], events: Sequence[dict[str, Any]]) -> list[SseEvent]:
    return [
        SseEvent(position, encode_json(event), event["type"]) for position, event in zip(positions, events, strict=True)
    ]
