"""The question to an endpoint: a request of the pipeline as a body of OpenAI's API.

No part of a request is left out silently: a part without a field in the API is refused by name, and fields that only
some servers know are sent to all of them.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.endpoint_worker.answer import ToldAnswer
from penstock.errors import REFUSED_PICTURES, REFUSED_TEXTS, AnswerInterrupted, InvalidRequest
from penstock.grammar.tools import ConstrainedCalls
from penstock.messages import ChatMessage, GrammarSpec, Request, Sampling

OPEN_MAX_TOKENS = 2**31 - 1
"""With `fit_context`, the limit of an answer that may be as long as there is room."""
STANDARD_FIELDS = ("presence_penalty", "frequency_penalty", "seed", "stop")
"""Fields of OpenAI's API. They are sent where they are not at their default."""
EXTRA_FIELDS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
"""Fields that vLLM and others have besides. They are sent where they are not at their default."""
CHARS_PER_TOKEN = 4
ANY_OBJECT = {"type": "object"}
"""The schema of an answer beside calls that was asked for as `json_object`."""
JSON_OBJECT = GrammarSpec(kind="json_object")


class Question(NamedTuple):
    """A POST to an endpoint."""

    path: str
    """The path below the endpoint's base address."""
    body: bytes
    is_continued: bool = False
    """Whether the answer so far is a part of the prompt, and the endpoint goes on with it."""
    continues_chat: bool = False
    """Whether the answer must continue the last turn of a chat, which not every server can do."""


def check_request(request: Request) -> None:
    """Raise `InvalidRequest` for a request that no endpoint could answer."""
    sampling, variables = request.sampling, request.chat_template_kwargs or {}
    if request.texts is not None:
        raise InvalidRequest(REFUSED_TEXTS)
    if request.pictures:
        raise InvalidRequest(REFUSED_PICTURES)
    is_chat, has_tools = request.messages is not None, bool(variables.get("tools"))
    refused = {
        "prompt_logprobs": (sampling.prompt_logprobs is not None, "leave it out"),
        "logprobs": (sampling.logprobs is not None and not is_chat, "it is for chats"),
        "tools": (has_tools and not sampling.special_text, "it needs special_text, the marks of calls"),
        "a grammar of calls": (
            sampling.grammar is not None and sampling.grammar.kind == "tools" and not has_tools, "it needs tools"
        ),
    }  # fmt: skip
    for name, (is_given, why) in refused.items():
        if is_given:
            raise InvalidRequest(f"{name} is not supported where an endpoint answers: {why}")


def build_question(request: Request, model: str, text: str = "", num_pieces: int = 0) -> Question:
    """Return the question for a request whose log has `text`, in `num_pieces` pieces.

    Each piece counts as a token of `max_tokens`. A chat that has told no content yet is asked for anew. Raises
    `AnswerInterrupted` if no endpoint can continue the text.
    """
    told = ToldAnswer.parse_log(text)
    is_chat = request.messages is not None
    is_continued = bool(told.content.strip() if is_chat else text)
    if is_continued:
        _check_continuable(request)
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if request.messages is not None:
        turns = request.messages
        if is_continued:
            so_far = ChatMessage(role="assistant", content=told.content, reasoning_content=told.reasoning or None)
            turns = [*turns, so_far]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        body["messages"] = [_map_turn(turn) for turn in turns]
        variables = dict(request.chat_template_kwargs or {})
        body |= {"tools": tools} if (tools := variables.pop("tools", None)) else {}
        body |= {"chat_template_kwargs": variables} if variables else {}
    else:
        body["prompt"] = request.token_ids if request.prompt is None else request.prompt + text
    body |= map_sampling(request.sampling, num_pieces, is_chat=is_chat)
    if request.sampling.grammar is not None:
        body |= map_grammar(request.sampling.grammar, body.get("tools") or ())
    encoded = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    path = "/chat/completions" if is_chat else "/completions"
    return Question(path, encoded, is_continued, is_chat and is_continued)


def _map_turn(turn: ChatMessage) -> dict[str, Any]:
    """Return a turn as OpenAI's API has it, and its reasoning under the names that servers have for that."""
    mapped = turn.model_dump(exclude_none=True)
    return mapped | ({"reasoning": turn.reasoning_content} if turn.reasoning_content is not None else {})


def _check_continuable(request: Request) -> None:
    grammar = request.sampling.grammar
    if request.token_ids is not None:
        raise AnswerInterrupted("its prompt is token ids, and text cannot be appended to these")
    if grammar is not None and (grammar.kind != "tools" or ConstrainedCalls.decode(grammar.source).answer is not None):
        raise AnswerInterrupted("a grammar would start again after the text so far")


def map_sampling(sampling: Sampling, num_pieces: int, *, is_chat: bool) -> dict[str, Any]:
    """Return the fields that say how to answer.

    Temperature and `top_p` are always sent, as servers have defaults of their own.
    """
    given: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if not (sampling.fit_context and sampling.max_tokens == OPEN_MAX_TOKENS):
        given["max_tokens"] = sampling.max_tokens - num_pieces
    elif not is_chat:  # without the field, 16 tokens are made
        given["max_tokens"] = None
    if sampling.min_tokens is not None and sampling.min_tokens > num_pieces:
        given["min_tokens"] = sampling.min_tokens - num_pieces
    for name in (*STANDARD_FIELDS, *EXTRA_FIELDS):
        value = getattr(sampling, name)
        if value != Sampling.model_fields[name].default:
            given[name] = value
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None:
        given |= {"logprobs": True} | ({"top_logprobs": sampling.logprobs} if sampling.logprobs else {})
    return given


def map_grammar(spec: GrammarSpec, tools: Sequence[Any]) -> dict[str, Any]:
    """Return OpenAI's fields for JSON and for calls of these `tools`, and vLLM's `structured_outputs` for all else."""
    match spec.kind:
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            return _map_schema(json.loads(spec.source))
        case "choice":
            return {"structured_outputs": {"choice": json.loads(spec.source)}}
        case "regex":
            return {"structured_outputs": {"regex": spec.source}}
        case "lark":
            return {"structured_outputs": {"grammar": spec.source}}
        case "tools":
            return map_calls(ConstrainedCalls.decode(spec.source), len(tools))


def map_calls(calls: ConstrainedCalls, num_tools: int) -> dict[str, Any]:
    """Return the fields that say which of `num_tools` tools an answer may or must call. Schemas are in the tools."""
    given: dict[str, Any] = {} if calls.is_parallel else {"parallel_tool_calls": False}
    named = [{"type": "function", "function": {"name": tool.name}} for tool in calls.tools]
    mode = "required" if calls.is_required else "auto"
    if len(named) == num_tools:
        given |= {"tool_choice": mode} if calls.is_required else {}
    elif calls.is_required and not calls.is_parallel and len(named) == 1:
        given = {"tool_choice": named[0]}
    else:
        given["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    if calls.answer is not None:
        given |= _map_schema(calls.answer) if calls.answer != ANY_OBJECT else map_grammar(JSON_OBJECT, ())
    return given


def _map_schema(schema: Any) -> dict[str, Any]:
    described = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def estimate_prompt_tokens(request: Request) -> int:
    """Return about how many tokens a prompt has, where the endpoint does not tell."""
    if request.token_ids is not None:
        return len(request.token_ids)
    texts = [request.prompt or "", *(turn.text for turn in request.messages or ())]
    return sum(map(len, texts)) // CHARS_PER_TOKEN + 1
