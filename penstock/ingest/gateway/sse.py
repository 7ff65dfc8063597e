"""Server-sent events: a request's answer in pieces, from wherever its reader is.

Each event has an id (`penstock.ingest.openai.sse`), so a connection that ended goes on anywhere: after the client,
a worker or this process died. Events come from the logs in Redis; nothing is kept here. A reader that is slow is waited
for, and what comes meanwhile is dropped and read again (`AsyncClient.news`): it costs what is on its way to its socket.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from penstock.client.core import Event
from penstock.errors import PenstockError, RequestError, StreamDiverged, StreamExpired
from penstock.ingest.errors import ApiError, api_error
from penstock.ingest.gateway.state import Gateway
from penstock.ingest.openai import ENDPOINTS, prompt_of
from penstock.ingest.openai.cursor import Telling, Told
from penstock.ingest.openai.endpoint import Card
from penstock.ingest.openai.sse import DONE, Places
from penstock.messages import Usage

log = logging.getLogger(__name__)

RETRY_MS = 500
"""How soon a browser comes back."""
KEEP_ALIVE = b": keep-alive\n"
"""One line: the SDKs take an empty line after an id for an event, even if there is nothing in it."""
Ended = Callable[[Usage | None], Awaitable[None]]


class Feed:
    """One connection's part of a stream."""

    def __init__(self, gateway: Gateway, card: Card, places: Places, ended: Ended) -> None:
        """`ended` is awaited when the answer is complete, or has failed, with what was used if all of it has ended."""
        self._gateway, self._card, self._ended = gateway, card, ended
        self._telling = Telling(ENDPOINTS[card.path], card, places)
        self.is_over = False
        """Whether everything was told that is told over this connection: who leaves now does not leave early."""

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """What goes over the wire."""
        yield f"retry: {RETRY_MS}\n".encode()
        try:
            async with aclosing(self._told()) as told:
                async for sent in told:
                    yield sent
        except PenstockError as error:
            self.is_over = True
            is_last = isinstance(error, (RequestError, StreamDiverged, StreamExpired))
            if isinstance(error, RequestError):
                await self._ended(self._telling.usage if self._telling.has_ended else None)
            yield error_frame(api_error(error, prompt_of(self._card.path)), is_last=is_last)
        except Exception:
            log.exception("stream %s", self._card.id)
            self.is_over = True
            yield error_frame(ApiError(500, "internal error", code="internal_error"), is_last=True)

    async def _told(self) -> AsyncGenerator[bytes, None]:
        yield frames(self._telling.open())
        said_at = time.monotonic()
        async with aclosing(self._news()) as news:
            async for index, events in news:
                sent, error = self._tell(index, events)
                if sent:
                    yield sent
                    said_at = time.monotonic()
                elif time.monotonic() > said_at + self._gateway.settings.keep_alive_s:
                    yield KEEP_ALIVE
                    said_at = time.monotonic()
                if error is not None:
                    raise error
                if self._gateway.is_stopping and not self._telling.has_ended:
                    message = f"this gateway stops: go on at /v1/streams/{self._card.id}, after the last event's id"
                    raise ApiError(503, message, code="gateway_stopping")
        await self._ended(self._telling.usage)
        self.is_over = True
        yield frames(self._telling.close())

    def _tell(self, index: int, events: list[Event]) -> tuple[bytes, PenstockError | None]:
        """What events of a choice add, up to an error if there is one."""
        sent = bytearray()
        try:
            for event in events:
                sent += frames(self._telling.event(index, event))
        except PenstockError as error:
            return bytes(sent), error
        return bytes(sent), None

    async def _news(self) -> AsyncGenerator[tuple[int, list[Event]], None]:
        """The events of all choices as they come, from the beginning; an empty list now and then in a silence."""
        streams = self._gateway.news(self._card)
        if len(streams) == 1:
            async with aclosing(streams[0]) as only:
                async for events in only:
                    yield 0, events
            return
        async with aclosing(_merged(streams)) as merged:
            async for index, events in merged:
                yield index, events


async def _merged(streams: list[AsyncGenerator[list[Event], None]]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """What all streams give, with their places; at most one list of each is waiting."""
    queue: asyncio.Queue[tuple[int, list[Event] | BaseException | None]] = asyncio.Queue(1)

    async def pump(index: int) -> None:
        try:
            async with aclosing(streams[index]) as stream:
                async for events in stream:
                    await queue.put((index, events))
            await queue.put((index, None))
        except Exception as error:  # raised by whoever reads
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(streams))]
    try:
        num_left = len(tasks)
        while num_left:
            index, events = await queue.get()
            if isinstance(events, BaseException):
                raise events
            if events is None:
                num_left -= 1
            else:
                yield index, events
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def frames(told: Sequence[Told]) -> bytes:
    """Events as they go over the wire."""
    return b"".join(map(_frame, told))


def _frame(told: Told) -> bytes:
    event_id, piece = told
    place = f"id: {event_id}\n" if event_id else ""
    kind = f"event: {piece.event}\n" if piece.event else ""
    return f"{place}{kind}data: {piece.data}\n\n".encode()


def error_frame(error: ApiError, *, is_last: bool) -> bytes:
    """An error in the middle of a stream, from which the SDKs raise. After the last one a browser comes no more."""
    event_id = f"id: {DONE}\n" if is_last else ""
    return f"{event_id}event: error\ndata: {error.body.model_dump_json()}\n\n".encode()
