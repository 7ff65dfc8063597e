"""The question to an endpoint: a request of the pipeline as a body of OpenAI's API.

No part of a request is left out silently: a part without a field in the API is refused by name, and fields that only
some servers know are sent to all of them.
"""

import json
from typing import Any, NamedTuple

from penstock.errors import AnswerInterrupted, InvalidRequest, UnknownModel
from penstock.messages import GrammarSpec, Request, Sampling
from penstock.names import PriorityClass

OPEN_MAX_TOKENS = 2**31 - 1
"""With `fit_context`, the limit of an answer that may be as long as there is room."""
STANDARD_FIELDS = ("presence_penalty", "frequency_penalty", "seed", "stop")
"""Fields of OpenAI's API. They are sent where they are not at their default."""
EXTRA_FIELDS = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos")
"""Fields that vLLM and others have besides. They are sent where they are not at their default."""
CHARS_PER_TOKEN = 4


class Question(NamedTuple):
    """A POST to an endpoint."""

    path: str
    """The path below the endpoint's base address."""
    body: bytes
    continues_chat: bool = False
    """Whether the answer must continue the last turn of a chat, which not every server can do."""


def check_request(request: Request, priority_class: PriorityClass, model: str) -> None:
    """Raise `InvalidRequest` for a request that no endpoint could answer, and `UnknownModel` for another model."""
    sampling, variables = request.sampling, request.chat_template_kwargs or {}
    if request.priority_class not in (None, priority_class):
        raise InvalidRequest(f"class {request.priority_class!r} in the topic of class {priority_class!r}")
    if request.model not in (None, model):
        raise UnknownModel(f"this pipeline serves {model!r}, not {request.model!r}")
    refused = {
        "tools": "tools" in variables,
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "special_text": sampling.special_text is not None,
        "a grammar of calls": sampling.grammar is not None and sampling.grammar.kind == "tools",
    }
    for name, is_given in refused.items():
        if is_given:
            raise InvalidRequest(f"{name} is not supported where an endpoint answers: its answers are text alone")


def build_question(request: Request, model: str, text: str = "", num_pieces: int = 0) -> Question:
    """Return the question for a request whose answer so far is `text`, in `num_pieces` pieces.

    Each piece counts as a token of `max_tokens`. Raises `AnswerInterrupted` if no endpoint can continue the text.
    """
    if num_pieces:
        _check_continuable(request)
    is_chat = request.messages is not None
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if request.messages is not None:
        body["messages"] = [turn.model_dump(exclude_none=True) for turn in request.messages]
        if request.chat_template_kwargs:
            body["chat_template_kwargs"] = request.chat_template_kwargs
        if num_pieces:
            body["messages"].append({"role": "assistant", "content": text})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        body["prompt"] = request.token_ids if request.prompt is None else request.prompt + text
    body |= map_sampling(request.sampling, num_pieces, is_chat=is_chat)
    encoded = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return Question("/chat/completions" if is_chat else "/completions", encoded, is_chat and num_pieces > 0)


def _check_continuable(request: Request) -> None:
    if request.token_ids is not None:
        raise AnswerInterrupted("its prompt is token ids, and text cannot be appended to these")
    if request.sampling.grammar is not None:
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
    return given | ({} if sampling.grammar is None else map_grammar(sampling.grammar))


def map_grammar(spec: GrammarSpec) -> dict[str, Any]:
    """Return OpenAI's `response_format` for JSON, and vLLM's `structured_outputs` for all else."""
    match spec.kind:
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {"name": "answer", "schema": json.loads(spec.source), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "choice":
            return {"structured_outputs": {"choice": json.loads(spec.source)}}
        case "regex":
            return {"structured_outputs": {"regex": spec.source}}
        case "lark":
            return {"structured_outputs": {"grammar": spec.source}}
        case "tools":
            raise InvalidRequest("a grammar of calls is not supported where an endpoint answers")


def estimate_prompt_tokens(request: Request) -> int:
    """Return about how many tokens a prompt has, where the endpoint does not tell."""
    if request.token_ids is not None:
        return len(request.token_ids)
    texts = [request.prompt or "", *(turn.content for turn in request.messages or ())]
    return sum(map(len, texts)) // CHARS_PER_TOKEN + 1
