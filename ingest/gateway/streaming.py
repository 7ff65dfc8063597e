"""A stream as the answer to a request, and what is left to do when it is over."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ingest.admission import Ticket
from ingest.gateway.sse import Feed
from ingest.gateway.state import Gateway
from ingest.openai.endpoint import Card
from ingest.openai.places import Places
from penstock.errors import BusUnavailable
from penstock.messages import Usage

_EVENT: dict[str, Any] = {
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
EVENTS = {"text/event-stream": {"schema": _EVENT}}
"""Of an answer that is a stream, for a route's documentation."""


def event_stream(
    gateway: Gateway, card: Card, places: Places, ticket: Ticket | None = None, *, cancel_on_leaving: bool = False
) -> "EventStream":
    """The answer that tells what comes after `places`."""

    async def ended(usage: Usage) -> None:
        await settled(gateway, card, ticket, usage)

    async def left() -> None:
        if cancel_on_leaving:
            await cancelled(gateway, card)

    return EventStream(Feed(gateway, card, places, ended), card.id, left)


async def settled(gateway: Gateway, card: Card, ticket: Ticket | None, usage: Usage) -> None:
    """A request is over: what it used is known, and its card lives as long as its records.

    Where Redis is away meanwhile the estimate stands, and the card lives longer.
    """
    with suppress(BusUnavailable):
        if ticket is not None:
            await gateway.admission.settle(ticket, usage)
        await gateway.cards.ended(card)


async def cancelled(gateway: Gateway, card: Card) -> bool:
    """Ask for the end of all its requests; whether one of them had not ended yet. Raises `BusUnavailable`."""
    client = gateway.client(card.pipeline)
    return any(await asyncio.gather(*(client.cancel(request_id) for request_id in card.request_ids)))


class EventStream(StreamingResponse):
    """Server-sent events. `left` is awaited if the client goes before everything was told."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, stream_id: str, left: Callable[[], Awaitable[None]]) -> None:
        headers = {
            "x-request-id": stream_id,
            "location": f"/v1/streams/{stream_id}",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self._frames = feed.frames()
        super().__init__(self._frames, headers=headers)
        self._feed, self._left = feed, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell it, until the end or until the client leaves."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._frames.aclose()
        if not self._feed.is_over:
            with suppress(BusUnavailable):
                await self._left()
