"""The routes that make requests, one for each endpoint; and `/v1/models`."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock.errors import BusUnavailable, RequestError
from penstock.ingest.admission import Ticket
from penstock.ingest.endpoints import ENDPOINTS
from penstock.ingest.gateway.accept import RequestHeaders, RequestHeadersDep, accept_request
from penstock.ingest.gateway.fallback import PIPELINE_HEADER
from penstock.ingest.gateway.kept_responses import KeptResponse
from penstock.ingest.gateway.responses import describe_response, prepare_response
from penstock.ingest.gateway.state import CallerDep, Gateway, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.http.metrics import ACCEPTED_KEY, ARRIVAL_KEY, REGION_KEY, SPAN_KEY
from penstock.ingest.ignored import IGNORED_HEADER, strip_ignored_fields
from penstock.ingest.models import ServedModel
from penstock.ingest.openai.body import read_json
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta, Task
from penstock.ingest.openai.responses import ResponseBody
from penstock.ingest.openai.sse import ResumePoint
from penstock.ingest.openai.texts import TextsEndpoint
from penstock.ingest.openai.tokens import sum_usage
from penstock.ingest.retention import find_retention
from penstock.ingest.streaming.answers import (
    EVENT_STREAM_CONTENT,
    make_event_stream,
    read_answers,
    read_parts,
    settle_after_end,
    settle_request,
)
from penstock.telemetry import tracing

router = APIRouter()
T = TypeVar("T")
CLIENT_GONE_STATUS = 499
"""The status if the client has left, which nothing receives."""


def add_route(endpoint: ApiEndpoint[Any]) -> None:
    """Add the route of an endpoint."""

    async def create(request: Request, caller: CallerDep, headers: RequestHeadersDep) -> Response:
        gateway, fields = get_gateway(request), read_json(await request.body())
        body, (_, ignored) = endpoint.parse_body(fields), strip_ignored_fields(endpoint.path, fields)
        # Each field that asks for a retention is in the list of those that are ignored where they name no time.
        retain_s, heeded = find_retention(fields) if ignored else (None, set[str]())
        ignored = [name for name in ignored if name not in heeded]
        arrived_s = request.scope[ARRIVAL_KEY]
        about = request.scope.get(REGION_KEY)
        with tracing.start_server_span(request.headers, endpoint.path, arrived_s, about) as span:
            request.scope[SPAN_KEY] = span  # it ends with the answer
            input_items, earlier = None, None
            if isinstance(body, ResponseBody):
                body, input_items, earlier = await prepare_response(gateway, caller.tenant, body)
            meta, ticket, loosened = await accept_request(
                gateway, caller, headers, endpoint, body, arrived_s, input_items, earlier, retain_s
            )
            request.scope[ACCEPTED_KEY] = True
        if ticket is None:
            await gateway.unread.note_reader(meta)
        response: Response
        if isinstance(body, ResponseBody) and body.background and not body.wants_stream:
            response = await _answer_in_background(gateway, meta, ticket)
        elif body.wants_stream:
            resume_point = ResumePoint(len(meta.request_ids))
            is_cancelled = headers.x_penstock_cancel_on_disconnect
            response = make_event_stream(gateway, meta, resume_point, ticket, cancel_on_leaving=is_cancelled)
        else:
            response = await _answer_whole(request, gateway, endpoint, meta, ticket, headers)
        if ticket is not None:
            response.headers.update(ticket.headers)
        response.headers["request-id"] = meta.id
        if caller.fallback:
            response.headers[PIPELINE_HEADER] = meta.pipeline
        if ignored or loosened:
            response.headers[IGNORED_HEADER] = ", ".join([*ignored, *loosened])
        return response

    schema = {"$ref": f"#/components/schemas/{endpoint.body_model.__name__}"}
    router.add_api_route(
        endpoint.path,
        create,
        methods=["POST"],
        name=endpoint.path.removeprefix("/v1").strip("/").replace("/", "_"),
        summary=(endpoint.body_model.__doc__ or "").partition("\n")[0],
        response_model=None,
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        responses={
            200: {
                "model": endpoint.answer_model,
                "description": "The answer; with `stream`, its pieces as server-sent events.",
                "content": EVENT_STREAM_CONTENT,
                "headers": {
                    "x-request-id": {"schema": {"type": "string"}, "description": "The answer's id."},
                    "request-id": {
                        "schema": {"type": "string"},
                        "description": "The same, for Anthropic's SDKs.",
                    },
                    IGNORED_HEADER: {
                        "schema": {"type": "string"},
                        "description": "What has no effect here: fields of the body, and keywords of tools' schemas.",
                    },
                    "location": {"schema": {"type": "string"}, "description": "Where the stream can be read again."},
                },
            },
            **error_responses(400, 401, 403, 404, 409, 413, 429, 500, 503, 504, model=endpoint.error_model),
        },
    )


for one_endpoint in ENDPOINTS.values():
    add_route(one_endpoint)


async def _answer_in_background(gateway: Gateway, meta: StreamMeta, ticket: Ticket | None) -> Response:
    """Return the response as it is now; it goes on by itself."""
    if ticket is not None:
        gateway.run_later(settle_after_end(gateway, meta, ticket))
    described = await describe_response(gateway, KeptResponse(meta, None))
    answer_headers = {"x-request-id": meta.id, "location": f"/v1/streams/{meta.id}"}
    return Response(described.model_dump_json(), 200, answer_headers, "application/json")


async def _answer_whole(
    request: Request,
    gateway: Gateway,
    endpoint: ApiEndpoint[Any],
    meta: StreamMeta,
    ticket: Ticket | None,
    headers: RequestHeaders,
) -> Response:
    """Return the whole answer. If the client leaves before, the request goes on unless its headers say otherwise."""
    try:
        reading = read_parts if isinstance(endpoint, TextsEndpoint) else read_answers
        answers = await run_unless_gone(request, reading(gateway, meta))
    except RequestError:
        if ticket is not None:
            gateway.run_later(settle_after_end(gateway, meta, ticket))
        raise
    if answers is None:
        if ticket is not None and ticket.has_bucket_tokens:
            gateway.run_later(settle_after_end(gateway, meta, ticket))
        with suppress(BusUnavailable):
            if headers.x_penstock_cancel_on_disconnect:
                await gateway.cancel_requests(meta)
            else:
                await gateway.unread.note_left(meta)
        return Response(status_code=CLIENT_GONE_STATUS)
    await settle_request(gateway, meta, ticket, sum_usage(answer.usage for answer in answers))
    answer_headers = {"x-request-id": meta.id, "location": f"/v1/streams/{meta.id}"}
    if isinstance(endpoint, TextsEndpoint):  # thousands of vectors take a second
        answer = await asyncio.to_thread(lambda: endpoint.make_answer(meta, answers).model_dump_json())
    else:
        answer = endpoint.make_answer(meta, answers).model_dump_json()
    return Response(answer, 200, answer_headers, "application/json")


async def run_unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if the client left before."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Since when it is served, as far as its workers know."""
    owned_by: str = "penstock"
    parent: str | None = None
    """The model that this one is a LoRA adapter of, under vLLM's name for it."""
    max_model_len: int | None = None
    """The most tokens of prompt and answer together, under vLLM's name for it."""
    supports_tools: bool = False
    """Whether calls and reasoning can be told from its text, so that tools may be offered to it."""
    sees: bool = False
    """Whether it takes images."""
    own: bool = True
    """Whether workers of the gateway's own pipeline serve it."""
    task: Task = "generate"
    """What it does: `embed` computes vectors of texts, `score` scores them by a query."""
    dimensions: int | None = None
    """How many numbers a vector has."""
    matryoshka: list[int] | None = None
    """To how many numbers vectors may be cut; empty: to any."""
    pooling: str | None = None
    """How a text's vector is made of those of its tokens."""
    prompts: dict[str, str] | None = None
    """The prompts that may be put before each text, by their names."""
    default_prompt: str | None = None
    """The name of the prompt of texts for which none is named; empty: none."""


class ModelList(BaseModel):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


def _describe_model(gateway: Gateway, served: ServedModel) -> Model:
    return Model(
        id=served.name,
        created=int(served.since_s),
        max_model_len=served.max_model_len,
        supports_tools=served.response_template is not None,
        own=served.pipeline == gateway.addresses.pipeline,
        **served.card,
    )


@router.get("/v1/models", summary="All models", responses=error_responses(401, 503))
async def all_models(request: Request, caller: CallerDep) -> ModelList:
    """The models that workers serve, those of the gateway's own pipeline first."""
    gateway = get_gateway(request)
    return ModelList(data=[_describe_model(gateway, served) for served in await gateway.models.list_models()])


@router.get("/v1/models/{model:path}", summary="One model", responses=error_responses(401, 404, 503))
async def one_model(request: Request, caller: CallerDep, model: str) -> Model:
    """By its name."""
    gateway = get_gateway(request)
    return _describe_model(gateway, await gateway.models.find_model(model))
