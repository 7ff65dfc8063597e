"""The items of `/v1/responses`: those of `input` as the turns of a chat, and those of the answer, token by token."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from penstock.ingest.errors import ApiError
from penstock.ingest.openai.answer_parser import MAX_NAME_CHARS, AnswerPiece
from penstock.ingest.openai.body import IMAGE_SCHEMAS, StrictModel, allow_only, make_text_schema, unsupported_value
from penstock.ingest.openai.client_tools import CLIENT_TOOLS, FILE_OPERATION, LEFT_OUT, FileOperation, ShellAction
from penstock.ingest.openai.custom_tools import TextReader, list_custom_names, write_arguments
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.openai.picture_parts import GivenContent, join_texts, read_content, read_text
from penstock.ingest.openai.response_tools import OfferedTool
from penstock.ingest.openai.tokens import TokenLogprobs
from penstock.ingest.openai.tools import (
    MAX_TOOLS,
    NAMESPACE,
    NAMESPACE_END,
    ROLES,
    make_call_id,
    make_parser,
    qualify_name,
)

ID_PREFIX = "resp_"
TEXT_PART_TYPES = ("input_text", "output_text", "text")
REASONING_PART_TYPE = "reasoning_text"
ITEM_ID_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "local_shell_call": "lsh",
    "local_shell_call_output": "lsho", "shell_call": "sh", "shell_call_output": "sho", "apply_patch_call": "apc",
    "apply_patch_call_output": "apco", "agent_message": "amsg", "agent_reasoning": "ars", "additional_tools": "at",
    "item_reference": "ref",
}  # fmt: skip
CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]+(?:-[a-z0-9-]+)?)_(?:in_)?[0-9]+")


class InputMessage(StrictModel):
    """One turn."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[dict[str, Any]], make_text_schema(*TEXT_PART_TYPES, others=IMAGE_SCHEMAS)]
    """Text, or a list of parts of type `input_text` or `output_text`."""
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class NamedCall(StrictModel):
    """What calls of a tool by its name have in common."""

    call_id: CallId
    name: Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS)]
    id: str | None = None
    status: str | None = None
    namespace: Annotated[str, StringConstraints(min_length=1)] | None = None
    """The namespace that the tool is in."""
    caller: allow_only({"type": "direct"}) = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if len(self.qualified_name) > MAX_NAME_CHARS:
            raise ValueError(f"'namespace' and 'name' have at most {MAX_NAME_CHARS - 1} characters together")
        return self

    @property
    def qualified_name(self) -> str:
        """The name by which the model knows the tool."""
        return qualify_name(self.name, self.namespace)


class InputCall(NamedCall):
    """A call of an earlier turn."""

    type: Literal["function_call"]
    arguments: str
    """As JSON."""

    @property
    def function(self) -> dict[str, str]:
        """The call as the model sees it."""
        return {"name": self.qualified_name, "arguments": self.arguments}


class InputCustomCall(NamedCall):
    """A call of an earlier turn with a text in place of arguments; the model sees it as the argument `input`."""

    type: Literal["custom_tool_call"]
    input: str

    @property
    def function(self) -> dict[str, str]:
        """The call as the model sees it."""
        return {"name": self.qualified_name, "arguments": write_arguments(self.input)}


class InputClientCall(StrictModel):
    """A call of an earlier turn of a tool that the client runs; the model sees it under the tool's name."""

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: CallId
    action: dict[str, Any] | None = None
    """The arguments of the call, for a shell."""
    operation: dict[str, Any] | None = None
    """The arguments of the call, for `apply_patch`."""
    environment: dict[str, Any] | None = None
    """Where commands were run; the model is not told."""
    id: str | None = None
    status: str | None = None
    caller: allow_only({"type": "direct"}) = None  # type: ignore[valid-type]

    @property
    def function(self) -> dict[str, str]:
        """The call as the model sees it."""
        arguments = {key: value for key, value in (self.action or self.operation or {}).items() if value is not None}
        return {"name": self.type.removesuffix("_call"), "arguments": json.dumps(arguments, ensure_ascii=False)}


class InputCallOutput(StrictModel):
    """The result of a call that stands before it, in `input` or in an earlier response."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: Annotated[str | list[dict[str, Any]], make_text_schema(*TEXT_PART_TYPES, others=IMAGE_SCHEMAS)]
    """Text, or a list of parts of type `input_text`."""
    id: str | None = None
    status: str | None = None
    caller: allow_only({"type": "direct"}) = None  # type: ignore[valid-type]


class InputClientOutput(StrictModel):
    """The result of a `shell_call` or `apply_patch_call` that stands before it."""

    type: Literal["shell_call_output", "apply_patch_call_output"]
    call_id: CallId
    output: str | list[dict[str, Any]] | None = None
    """What each command wrote and how it ended, which the model sees as JSON; or a text."""
    max_output_length: int | None = None
    """Accepted; does nothing: the client has cut the output."""
    id: str | None = None
    status: str | None = None
    """Whether a patch was applied: the model sees it in front of the text."""
    caller: allow_only({"type": "direct"}) = None  # type: ignore[valid-type]

    @property
    def text(self) -> str:
        """The result as the model sees it."""
        if isinstance(self.output, list):
            return json.dumps(self.output, ensure_ascii=False)
        return ": ".join(filter(None, (self.status, self.output)))


class InputShellOutput(StrictModel):
    """The result of a command that stands before it."""

    type: Literal["local_shell_call_output"]
    id: CallId
    """The command's id, or its `call_id`."""
    output: str
    status: str | None = None

    @property
    def call_id(self) -> str:
        """What names the call."""
        return self.id

    @property
    def text(self) -> str:
        """The result as the model sees it."""
        return self.output


class InputTools(StrictModel):
    """Tools that the model may call beside those of `tools`. It is told of them in the same place."""

    type: Literal["additional_tools"]
    role: Literal["developer"]
    tools: Annotated[list[OfferedTool], Field(max_length=MAX_TOOLS)]
    id: str | None = None


class InputReference(StrictModel):
    """An item of a response that is kept, or of what that was asked, by its id."""

    type: Literal["item_reference"]
    id: CallId


class InputAgentMessage(StrictModel):
    """A message of another agent; the model sees it as a user's turn."""

    type: Literal["agent_message"]
    content: Annotated[str | list[dict[str, Any]], make_text_schema(*TEXT_PART_TYPES, others=IMAGE_SCHEMAS)]
    """Text, or a list of parts of type `input_text` or `output_text`."""
    author: str | None = None
    """It is told to the model before the text."""
    recipient: str | None = None
    id: str | None = None
    status: str | None = None


class InputAgentReasoning(StrictModel):
    """As `reasoning`, as one text."""

    type: Literal["agent_reasoning"]
    text: str
    id: str | None = None

    @property
    def content(self) -> str:
        """The text."""
        return self.text


class InputReasoning(StrictModel):
    """The model's reasoning in an earlier turn; most chat templates leave it out."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] | None = None
    """Accepted; does nothing."""
    content: Annotated[list[dict[str, Any]] | None, make_text_schema(REASONING_PART_TYPE)] = None
    """Parts of type `reasoning_text`."""
    encrypted_content: str | None = None
    """Accepted; does nothing."""
    status: str | None = None


def _find_item_tag(item: Any) -> str:
    """Return which model an item is of; a message may have no type."""
    kind = item.get("type") if isinstance(item, Mapping) else getattr(item, "type", None)
    return f"tagged-{kind or 'message'}"


def _find_input_tag(given: Any) -> str:
    return "tagged-items" if isinstance(given, list) else "tagged-text"


InputItem = Annotated[
    Annotated[InputMessage, Tag("tagged-message")]
    | Annotated[InputCall, Tag("tagged-function_call")]
    | Annotated[InputCallOutput, Tag("tagged-function_call_output")]
    | Annotated[InputCustomCall, Tag("tagged-custom_tool_call")]
    | Annotated[InputCallOutput, Tag("tagged-custom_tool_call_output")]
    | Annotated[InputClientCall, Tag("tagged-local_shell_call")]
    | Annotated[InputClientCall, Tag("tagged-shell_call")]
    | Annotated[InputClientCall, Tag("tagged-apply_patch_call")]
    | Annotated[InputClientOutput, Tag("tagged-shell_call_output")]
    | Annotated[InputClientOutput, Tag("tagged-apply_patch_call_output")]
    | Annotated[InputTools, Tag("tagged-additional_tools")]
    | Annotated[InputReference, Tag("tagged-item_reference")]
    | Annotated[InputShellOutput, Tag("tagged-local_shell_call_output")]
    | Annotated[InputAgentMessage, Tag("tagged-agent_message")]
    | Annotated[InputAgentReasoning, Tag("tagged-agent_reasoning")]
    | Annotated[InputReasoning, Tag("tagged-reasoning")],
    Discriminator(
        _find_item_tag,
        custom_error_type="unknown_item",
        custom_error_message=f"this server has only items of the types {', '.join(ITEM_ID_PREFIXES)}",
    ),
]
Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("tagged-text")]
    | Annotated[list[InputItem], Field(min_length=1), Tag("tagged-items")],
    Discriminator(_find_input_tag),
]
ITEMS = TypeAdapter(list[InputItem])


class ChatTurns:
    """The turns of a chat that items are. Items of the model that follow each other are one turn."""

    def __init__(self, instructions: str | None, *, sees: bool = False) -> None:
        self._sees = sees
        self.turns: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
        self._answer: dict[str, Any] | None = None
        """The model's turn, while nobody else said anything after it."""
        self._call_ids = dict[str, str]()
        """The `call_id` of each call by that, and by the id of its item."""

    def add_items(self, items: Iterable[InputItem]) -> None:
        """Add items. Raises `ApiError` 400 for content that is no text, and for the result of an unknown call."""
        for position, item in enumerate(items):
            match item.type:
                case "reasoning" | "agent_reasoning":
                    param = f"input.{position}.content"
                    self._add_reasoning(read_text(item.content, param, (REASONING_PART_TYPE,)))
                case "function_call" | "custom_tool_call" | "local_shell_call" | "shell_call" | "apply_patch_call":
                    self._add_call(item)
                case "function_call_output" | "custom_tool_call_output":
                    self._add_result(item.call_id, self._read(item.output, f"input.{position}.output"))
                case "local_shell_call_output" | "shell_call_output" | "apply_patch_call_output":
                    self._add_result(item.call_id, item.text)
                case "item_reference":
                    what = "items of other responses cannot be named here: send the item itself."
                    raise unsupported_value(f"input.{position}", what)
                case "agent_message":
                    content = self._read(item.content, f"input.{position}.content")
                    said = [content] if isinstance(content, str) else content
                    self._add_message("user", join_texts([f"{item.author}: ", *said]) if item.author else content)
                case "message" | None:
                    param, is_models = f"input.{position}.content", item.role == "assistant"
                    read = partial(read_text, kinds=TEXT_PART_TYPES) if is_models else self._read
                    self._add_message(ROLES[item.role], read(item.content, param))

    def _read(self, content: str | list[dict[str, Any]], param: str) -> GivenContent:
        return read_content(content, param, TEXT_PART_TYPES, sees=self._sees)

    def _add_message(self, role: str, text: GivenContent) -> None:
        answer = self._answer
        if role == "assistant" and answer is not None and not answer["content"] and "tool_calls" not in answer:
            answer["content"] = text
            return
        self.turns.append({"role": role, "content": text})
        self._answer = self.turns[-1] if role == "assistant" else None

    def _add_reasoning(self, text: str) -> None:
        if not text:
            return
        answer = self._answer
        if answer is None or answer["content"] or "tool_calls" in answer:
            answer = self._begin_answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _add_call(self, item: InputCall | InputCustomCall | InputClientCall) -> None:
        if len(item.function["name"]) > MAX_NAME_CHARS:
            message = f"The namespace and the name of a call may have {MAX_NAME_CHARS} characters together."
            raise ApiError(400, message, param="input", code="invalid_value")
        answer = self._answer or self._begin_answer()
        call = {"id": item.call_id, "type": "function", "function": item.function}
        answer.setdefault("tool_calls", []).append(call)
        self._call_ids |= {item.call_id: item.call_id} | ({item.id: item.call_id} if item.id else {})

    def _add_result(self, call_id: str, text: GivenContent) -> None:
        if call_id not in self._call_ids:
            message = f"No tool call found for function call output with call_id {call_id}."
            raise ApiError(400, message, param="input", code="invalid_value")
        self.turns.append({"role": "tool", "content": text, "tool_call_id": self._call_ids[call_id]})
        self._answer = None

    def _begin_answer(self) -> dict[str, Any]:
        self._answer = {"role": "assistant", "content": ""}
        self.turns.append(self._answer)
        return self._answer


class OutputText(BaseModel):
    """The text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprobs] = []


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(BaseModel):
    """A message of the answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputCall(BaseModel):
    """A function that the model calls."""

    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    """The id that a `function_call_output` names."""
    name: str
    namespace: Annotated[str | None, Field(exclude_if=lambda namespace: namespace is None)] = None
    """The namespace that the function is in; present if it is in one."""
    arguments: str
    """As JSON."""
    status: ItemStatus


class OutputCustomCall(BaseModel):
    """A custom tool that the model calls."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    call_id: str
    """The id that a `custom_tool_call_output` names."""
    name: str
    input: str
    status: ItemStatus


class OutputClientCall(BaseModel):
    """A call of a tool that the client runs."""

    id: str
    type: Literal["shell_call", "apply_patch_call"]
    call_id: str
    """The id that the item with the result names."""
    action: Annotated[ShellAction | None, LEFT_OUT] = None
    """What a `shell_call` runs."""
    operation: Annotated[FileOperation | None, LEFT_OUT] = None
    """What an `apply_patch_call` changes."""
    environment: Annotated[dict[str, str] | None, LEFT_OUT] = None
    status: ItemStatus


class ReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    """The model's reasoning before the next item."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[None] = []
    """Empty: `content` has all of it."""
    content: list[ReasoningText]
    status: ItemStatus


WrittenItem = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning
"""An item that is told as it is written."""
OutputItem = WrittenItem | OutputClientCall
ToldEvent = tuple[str, dict[str, Any]]
"""An event of a stream: its name without `response.`, and its fields without type and number."""


def make_item_id(meta: StreamMeta, kind: str, place: int | str) -> str:
    """Return the id of an item of this type: it follows from the response's id and the item's place."""
    return f"{ITEM_ID_PREFIXES[kind]}_{meta.id.removeprefix(ID_PREFIX)}_{place}"


def read_client_call(call: OutputCall, meta: StreamMeta, place: int) -> OutputCall | OutputClientCall:
    """Return the item that a call of `shell` or `apply_patch` is, or the call if its arguments are no such tool's."""
    try:
        if call.name == "shell":
            kind, action = "shell_call", ShellAction.model_validate_json(call.arguments)
            given: dict[str, Any] = {"type": kind, "action": action, "environment": {"type": "local"}}
        else:
            kind, operation = "apply_patch_call", FILE_OPERATION.validate_json(call.arguments)
            given = {"type": kind, "operation": operation}
    except ValidationError:
        return call
    return OutputClientCall(id=make_item_id(meta, kind, place), call_id=call.call_id, status=call.status, **given)


def find_response_id(item_id: str) -> str | None:
    """Return the id of the response that an item is of, or was asked with; None where the id is not one of ours."""
    found = _ITEM_ID.fullmatch(item_id)
    return None if found is None else f"{ID_PREFIX}{found[1]}"


class OutputBuilder:
    """Puts the items of an answer together, token by token. Its methods return the events of that.

    All of it follows from the tokens' texts, in whatever pieces they are added: reasoning, text and calls are items in
    the order in which the model wrote them. White space alone makes no item where there is another one. A token whose
    text is not told yet, as it may begin a mark, counts as a part of what is told next; so do its log probabilities,
    which only messages have.
    """

    def __init__(self, meta: StreamMeta) -> None:
        self._meta, self._parser = meta, make_parser(meta)
        tools = meta.options.get("tools") or ()
        self._namespaces = {tool["name"] for tool in tools if tool.get("type") == NAMESPACE}
        self._client_names = {tool["type"] for tool in tools if tool["type"] in CLIENT_TOOLS}
        """Tools whose calls have items of their own, which are told once their arguments are whole."""
        self._custom_names = list_custom_names(meta.options)
        self._reader: TextReader | None = None
        """That of the call under way, if it is a custom tool's."""
        self.items: list[OutputItem] = []
        """Those that are complete."""
        self.num_reasoning_tokens = 0
        self._open: WrittenItem | None = None
        """The item that texts go to."""
        self._texts: list[str] = []
        """Those of the open item."""
        self._space = AnswerPiece("content", "")
        """White space that may be the beginning of an item."""
        self._untold_logprobs: list[dict[str, Any]] = []
        self._num_untold = 0
        """Tokens whose text was not told."""

    @property
    def is_parsed(self) -> bool:
        """Whether calls and reasoning are told from text."""
        return self._parser is not None

    def add_token(self, text: str, logprobs: list[dict[str, Any]]) -> list[ToldEvent]:
        """Add a token, with its log probability if that was asked for."""
        self._num_untold += 1
        self._untold_logprobs += logprobs
        if self._parser is None:
            return self._add_piece(AnswerPiece("content", text)) if text else []
        return [told for piece in self._parser.add_text(text).pieces for told in self._add_piece(piece)]

    def end(self, text: str, *, is_cut: bool) -> list[ToldEvent]:
        """Add the last text, and complete the last item; it is incomplete if the answer is cut in it."""
        pieces = [AnswerPiece("content", text)] if text else []
        if self._parser is not None:
            pieces = self._parser.end(text).pieces
        told = [event for piece in pieces for event in self._add_piece(piece)]
        if not self.items and self._open is None:
            told += self._open_item("content")
            told += self._add_text(self._space.text) if self._space.text else []
        if self._untold_logprobs and isinstance(self._open, OutputMessage):
            told += self._add_text("")
        return told + self._close_item("incomplete" if is_cut else "completed")

    def _add_piece(self, piece: AnswerPiece) -> list[ToldEvent]:
        if piece.kind == "call":
            begun = self._close_item("completed") + self._open_call(piece.name) if piece.name else []
            text = piece.text
            if self._reader is not None:
                text = self._reader.add_text(text, is_last=piece.is_last)
            return begun + self._add_text(text) + (self._close_item("completed") if piece.is_last else [])
        if self._open is not None and (piece.kind == "reasoning") == (self._open.type == "reasoning"):
            self._space = AnswerPiece("content", "")
            return self._add_text(piece.text)
        if piece.kind == self._space.kind:
            piece = AnswerPiece(piece.kind, self._space.text + piece.text)
        if self.is_parsed and piece.text.isspace():
            self._space = piece
            return []
        return self._close_item("completed") + self._open_item(piece.kind) + self._add_text(piece.text)

    def _open_item(self, kind: str) -> list[ToldEvent]:
        place = len(self.items)
        part: OutputText | ReasoningText
        if kind == "reasoning":
            item_id, part = make_item_id(self._meta, "reasoning", place), ReasoningText(text="")
            self._open = OutputReasoning(id=item_id, status="in_progress", content=[])
        else:
            item_id, part = make_item_id(self._meta, "message", place), OutputText(text="")
            self._open = OutputMessage(id=item_id, status="in_progress", content=[])
        added = ("output_item.added", {"output_index": place, "item": self._open.model_dump()})
        cast("list[Any]", self._open.content).append(part)
        return [added, ("content_part.added", {**self._fields(), "part": part.model_dump()})]

    def _add_text(self, text: str) -> list[ToldEvent]:
        self._texts.append(text)
        logprobs, self._untold_logprobs = self._untold_logprobs, []
        num_tokens, self._num_untold = self._num_untold, 0
        if isinstance(self._open, OutputReasoning):
            self.num_reasoning_tokens += num_tokens
            return [("reasoning_text.delta", {**self._fields(), "delta": text})]
        if isinstance(self._open, OutputCall):
            if self._open.name in self._client_names:
                return []
            return [("function_call_arguments.delta", {**self._fields(), "delta": text})]
        if isinstance(self._open, OutputCustomCall):
            return [("custom_tool_call_input.delta", {**self._fields(), "delta": text})] if text else []
        assert self._open is not None, "its caller opened it"
        self._open.content[0].logprobs += [TokenLogprobs.model_validate(one) for one in logprobs]
        return [("output_text.delta", {**self._fields(), "delta": text, "logprobs": logprobs})]

    def _close_item(self, status: ItemStatus) -> list[ToldEvent]:
        item, self._space = self._open, AnswerPiece("content", "")
        if item is None:
            return []
        fields, text, self._texts = self._fields(), "".join(self._texts), []
        item.status = status
        if isinstance(item, OutputCall):
            self._open, item.arguments = None, text
            if item.name in self._client_names:
                return self._complete_client_call(item)
            return [("function_call_arguments.done", {**fields, "arguments": text}), self._complete_item(item)]
        if isinstance(item, OutputCustomCall):
            self._open, item.input = None, text
            return [("custom_tool_call_input.done", {**fields, "input": text}), self._complete_item(item)]
        (part,) = item.content
        part.text = text
        done: dict[str, Any] = {"text": part.text}
        if isinstance(part, OutputText):
            done["logprobs"] = [one.model_dump() for one in part.logprobs]
        kind = "output_text" if isinstance(part, OutputText) else "reasoning_text"
        self._open = None
        return [
            (f"{kind}.done", {**fields, **done}),
            ("content_part.done", {**fields, "part": part.model_dump()}),
            self._complete_item(item),
        ]

    def _open_call(self, name: str) -> list[ToldEvent]:
        place = len(self.items)
        number = sum(item.type not in ("message", "reasoning") for item in self.items)
        call_id = make_call_id(self._meta.id.removeprefix(ID_PREFIX), number)
        self._reader = TextReader() if name in self._custom_names else None
        if self._reader is not None:
            item_id = make_item_id(self._meta, "custom_tool_call", place)
            self._open = OutputCustomCall(id=item_id, call_id=call_id, name=name, input="", status="in_progress")
            return [("output_item.added", {"output_index": place, "item": self._open.model_dump()})]
        namespace, _, member = name.partition(NAMESPACE_END)
        is_in_one = namespace in self._namespaces
        self._open = OutputCall(
            id=make_item_id(self._meta, "function_call", place),
            call_id=call_id,
            name=member if is_in_one else name,
            namespace=namespace if is_in_one else None,
            arguments="",
            status="in_progress",
        )
        if name in self._client_names:
            return []
        return [("output_item.added", {"output_index": place, "item": self._open.model_dump()})]

    def _complete_client_call(self, call: OutputCall) -> list[ToldEvent]:
        """Add a call of a tool that the client runs; as a function's call if its arguments are cut, or others."""
        place, item = len(self.items), read_client_call(call, self._meta, len(self.items))
        begun = item.model_dump() | {"status": "in_progress"}
        return [("output_item.added", {"output_index": place, "item": begun}), self._complete_item(item)]

    def _complete_item(self, item: OutputItem) -> ToldEvent:
        self.items.append(item)
        return "output_item.done", {"output_index": len(self.items) - 1, "item": item.model_dump()}

    def _fields(self) -> dict[str, Any]:
        assert self._open is not None, "a text belongs to an item"
        fields: dict[str, Any] = {"output_index": len(self.items), "item_id": self._open.id}
        return fields if isinstance(self._open, (OutputCall, OutputCustomCall)) else fields | {"content_index": 0}
