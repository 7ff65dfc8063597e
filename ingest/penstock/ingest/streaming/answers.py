"""A stream as the answer to a request, and what is done when it has ended."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.client.core import Answer, Event, build_answer, raise_on_error
from penstock.errors import BusUnavailable, Cancelled, PenstockError, RequestError
from penstock.ingest.admission import Ticket
from penstock.ingest.batch.answer import gather_answers
from penstock.ingest.http.metrics import STREAM_KEY, GatewayMetrics
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.openai.sse import ResumePoint
from penstock.ingest.openai.tokens import sum_usage
from penstock.ingest.streaming.sse import StreamFeed
from penstock.ingest.streaming.state import Streams
from penstock.messages import EndEvent, Usage

_EVENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "One event.",
    "required": ["data"],
    "properties": {
        "id": {"type": "string", "description": "The stream goes on after it with `Last-Event-ID`."},
        "event": {"type": "string"},
        "data": {"type": "string", "description": "JSON, or `[DONE]`."},
        "retry": {"type": "integer"},
    },
}
EVENT_STREAM_CONTENT = {"text/event-stream": {"schema": _EVENT_SCHEMA}}
"""An event stream in a route's documentation."""


def make_event_stream(
    streams: Streams,
    meta: StreamMeta,
    resume_point: ResumePoint,
    ticket: Ticket | None = None,
    *,
    cancel_on_leaving: bool = False,
    after_number: int = -1,
    whole_log: list[Event] | None = None,
) -> "EventStream":
    """Return the answer with the events after `resume_point`; the last two arguments are those of `StreamFeed`."""

    def settle_later() -> None:
        if ticket is not None:
            streams.run_later(settle_after_end(streams, meta, ticket))

    async def on_ended(usage: Usage | None) -> None:
        if usage is None:
            settle_later()
        else:
            await settle_request(streams, meta, ticket, usage)

    async def on_left() -> None:
        if ticket is not None and ticket.has_bucket_tokens:
            settle_later()
        if cancel_on_leaving:
            await streams.cancel_requests(meta)
        else:
            await streams.unread.note_left(meta)

    feed = StreamFeed(streams, meta, resume_point, on_ended, after_number=after_number, whole_log=whole_log)
    return EventStream(feed, meta.id, on_left, streams.metrics)


async def settle_request(streams: Streams, meta: StreamMeta, ticket: Ticket | None, usage: Usage) -> None:
    """Settle a request that has ended, with its usage; its meta data then lives as long as its records.

    If Redis is away, the estimate stands, and the meta data lives longer.
    """
    with suppress(BusUnavailable):
        if ticket is not None:
            await streams.admission.settle(ticket, usage)
        await streams.stream_metas.note_ended(meta)


async def settle_after_end(streams: Streams, meta: StreamMeta, ticket: Ticket) -> None:
    """Settle a request when it has ended, although no client reads it until then.

    Its client left, or got the error of one of several choices.
    """
    with suppress(PenstockError):  # then the estimate stands
        usages = await asyncio.gather(*map(_read_usage, streams.read_events(meta)))
        await settle_request(streams, meta, ticket, sum_usage(usages))


async def read_answers(streams: Streams, meta: StreamMeta) -> list[Answer]:
    """Return the answers to all its requests when they are complete. The first error ends the reading of the others."""
    return await gather_answers(
        [
            _read_answer(request_id, updates)
            for request_id, updates in zip(meta.request_ids, streams.read_events(meta), strict=True)
        ]
    )


async def read_parts(streams: Streams, meta: StreamMeta) -> list[Answer]:
    """Return as `read_answers`, and cancel the other requests at the first error: an answer needs all of them.

    Where an earlier reader has cancelled requests, the error of another one is raised, as it was there.
    """
    pairs = zip(meta.request_ids, streams.read_events(meta), strict=True)
    tasks = [asyncio.create_task(_read_answer(request_id, updates)) for request_id, updates in pairs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [error for task in tasks if task.done() and (error := task.exception()) is not None]
        if any(isinstance(error, RequestError) and not isinstance(error, Cancelled) for error in failed):
            with suppress(BusUnavailable):
                await streams.cancel_requests(meta)
        elif failed:
            await asyncio.wait(tasks)
            failed = [error for task in tasks if (error := task.exception()) is not None]
        if failed:
            raise min(failed, key=lambda error: isinstance(error, Cancelled))
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _read_answer(request_id: str, updates: AsyncGenerator[list[Event], None]) -> Answer:
    async with aclosing(updates):
        return build_answer(request_id, [event async for events in updates for event in raise_on_error(events)])


async def _read_usage(updates: AsyncGenerator[list[Event], None]) -> Usage:
    """Return the usage of a request, also of one that failed."""
    async with aclosing(updates):
        async for events in updates:
            if events and isinstance(events[-1], EndEvent):
                return events[-1].usage
    return Usage()


class EventStream(StreamingResponse):
    """Server-sent events. `on_left` is awaited if the client leaves before everything was sent."""

    media_type = "text/event-stream"

    def __init__(
        self, feed: StreamFeed, stream_id: str, on_left: Callable[[], Awaitable[None]], metrics: GatewayMetrics
    ) -> None:
        headers = {
            "x-request-id": stream_id,
            "location": f"/v1/streams/{stream_id}",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self._frames = feed.read_frames()
        super().__init__(self._frames, headers=headers)
        self._feed, self._on_left, self._metrics = feed, on_left, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin the answer, and leave the rest to the outermost layer."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self.raw_headers = []
        scope[STREAM_KEY] = partial(self.send_events, send)

    async def send_events(self, send: Send, receive: Receive) -> None:
        """Send the events, until the end or until the client leaves."""
        until_left = asyncio.timeout(None)
        with self._metrics.count_reader():
            try:
                async with until_left:
                    leaving = asyncio.create_task(self._end_when_left(receive, until_left))
                    try:
                        async for frame in self._frames:
                            await send({"type": "http.response.body", "body": frame, "more_body": True})
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
                    finally:
                        leaving.cancel()
            except TimeoutError:
                if not until_left.expired():
                    raise
            finally:
                await self._frames.aclose()
        if not self._feed.is_over:
            with suppress(BusUnavailable):
                await self._on_left()

    async def _end_when_left(self, receive: Receive, until_left: asyncio.Timeout) -> None:
        await self.listen_for_disconnect(receive)
        until_left.reschedule(asyncio.get_running_loop().time())
