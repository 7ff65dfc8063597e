"""`/v1/streams/{id}`: read any request's stream again, after any of its events; or cancel the request."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import BaseModel

from penstock.errors import StreamExpired
from penstock.ingest.gateway.state import CallerDep, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.openai.sse import ResumePoint
from penstock.ingest.streaming.answers import EVENT_STREAM_CONTENT, make_event_stream

router = APIRouter()
EventId = Annotated[str | None, Header(max_length=8192)]


class StreamCancelled(BaseModel):
    """The outcome of a cancellation."""

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
            "content": EVENT_STREAM_CONTENT,
        },
        204: {"description": "That was the last event: a browser's EventSource stops."},
        **error_responses(400, 401, 404, 503),
    },
)
async def read(
    request: Request,
    caller: CallerDep,
    stream_id: str,
    last_event_id: EventId = None,
    after: Annotated[str | None, Query(alias="last_event_id", max_length=8192)] = None,
) -> Response:
    """The header `Last-Event-ID` takes precedence over the parameter."""
    gateway = get_gateway(request)
    meta = await gateway.stream_metas.find_of_tenant(stream_id, caller.tenant)
    resume_point = ResumePoint(len(meta.request_ids), last_event_id or after)
    if resume_point.is_over:
        return Response(status_code=204)
    client = gateway.get_client(meta.pipeline)
    statuses = await asyncio.gather(*(client.status(meta.request_ids[index]) for index in resume_point.started_choices))
    if None in statuses and not meta.is_adopted:  # of such a request the reader may have seen more than workers here
        raise StreamExpired(f"the stream {stream_id} is gone")
    await gateway.unread.note_reader(meta)
    return make_event_stream(gateway, meta, resume_point)


async def cancel(request: Request, caller: CallerDep, stream_id: str) -> StreamCancelled:
    """Its readers get the error with the next token."""
    gateway = get_gateway(request)
    meta = await gateway.stream_metas.find_of_tenant(stream_id, caller.tenant)
    return StreamCancelled(id=meta.id, cancelled=await gateway.cancel_requests(meta))


for path, method in (("/v1/streams/{stream_id}/cancel", "POST"), ("/v1/streams/{stream_id}", "DELETE")):
    router.add_api_route(
        path,
        cancel,
        methods=[method],
        operation_id=f"{method.lower()}_cancel",
        summary="Cancel a request",
        responses=error_responses(401, 404, 503),
    )
