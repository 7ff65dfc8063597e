"""Data of the page: `/v1/live`, the state of the pipeline, and `/v1/requests/{id}/timeline`, one request's spans."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from penstock.ingest.gateway.state import CallerDep, Gateway, get_gateway
from penstock.ingest.http.handlers import error_responses
from penstock.ingest.streaming.answers import EVENT_STREAM_CONTENT
from penstock.names import Pipeline
from penstock.redis.client import translate_outages
from penstock.telemetry.timeline import PLACEMENT_ATTRIBUTE, Timeline, TimelineShare, read_timeline_async

router = APIRouter()


class Span(BaseModel):
    """A part of a request's way. Times are seconds since the epoch."""

    name: str
    service: str
    start_s: float
    end_s: float
    id: str
    parent: str | None
    """The id of the span around it."""
    attributes: dict[str, Any]


class Life(BaseModel):
    """The spans of one request of the pipeline."""

    id: str
    start_s: float | None = None
    answered_s: float | None = None
    """When its end could be read; null before."""
    latency_s: float | None = None
    spans: list[Span] = []
    """In the order of their start. Spans arrive some moments after they ended, and are kept for
    `PENSTOCK_TRACE_KEEP_S`."""
    account: list[TimelineShare] = []
    """The whole time, from its start, without gap or overlap."""


class LifeList(BaseModel):
    """The spans of a request's choices."""

    id: str
    object: Literal["timeline"] = "timeline"
    choices: list[Life]


@router.get(
    "/v1/live",
    summary="Watch the pipeline, a look a second",
    response_class=Response,
    responses={
        200: {
            "description": "Events `look` with JSON: lag and latencies, and where no keys are asked for workers, "
            "lost workers, hits and rates; `unavailable` while bus or Redis cannot be reached.",
            "content": EVENT_STREAM_CONTENT,
        },
        **error_responses(401, 503),
    },
)
async def live(
    request: Request, caller: CallerDep, looks: Annotated[int | None, Query(ge=1, le=1_000_000)] = None
) -> Response:
    """`looks`: end after this many. All readers of a gateway see the same states; callers with a key, a summary."""
    gateway = get_gateway(request)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(_stream_snapshots(gateway, looks), headers=headers, media_type="text/event-stream")


async def _stream_snapshots(gateway: Gateway, max_snapshots: int | None) -> AsyncGenerator[bytes, None]:
    async with aclosing(gateway.broadcast.read_frames(is_whole=gateway.keyring.is_open)) as frames:
        number = 0
        async for frame in frames:
            yield frame
            number += not frame.startswith(b":")  # a comment is no look
            if number == max_snapshots or gateway.is_stopping:
                return


@router.get(
    "/v1/requests/{request_id}/timeline",
    summary="What a request went through",
    responses=error_responses(401, 404, 503),
)
async def life(request: Request, caller: CallerDep, request_id: str) -> LifeList:
    """From its trace, the spans of each choice; empty if none has arrived yet, or they are not kept any more."""
    gateway = get_gateway(request)
    meta = await gateway.stream_metas.find_of_tenant(request_id, caller.tenant)
    pipeline = Pipeline(meta.pipeline)
    with translate_outages():
        reads = (read_timeline_async(gateway.servers[one], pipeline, one) for one in meta.request_ids)
        found = await asyncio.gather(*reads)
    return LifeList(
        id=meta.id,
        choices=[
            _make_life(one, line, is_whole=gateway.keyring.is_open)
            for one, line in zip(meta.request_ids, found, strict=True)
        ],
    )


def _make_life(request_id: str, line: Timeline | None, *, is_whole: bool) -> Life:
    """Return what a caller may see of a request: where keys are asked for, nothing of the workers' backlog."""
    if line is None:
        return Life(id=request_id)
    for span in () if is_whole else line.spans:
        span["attributes"].pop(PLACEMENT_ATTRIBUTE, None)
    return Life.model_validate({"id": request_id, **line.as_json()})
