"""`/v1/streams/{id}`: any request's stream again, from any of its events on; and its end before its time."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel

from penstock.errors import StreamExpired
from penstock.ingest.gateway.handlers import errors
from penstock.ingest.gateway.state import CallerDep, gateway_of
from penstock.ingest.gateway.streaming import EVENTS, cancelled, event_stream
from penstock.ingest.openai.sse import Places

router = APIRouter()
EventId = Annotated[str | None, Header(max_length=8192)]


class StreamCancelled(BaseModel):
    """What became of the wish to end a stream."""

    id: str
    object: Literal["stream"] = "stream"
    cancelled: bool
    """False: it had ended already."""


@router.get(
    "/v1/streams/{stream_id}",
    summary="Read a stream, from the beginning or after an event",
    response_class=Response,
    responses={
        200: {
            "description": "The pieces after that event, as the POST that made the request streams them.",
            "content": EVENTS,
        },
        204: {"description": "That was the last event: a browser's EventSource stops."},
        **errors(400, 401, 404, 503),
    },
)
async def read(
    request: Request,
    caller: CallerDep,
    stream_id: str,
    last_event_id: EventId = None,
    after: Annotated[str | None, Query(alias="last_event_id", max_length=8192)] = None,
) -> Response:
    """The header `Last-Event-ID` goes before the parameter."""
    gateway = gateway_of(request)
    card = await gateway.cards.of_tenant(stream_id, caller.tenant)
    places = Places(len(card.request_ids), last_event_id or after)
    if places.is_over:
        return Response(status_code=204)
    client = gateway.client(card.pipeline)
    known = await asyncio.gather(*(client.status(card.request_ids[index]) for index in places.begun))
    if None in known:
        raise StreamExpired(f"the stream {stream_id} is gone")
    return event_stream(gateway, card, places)


async def cancel(request: Request, caller: CallerDep, stream_id: str) -> StreamCancelled:
    """Its readers are told with the next token."""
    gateway = gateway_of(request)
    card = await gateway.cards.of_tenant(stream_id, caller.tenant)
    return StreamCancelled(id=card.id, cancelled=await cancelled(gateway, card))


for path, method in (("/v1/streams/{stream_id}/cancel", "POST"), ("/v1/streams/{stream_id}", "DELETE")):
    router.add_api_route(
        path,
        cancel,
        methods=[method],
        operation_id=f"{method.lower()}_cancel",
        summary="Cancel a request",
        responses=errors(401, 404, 503),
    )
