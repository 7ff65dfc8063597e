"""`/tokenize` and `/detokenize` for one of the served models, and `/version`, all as vLLM has them.

And `/v1/messages/count_tokens` and `/v1/responses/input_tokens`, as Anthropic and OpenAI have them.
"""

from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, StringConstraints, model_validator

from penstock.ingest.anthropic.messages import MESSAGES, CountTokensBody, MessageErrorBody, MessageTokenCount
from penstock.ingest.errors import ApiError
from penstock.ingest.gateway.responses import prepare_response
from penstock.ingest.gateway.state import CallerDep, Gateway, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.models import ServedModel
from penstock.ingest.openai import CHAT, RESPONSES, ApiEndpoint
from penstock.ingest.openai.body import StrictModel, parse_body
from penstock.ingest.openai.endpoint import B, build_request
from penstock.ingest.openai.responses import ResponseBody
from penstock.ingest.tenants import Caller
from penstock.messages import TokenId

router = APIRouter()
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class TokenizeBody(StrictModel):
    """A text, or a chat, to tokenize. One of `prompt` and `messages` is given."""

    model: ModelName | None = None
    """One of those that `/v1/models` lists; may be left out if there is only one."""
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """Turns as in `/v1/chat/completions`, with text alone."""
    add_special_tokens: bool | None = None
    """Whether to add the tokens that begin each text; by default to a prompt, and not to a chat: its template does."""
    add_generation_prompt: bool = True
    """Whether a chat ends with the beginning of the model's turn."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of 'prompt' and 'messages' must be given")
        return self


class DetokenizeBody(StrictModel):
    """Tokens to write as text."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


BODY_MODELS = (TokenizeBody, DetokenizeBody, CountTokensBody)


class TokenizeAnswer(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int | None
    """The most tokens of prompt and answer together, if the workers say it."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """How the vocabulary writes each."""


class DetokenizeAnswer(BaseModel):
    """The text of tokens."""

    prompt: str


class InputTokenCount(BaseModel):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Version(BaseModel):
    """The version of this server."""

    version: str


def _describe_body(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_STATUSES = (400, 401, 404, 413, 429, 501, 503)
_ERRORS = error_responses(*_STATUSES)


@router.post("/tokenize", summary="The tokens of a text", responses=_ERRORS, openapi_extra=_describe_body(TokenizeBody))
async def tokenize(request: Request, caller: CallerDep) -> TokenizeAnswer:
    """Tokens of a prompt or a chat, as the model gets it. It counts as a request."""
    gateway, body = get_gateway(request), parse_body(TokenizeBody, await request.body())
    await gateway.admission.take_request(caller)
    served = await _find_served(gateway, body.model)
    with_strs = bool(body.return_token_strs)
    if body.messages is not None:
        chat = CHAT.parse_body({"model": served.name, "messages": body.messages})
        (args,) = CHAT.make_requests(chat, "tokenize")
        tokens = await gateway.tokenizers.encode_chat(
            served.source,
            build_request(args).messages or (),
            special=bool(body.add_special_tokens),
            generation_prompt=body.add_generation_prompt,
            with_strs=with_strs,
            response_template=served.response_template,
        )
    else:
        special = body.add_special_tokens is not False
        tokens = await gateway.tokenizers.encode_text(
            served.source, body.prompt or "", special=special, with_strs=with_strs
        )
    return TokenizeAnswer(
        count=len(tokens.token_ids),
        max_model_len=served.max_model_len,
        tokens=tokens.token_ids,
        token_strs=tokens.token_strs,
    )


@router.post(
    "/detokenize", summary="The text of tokens", responses=_ERRORS, openapi_extra=_describe_body(DetokenizeBody)
)
async def detokenize(request: Request, caller: CallerDep) -> DetokenizeAnswer:
    """With the text of special tokens. It counts as a request."""
    gateway, body = get_gateway(request), parse_body(DetokenizeBody, await request.body())
    await gateway.admission.take_request(caller)
    served = await _find_served(gateway, body.model)
    return DetokenizeAnswer(prompt=await gateway.tokenizers.decode_tokens(served.source, body.tokens))


@router.post(
    "/v1/messages/count_tokens",
    summary="How many tokens a prompt of messages has",
    responses=error_responses(*_STATUSES, model=MessageErrorBody),
    openapi_extra=_describe_body(CountTokensBody),
)
async def count_message_tokens(request: Request, caller: CallerDep) -> MessageTokenCount:
    """Tokens of all that `/v1/messages` makes a prompt of, as the model gets it. It counts as a request."""
    gateway, body = get_gateway(request), parse_body(CountTokensBody, await request.body(), MESSAGES.path)
    await gateway.admission.take_request(caller)
    return MessageTokenCount(input_tokens=await _count_tokens(gateway, caller, MESSAGES, body.make_chat()))


@router.post(
    "/v1/responses/input_tokens",
    summary="How many tokens a response's prompt has",
    responses=error_responses(*_STATUSES, 500, 504),
    openapi_extra=_describe_body(ResponseBody),
)
async def count_response_tokens(request: Request, caller: CallerDep) -> InputTokenCount:
    """Tokens of all that `/v1/responses` makes a prompt of, earlier responses included. It counts as a request."""
    gateway, body = get_gateway(request), RESPONSES.parse_body(await request.body())
    await gateway.admission.take_request(caller)
    body, *_ = await prepare_response(gateway, caller.tenant, body)
    return InputTokenCount(input_tokens=await _count_tokens(gateway, caller, RESPONSES, body))


async def _count_tokens(gateway: Gateway, caller: Caller, endpoint: ApiEndpoint[B], body: B) -> int:
    """Return how many tokens the prompt of a chat has, those of its pictures included. Raises `PenstockError`."""
    served = await gateway.models.find_model(body.model)
    (args,) = endpoint.make_requests(body, "count", sees=served.sees)
    read = await gateway.pictures.read_pictures(caller.tenant, [args])
    rule = served.picture_tokens
    if read.pictures and rule is None:
        message = f"The workers of {served.name!r} do not say how many tokens an image becomes."
        raise ApiError(501, message, code="tokens_unknown", headers={"x-should-retry": "false"})
    turns, variables = build_request(args).messages or (), args.get("chat_template_kwargs")
    tokens = await gateway.tokenizers.encode_chat(
        served.source, turns, variables, response_template=served.response_template
    )
    # The template writes one token for each picture.
    return len(tokens.token_ids) - len(read.pictures) + read.count_tokens(rule)


@router.get("/version", summary="The server's version", responses=error_responses(401, 503))
async def show_version(caller: CallerDep) -> Version:
    """Version of the gateway."""
    return Version(version=version("penstock"))


async def _find_served(gateway: Gateway, name: str | None) -> ServedModel:
    """Return the model of this name, or the only one. Raises `ApiError`."""
    if name is not None:
        return await gateway.models.find_model(name)
    served = await gateway.models.list_models()
    if len(served) > 1:
        names = ", ".join(one.name for one in served)[:500]
        raise ApiError(400, f"'model' must be one of {names}", param="model", code="missing_required_parameter")
    return await gateway.models.find_model(served[0].name if served else "")
