"""The routes that make requests: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from penstock.errors import BusUnavailable, RequestError
from penstock.ingest.admission import Ticket
from penstock.ingest.gateway.accept import Wishes, WishesDep, accept
from penstock.ingest.gateway.handlers import errors
from penstock.ingest.gateway.metrics import CAME_S
from penstock.ingest.gateway.models import Served
from penstock.ingest.gateway.state import CallerDep, Gateway, gateway_of
from penstock.ingest.gateway.streaming import EVENTS, cancelled, event_stream, settled, settled_at_the_end, whole
from penstock.ingest.openai import ENDPOINTS
from penstock.ingest.openai.endpoint import Card, Endpoint
from penstock.ingest.openai.sse import Places
from penstock.ingest.openai.tokens import total
from penstock.telemetry import tracing

router = APIRouter()
T = TypeVar("T")
GONE = 499
"""Nobody reads this status: its client has left."""


def add_route(endpoint: Endpoint[Any]) -> None:
    """The route of one of OpenAI's endpoints."""

    async def create(request: Request, caller: CallerDep, wishes: WishesDep) -> Response:
        gateway, body = gateway_of(request), endpoint.parse(await request.body())
        with tracing.continue_trace(request.headers):
            card, ticket = await accept(gateway, caller, wishes, endpoint, body, request.scope[CAME_S])
        response: Response
        if body.stream:
            places = Places(len(card.request_ids))
            is_cancelled = wishes.x_penstock_cancel_on_disconnect
            response = event_stream(gateway, card, places, ticket, cancel_on_leaving=is_cancelled)
        else:
            response = await _whole(request, gateway, endpoint, card, ticket, wishes)
        if ticket is not None:
            response.headers.update(ticket.headers)
        return response

    schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
    router.add_api_route(
        endpoint.path,
        create,
        methods=["POST"],
        name=endpoint.path.rpartition("/v1/")[2].replace("/", "_"),
        summary=(endpoint.body.__doc__ or "").partition("\n")[0],
        response_model=None,
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        responses={
            200: {
                "model": endpoint.answer,
                "description": "The answer; with `stream`, its pieces as server-sent events.",
                "content": EVENTS,
                "headers": {
                    "x-request-id": {"schema": {"type": "string"}, "description": "The answer's id."},
                    "location": {"schema": {"type": "string"}, "description": "Where the stream can be read again."},
                },
            },
            **errors(400, 401, 403, 404, 409, 413, 429, 500, 503, 504),
        },
    )


for one in ENDPOINTS.values():
    add_route(one)


async def _whole(
    request: Request, gateway: Gateway, endpoint: Endpoint[Any], card: Card, ticket: Ticket | None, wishes: Wishes
) -> Response:
    """The answer as a whole. A client that leaves before is no reason to end the request, unless it said so."""
    try:
        answers = await _unless_gone(request, whole(gateway, card))
    except RequestError:
        if ticket is not None:
            gateway.later(settled_at_the_end(gateway, card, ticket))
        raise
    if answers is None:
        if ticket is not None and ticket.is_of_bucket:
            gateway.later(settled_at_the_end(gateway, card, ticket))
        if wishes.x_penstock_cancel_on_disconnect:
            with suppress(BusUnavailable):
                await cancelled(gateway, card)
        return Response(status_code=GONE)
    await settled(gateway, card, ticket, total(answer.usage for answer in answers))
    headers = {"x-request-id": card.id, "location": f"/v1/streams/{card.id}"}
    return Response(endpoint.whole(card, answers).model_dump_json(), 200, headers, "application/json")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What comes of `work`; None when the client left before."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Since when it is served, as far as its workers know."""
    owned_by: str = "penstock"
    max_model_len: int | None = None
    """The most tokens of prompt and answer together, as vLLM tells it."""


class ModelList(BaseModel):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


def _model(served: Served) -> Model:
    return Model(id=served.name, created=int(served.since_s), max_model_len=served.max_model_len)


@router.get("/v1/models", summary="All models", responses=errors(401, 503))
async def all_models(request: Request, caller: CallerDep) -> ModelList:
    """What workers say they serve."""
    return ModelList(data=[_model(served) for served in await gateway_of(request).models.all()])


@router.get("/v1/models/{model:path}", summary="One model", responses=errors(401, 404, 503))
async def one_model(request: Request, caller: CallerDep, model: str) -> Model:
    """By its name."""
    return _model(await gateway_of(request).models.find(model))
