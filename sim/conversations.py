"""What people ask of the model that calls tools: bodies of chat completions, requests, and the parts of answers."""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import count, islice
from typing import Any

from penstock.client.core import make_request
from penstock.grammar.tools import ENDPOINT_TEMPLATE, MARK
from penstock.ingest.openai.answer_parser import AnswerParser, AnswerPart, AnswerPiece
from penstock.ingest.openai.chat import CHAT, ChatBody
from penstock.messages import Request
from sim.workload import TOOL_MODEL, load_tool_model
from tools.tool_corpus import Conversation, make_conversation

Body = dict[str, Any]
CALLING_KINDS = ("call", "parallel")
"""Kinds of conversations that the model answers with calls."""


def make_chat_bodies(number: int, tag: str, kinds: Sequence[str] = CALLING_KINDS) -> list[Body]:
    """Return `number` different bodies of `/v1/chat/completions` of those kinds, without a model."""
    return list(islice(_generate_chat_bodies(tag, kinds), number))


def _generate_chat_bodies(tag: str, kinds: Sequence[str]) -> Iterator[Body]:
    for seed in count():
        conversation = make_conversation(f"{tag} {seed}", held_out=True)
        if conversation.kind in kinds:
            yield make_chat_body(conversation)


def make_chat_body(conversation: Conversation) -> Body:
    """Return the body that asks for a conversation's answer. Which tool is called is left to the model."""
    body: Body = {"messages": [_encode_turn(turn) for turn in conversation.prompt]}
    if conversation.tools:
        body["tools"] = conversation.tools
    if conversation.options.get("enable_thinking"):
        body["chat_template_kwargs"] = {"enable_thinking": True}
    return body


def _encode_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn as OpenAI's clients send it: arguments are JSON, and a result has no name."""
    encoded = {name: value for name, value in turn.items() if name != "name"}
    if "tool_calls" in turn:
        encoded["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
            for call in turn["tool_calls"]
        ]
    return encoded


def make_chat_request(request_id: str, body: Body) -> Request:
    """Return the request that a gateway makes of a body for the tool model."""
    (args,) = CHAT.make_requests(ChatBody.model_validate({"model": str(TOOL_MODEL), **body}), request_id)
    args["special_text"] = True
    return make_request(args.pop("prompt", None), args)


def parse_answer(request: Request, texts: Iterable[str]) -> AnswerPart:
    """Return the calls, reasoning and content that a reader of these pieces of an answer is told."""
    if not request.sampling.special_text:
        return AnswerPart([AnswerPiece("content", "".join(texts))])
    texts, tools = list(texts), (request.chat_template_kwargs or {}).get("tools") or ()
    if MARK in "".join(texts):  # only endpoints' answers have it
        parser = AnswerParser(ENDPOINT_TEMPLATE, tools, "held")
    else:
        parser = AnswerParser(_read_response_template(), tools)
    parts = [parser.add_text(text) for text in texts]
    return sum([*parts, parser.end("")], AnswerPart())


@cache
def _read_response_template() -> dict[str, Any]:
    template = load_tool_model().response_template
    assert template is not None
    return template
