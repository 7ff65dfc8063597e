"""A stream as the answer to a request, and what is left to do when it is over."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.client.core import Answer, Event, build_answer, raise_on_error
from penstock.errors import BusUnavailable, PenstockError
from penstock.ingest.admission import Ticket
from penstock.ingest.batch.answer import together
from penstock.ingest.gateway.metrics import GatewayFigures
from penstock.ingest.gateway.sse import Feed
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.openai.endpoint import Card
from penstock.ingest.openai.sse import Places
from penstock.ingest.openai.tokens import total
from penstock.messages import EndEvent, Usage

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

    def settle_later() -> None:
        if ticket is not None:
            gateway.later(settled_at_the_end(gateway, card, ticket))

    async def ended(usage: Usage | None) -> None:
        if usage is None:
            settle_later()
        else:
            await settled(gateway, card, ticket, usage)

    async def left() -> None:
        if ticket is not None and ticket.is_of_bucket:
            settle_later()
        if cancel_on_leaving:
            await cancelled(gateway, card)

    return EventStream(Feed(gateway, card, places, ended), card.id, left, gateway.figures)


async def settled(gateway: Gateway, card: Card, ticket: Ticket | None, usage: Usage) -> None:
    """A request is over: what it used is known, and its card lives as long as its records.

    Where Redis is away meanwhile the estimate stands, and the card lives longer.
    """
    with suppress(BusUnavailable):
        if ticket is not None:
            await gateway.admission.settle(ticket, usage)
        await gateway.cards.ended(card)


async def settled_at_the_end(gateway: Gateway, card: Card, ticket: Ticket) -> None:
    """The same where nobody reads until then: the client left, or was told of an error of one of several choices."""
    with suppress(PenstockError):  # then the estimate stands
        usages = await asyncio.gather(*map(_used, gateway.news(card)))
        await settled(gateway, card, ticket, total(usages))


async def whole(gateway: Gateway, card: Card) -> list[Answer]:
    """The answers to all its requests, once they are complete. The first error ends the reading of the others."""
    return await together(
        [_whole(request_id, news) for request_id, news in zip(card.request_ids, gateway.news(card), strict=True)]
    )


async def _whole(request_id: str, news: AsyncGenerator[list[Event], None]) -> Answer:
    async with aclosing(news):
        return build_answer(request_id, [event async for events in news for event in raise_on_error(events)])


async def _used(news: AsyncGenerator[list[Event], None]) -> Usage:
    """What a request used, whatever its end is like."""
    async with aclosing(news):
        async for events in news:
            if events and isinstance(events[-1], EndEvent):
                return events[-1].usage
    return Usage()


async def cancelled(gateway: Gateway, card: Card) -> bool:
    """Ask for the end of all its requests; whether one of them had not ended yet. Raises `BusUnavailable`."""
    client = gateway.client(card.pipeline)
    return any(await asyncio.gather(*(client.cancel(request_id) for request_id in card.request_ids)))


class EventStream(StreamingResponse):
    """Server-sent events. `left` is awaited if the client goes before everything was told."""

    media_type = "text/event-stream"

    def __init__(
        self, feed: Feed, stream_id: str, left: Callable[[], Awaitable[None]], figures: GatewayFigures
    ) -> None:
        headers = {
            "x-request-id": stream_id,
            "location": f"/v1/streams/{stream_id}",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self._frames = feed.frames()
        super().__init__(self._frames, headers=headers)
        self._feed, self._left, self._figures = feed, left, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell it, until the end or until the client leaves."""
        with self._figures.reading():
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._frames.aclose()
        if not self._feed.is_over:
            with suppress(BusUnavailable):
                await self._left()
